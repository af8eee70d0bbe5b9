"""Writes tiny models as checkpoints, slowly and simply, for the tests of loading."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
BIASED, NORMED, SHARED = ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe"), ("qwen2_moe",)
GGUF_ARCHITECTURES = {"mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""The architectures that GGUF files state, where they differ from the family."""


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """Returns a config.json as written by transformers 4.

    All sizes differ, so that mixing up two is detected.
    """
    config = {
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family.endswith("moe"):
        sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        config |= sizes | {"norm_topk_prob": family not in SHARED}
    if family in SHARED:
        config["shared_expert_intermediate_size"] = 28
    return config | changes


def hf_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Returns random float32 tensors under Hugging Face's names."""
    c = config
    d, f, h = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
        }
        if "num_experts" in c:
            layer |= mlp_shapes(d, c["moe_intermediate_size"], *experts_of(c))
            layer["mlp.gate.weight"] = (c["num_experts"], d)
        else:
            layer |= mlp_shapes(d, f, "mlp")
        if c["model_type"] in SHARED:
            layer |= mlp_shapes(d, c["shared_expert_intermediate_size"], "mlp.shared_expert")
            layer["mlp.shared_expert_gate.weight"] = (1, d)
        if c["model_type"] in BIASED:
            layer |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if c["model_type"] in NORMED:
            layer |= {f"self_attn.{p}_norm.weight": (h,) for p in "qk"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def experts_of(config: dict[str, Any]) -> list[str]:
    """Returns the names of a layer's experts."""
    return [f"mlp.experts.{e}" for e in range(config["num_experts"])]


def mlp_shapes(d: int, f: int, *names: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of MLPs."""
    shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
    return {f"{name}.{p}_proj.weight": shapes[p] for name in names for p in shapes}


def expected_weights(config: dict[str, Any], t: Tensors) -> dict[str, Any]:
    """Builds the decoder's tree from those tensors by hand."""

    def layer(i: int) -> dict[str, Any]:
        p = f"model.layers.{i}."
        qkv = [t[f"{p}self_attn.{which}_proj.weight"].T for which in "qkv"]
        attention: dict[str, Any] = {
            "qkv": {"kernel": np.concatenate(qkv, axis=1)},
            "o": {"kernel": t[p + "self_attn.o_proj.weight"].T},
        }
        if config["model_type"] in BIASED:
            attention["qkv"]["bias"] = np.concatenate(
                [t[f"{p}self_attn.{which}_proj.bias"] for which in "qkv"]
            )
        if config["model_type"] in NORMED:
            attention |= {
                f"{which}_norm": {"scale": t[f"{p}self_attn.{which}_norm.weight"]} for which in "qk"
            }

        def gate_up(name: str) -> np.ndarray:
            return np.concatenate([t[f"{p}{name}.{w}_proj.weight"].T for w in ("gate", "up")], 1)

        def down(name: str) -> np.ndarray:
            return t[f"{p}{name}.down_proj.weight"].T

        if "num_experts" in config:
            names = experts_of(config)
            mlp: dict[str, Any] = {
                "router": {"rows": t[p + "mlp.gate.weight"]},
                "experts": {
                    "gate_up": np.stack([gate_up(name) for name in names]),
                    "down": np.stack([down(name) for name in names]),
                },
            }
        else:
            mlp = {"gate_up": {"kernel": gate_up("mlp")}, "down": {"kernel": down("mlp")}}
        if config["model_type"] in SHARED:
            mlp["shared"] = {
                "gate_up": {"kernel": gate_up("mlp.shared_expert")},
                "down": {"kernel": down("mlp.shared_expert")},
                "gate": {"rows": t[p + "mlp.shared_expert_gate.weight"]},
            }
        return {
            "attention": attention,
            "attention_norm": {"scale": t[p + "input_layernorm.weight"]},
            "mlp": mlp,
            "mlp_norm": {"scale": t[p + "post_attention_layernorm.weight"]},
        }

    params = {
        "embed": t["model.embed_tokens.weight"],
        "final_norm": {"scale": t["model.norm.weight"]},
        **{f"layers_{i}": layer(i) for i in range(config["num_hidden_layers"])},
    }
    if not config["tie_word_embeddings"]:
        params["lm_head"] = t["lm_head.weight"].T
    return {"params": params}


def write_folder(
    folder: Path, config: dict[str, Any], tensors: Tensors, num_shards: int = 1
) -> Path:
    """Writes config.json and safetensors with the format's own library.

    There is an index if there are shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def write_raw_safetensors(
    file: Path, header: Any, values: bytes = b"", length: int | None = None
) -> Path:
    """Writes a file with an arbitrary header (JSON of an object, or bytes) and header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + values
    )
    return file


def interleave_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts a head's rows in llama.cpp's order for Llama: 0, H/2, 1, H/2 + 1, ..."""
    heads = weight.reshape(num_heads, -1, weight.shape[1])
    half = heads.shape[1] // 2
    mixed = [heads[:, row + part * half] for row in range(half) for part in (0, 1)]
    return np.stack(mixed, axis=1).reshape(weight.shape)


def architecture_of(config: dict[str, Any]) -> str:
    """Returns the architecture that the model's GGUF files state."""
    family: str = config["model_type"]
    return GGUF_ARCHITECTURES.get(family, family)


def gguf_name(config: dict[str, Any], name: str) -> str:
    """Returns the GGUF name of a Hugging Face name, as in the gguf package."""
    kinds = {arch: kind for kind, arch in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture_of(config)], config["num_hidden_layers"])
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None
    return found


def with_stacked_experts(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Joins the experts' tensors of a layer, and leaves off axes of size 1, as llama.cpp does."""
    if "num_experts" not in config:
        return tensors
    made = {n: x[0] if len(x) == 1 else x for n, x in tensors.items() if ".experts." not in n}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for end in (f"{which}_proj.weight" for which in ("gate", "up", "down")):
            stacked = [tensors[f"{p}{name}.{end}"] for name in experts_of(config)]
            made[f"{p}mlp.experts.{end}"] = np.stack(stacked)
    return made


def write_gguf(
    file: Path,
    config: dict[str, Any],
    tensors: Tensors,
    *,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: Tensors | None = None,
    metadata: dict[str, Any] | None = None,
    tokens: list[str] | None = None,
    settings: dict[str, int | float | str] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes a GGUF file in the layout of llama.cpp's converter, with the format's own library.

    Args:
        file: the file to write.
        config: an hf_config.
        tensors: tensors under Hugging Face's names; they are stored as float32.
        raw: bytes [rows, bytes per row] and type that replace some of the tensors.
        extra: tensors under GGUF's names.
        metadata: integers that replace those of the config or are added, by their names without the
            architecture.
        tokens: a vocabulary; None: the file has no tokenizer.
        settings: general.sampling keys, without that prefix.
        split_max_tensors: the number of tensors in each of several files; 0: one file has all.
    """
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split_max_tensors)
    integers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if "num_experts" in config:
        integers |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        }
    integers |= metadata or {}
    for key, value in integers.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    if tokens is not None:
        writer.add_token_list(tokens)
    add = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
    for key, value in (settings or {}).items():
        add[type(value)](f"general.sampling.{key}", value)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in with_stacked_experts(config, tensors).items():
        if raw and name in raw:
            data, kind = raw[name]
            writer.add_tensor(gguf_name(config, name), data, raw_dtype=kind)
            continue
        if architecture == "llama" and name.endswith("q_proj.weight"):
            tensor = interleave_halves(tensor, config["num_attention_heads"])
        if architecture == "llama" and name.endswith("k_proj.weight"):
            tensor = interleave_halves(tensor, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(config, name), np.ascontiguousarray(tensor))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def assert_refused(
    model: str | os.PathLike[str], match: str, error: type[Exception] = ValueError
) -> str:
    """Checks that loading raises a one-line error that matches, and returns its message."""
    from jsparse.models.checkpoint import load

    with pytest.raises(error, match=match) as caught:
        load(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Rows of a multiple of 256 values, required by the K and IQ types; a family with q and k stored in
# plain order.
WIDE = hf_config("qwen3", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
PACKAGE_CAN = [
    kind
    for kind in gguf.GGML_QUANT_SIZES
    if kind.name in ("F32", "F16")
    or kind in gguf.quants._type_traits  # the package has no public list
]
SMALL = hf_config("llama", num_hidden_layers=1)
TENSORS = hf_tensors(SMALL)
