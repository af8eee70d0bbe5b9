"""Differences between model families when loading: config fields and tensor names.

Names of weights are paths in the decoder's tree ("layers_{i}/mlp/down/kernel"). Each maps to the
checkpoint's tensors for it, in the order in which they are joined.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from jsparse.models.config import ModelConfig, refuse, require, whole_field
from jsparse.models.expert_fields import experts_from_gguf, experts_from_hf
from jsparse.models.quantization_config import scheme_of
from jsparse.models.rope_scaling import rope_from_gguf, rope_from_hf
from jsparse.models.sliding_windows import Windows, refuse_gguf_window, windows_from_hf

Names = dict[str, tuple[str, ...]]


class Family(NamedTuple):
    """One model family.

    Attributes:
        name: config.json's `model_type`.
        hf_names, gguf_names: the tensor names per weight; those of a tied lm_head or an absent bias
            are unused.
        switches: the ModelConfig fields with the same value in all its models.
        without, required: fields that config.json must not set, and additional fields that it must
            have.
        windows: whether config.json's sliding window applies.
        experts: whether layers have experts, and beside them a shared one; None: an MLP.
        gguf_name: GGUF's `general.architecture`; None: `name`.
        gguf_interleaved: whether GGUF orders the rows of q and k for a rotation of neighbours.
    """

    name: str
    hf_names: Names
    gguf_names: Names
    switches: Mapping[str, bool] = {}
    without: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    windows: Windows = "never"
    experts: Literal["chosen", "shared"] | None = None
    gguf_name: str | None = None
    gguf_interleaved: bool = False

    def config_from_hf(self, config: dict[str, Any]) -> ModelConfig:
        for field in self.without:
            refuse(config, field, (False,))
        for field in self.required:
            require(config, field)
        windows, sizes = windows_from_hf(config, self.windows), sizes_from_hf(config)
        if self.experts:
            sizes["experts"] = experts_from_hf(config, shared=self.experts == "shared")
        return ModelConfig(family=self.name, windows=windows, **self.switches, **sizes)

    def config_from_gguf(
        self, metadata: Mapping[str, Any], tensor_names: Collection[str]
    ) -> ModelConfig:
        fields = gguf_fields(metadata)
        sizes = sizes_from_gguf(fields, tensor_names)
        if self.experts:
            sizes["experts"] = experts_from_gguf(fields, shared=self.experts == "shared")
        else:
            refuse(fields, "expert_count", (0,))
        return ModelConfig(family=self.name, **self.switches, **sizes)


HF_NAMES: Names = {
    "embed": ("model.embed_tokens.weight",),
    "lm_head": ("lm_head.weight",),
    "final_norm/scale": ("model.norm.weight",),
    "layers_{i}/attention_norm/scale": ("model.layers.{i}.input_layernorm.weight",),
    "layers_{i}/attention/qkv/kernel": tuple(
        f"model.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkv"
    ),
    "layers_{i}/attention/o/kernel": ("model.layers.{i}.self_attn.o_proj.weight",),
    "layers_{i}/mlp_norm/scale": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers_{i}/mlp/gate_up/kernel": (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    ),
    "layers_{i}/mlp/down/kernel": ("model.layers.{i}.mlp.down_proj.weight",),
}

GGUF_NAMES: Names = {
    "embed": ("token_embd.weight",),
    "lm_head": ("output.weight",),
    "final_norm/scale": ("output_norm.weight",),
    "layers_{i}/attention_norm/scale": ("blk.{i}.attn_norm.weight",),
    "layers_{i}/attention/qkv/kernel": tuple(f"blk.{{i}}.attn_{p}.weight" for p in "qkv"),
    "layers_{i}/attention/o/kernel": ("blk.{i}.attn_output.weight",),
    "layers_{i}/mlp_norm/scale": ("blk.{i}.ffn_norm.weight",),
    "layers_{i}/mlp/gate_up/kernel": ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"),
    "layers_{i}/mlp/down/kernel": ("blk.{i}.ffn_down.weight",),
}


_MLP = "model.layers.{i}.mlp"
HF_EXPERTS: Names = {
    "layers_{i}/mlp/router/rows": (f"{_MLP}.gate.weight",),
    "layers_{i}/mlp/experts/gate_up": tuple(
        f"{_MLP}.experts.{{e}}.{which}_proj.weight" for which in ("gate", "up")
    ),
    "layers_{i}/mlp/experts/down": (f"{_MLP}.experts.{{e}}.down_proj.weight",),
    "layers_{i}/mlp/shared/gate_up/kernel": tuple(
        f"{_MLP}.shared_expert.{which}_proj.weight" for which in ("gate", "up")
    ),
    "layers_{i}/mlp/shared/down/kernel": (f"{_MLP}.shared_expert.down_proj.weight",),
    "layers_{i}/mlp/shared/gate/rows": (f"{_MLP}.shared_expert_gate.weight",),
}

MEMORY_EXPERTS: Names = {
    "layers_{i}/mlp/experts/gate_up": (f"{_MLP}.experts.gate_up_proj",),
    "layers_{i}/mlp/experts/down": (f"{_MLP}.experts.down_proj",),
}
"""The names of a model in memory since transformers 5, which joins the experts' tensors."""

GGUF_EXPERTS: Names = {
    "layers_{i}/mlp/router/rows": ("blk.{i}.ffn_gate_inp.weight",),
    "layers_{i}/mlp/experts/gate_up": (
        "blk.{i}.ffn_gate_exps.weight",
        "blk.{i}.ffn_up_exps.weight",
    ),
    "layers_{i}/mlp/experts/down": ("blk.{i}.ffn_down_exps.weight",),
    "layers_{i}/mlp/shared/gate_up/kernel": (
        "blk.{i}.ffn_gate_shexp.weight",
        "blk.{i}.ffn_up_shexp.weight",
    ),
    "layers_{i}/mlp/shared/down/kernel": ("blk.{i}.ffn_down_shexp.weight",),
    "layers_{i}/mlp/shared/gate/rows": ("blk.{i}.ffn_gate_inp_shexp.weight",),
}

_BIAS = "layers_{i}/attention/qkv/bias"
_Q_NORM, _K_NORM = "layers_{i}/attention/q_norm/scale", "layers_{i}/attention/k_norm/scale"
_WITH_BIAS = (
    {_BIAS: tuple(f"model.layers.{{i}}.self_attn.{p}_proj.bias" for p in "qkv")},
    {_BIAS: tuple(f"blk.{{i}}.attn_{p}.bias" for p in "qkv")},
)
_WITH_NORMS = (
    {
        _Q_NORM: ("model.layers.{i}.self_attn.q_norm.weight",),
        _K_NORM: ("model.layers.{i}.self_attn.k_norm.weight",),
    },
    {_Q_NORM: ("blk.{i}.attn_q_norm.weight",), _K_NORM: ("blk.{i}.attn_k_norm.weight",)},
)
_FAMILIES = (
    # Llama 2 and 3.x and models of the same architecture (SmolLM2)
    Family(
        "llama",
        HF_NAMES,
        GGUF_NAMES,
        without=("attention_bias", "mlp_bias"),
        gguf_interleaved=True,
    ),
    # a Llama, whose GGUF files state "llama"
    Family("mistral", HF_NAMES, GGUF_NAMES, windows="stated", gguf_interleaved=True),
    # Qwen2 and Qwen2.5
    Family(
        "qwen2",
        HF_NAMES | _WITH_BIAS[0],
        GGUF_NAMES | _WITH_BIAS[1],
        switches={"qkv_bias": True},
        windows="switched",
    ),
    # its head_dim does not follow from hidden_size
    Family(
        "qwen3",
        HF_NAMES | _WITH_NORMS[0],
        GGUF_NAMES | _WITH_NORMS[1],
        switches={"qk_norm": True},
        without=("attention_bias",),
        required=("head_dim",),
        windows="switched",
    ),
    Family(
        "qwen2_moe",
        HF_NAMES | _WITH_BIAS[0] | HF_EXPERTS,
        GGUF_NAMES | _WITH_BIAS[1] | GGUF_EXPERTS,
        switches={"qkv_bias": True},
        experts="shared",
        gguf_name="qwen2moe",
    ),
    Family(
        "qwen3_moe",
        HF_NAMES | _WITH_NORMS[0] | HF_EXPERTS,
        GGUF_NAMES | _WITH_NORMS[1] | GGUF_EXPERTS,
        switches={"qk_norm": True},
        without=("attention_bias",),
        required=("head_dim",),
        experts="chosen",
        gguf_name="qwen3moe",
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}
"""The supported families, by name."""
GGUF_FAMILIES = {family.gguf_name or family.name: family for family in _FAMILIES}
"""The same, by GGUF's `general.architecture`."""


def sizes_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields common to every config.json, under ModelConfig's names."""
    scheme_of(config)  # raises if the checkpoint is quantized in an unsupported way
    refuse(config, "hidden_act", ("silu",))
    for fields in (config, config.get("rope_parameters") or {}):
        refuse(fields, "partial_rotary_factor", (1, 1.0))
    hidden, heads = (whole_field(config, key) for key in ("hidden_size", "num_attention_heads"))
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    return {
        "vocab_size": require(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(config, "intermediate_size"),
        "num_layers": require(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "rms_norm_eps": require(config, "rms_norm_eps"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        **rope_from_hf(config),
    }


def gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of the model's architecture, without its prefix."""
    prefix = f"{metadata['general.architecture']}."
    fields = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    fields.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None)
    return fields


def sizes_from_gguf(fields: dict[str, Any], tensor_names: Collection[str]) -> dict[str, Any]:
    """Returns the fields common to all GGUF files, under ModelConfig's names.

    The embedding is tied if there is no tensor `output.weight`.
    """
    refuse_gguf_window(fields)
    hidden, heads = require(fields, "embedding_length"), require(fields, "attention.head_count")
    head_dim = fields.get("attention.key_length") or hidden // heads
    refuse(fields, "attention.value_length", (head_dim,))
    refuse(fields, "rope.dimension_count", (head_dim,))
    return {
        "vocab_size": require(fields, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(fields, "feed_forward_length"),
        "num_layers": require(fields, "block_count"),
        "num_heads": heads,
        "num_kv_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": require(fields, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        **rope_from_gguf(fields),
    }
