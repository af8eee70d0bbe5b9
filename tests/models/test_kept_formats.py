"""Tests models whose matrices stay in the formats of their files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from typer.testing import CliRunner

import jsparse
from jsparse.benchmark.random_model import form_at_of, random_model
from jsparse.cli.app import app
from jsparse.evaluation.info import describe
from jsparse.models.checkpoint import Params, load, save, spread
from jsparse.models.families import FAMILIES
from jsparse.models.quantized import name_of
from jsparse.models.transformer import random_weights
from jsparse.models.weight_plan import parse_weights, plan_weights
from jsparse.models.weight_reading import memory_needed
from jsparse.models.weights import TensorSource, Weight, list_weights
from jsparse.pallas_kernels.weight_blocks import FORMS, Form
from tests.models.test_gguf_blocks import random_rows
from tests.models.test_quantized import numbers_of
from tests.support.programs import shared
from tests.support.small_training import trainer
from tests.support.tiny import tiny_params
from tests.support.writers import (
    expected_weights,
    hf_config,
    hf_tensors,
    interleave_halves,
    write_gguf,
)

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 1,
}
CONFIG = hf_config("llama", **SIZES)
MIXTURE = {"v_proj": "q6_k", "down_proj": "q6_k", "lm_head": "q6_k"}
Q4_K, Q6_K, AWQ = FORMS["q4_k"], FORMS["q6_k"], Form(4, 128, "float16", mins=True)
JOINED = Form(6, 16, "int8", supers=True, mins=True)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels for every format."""
    monkeypatch.setattr("jsparse.models.weight_plan.no_kernel", lambda *_: None)


def written(file, kinds):
    """Writes a model of random bytes: Q4_K, or other types by a part of the name."""
    tensors, raw = hf_tensors(CONFIG), {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim < 2:
            continue
        kind = next((kind for part, kind in kinds.items() if part in name), "q4_k")
        rows, numbers = random_rows(kind, *tensor.shape, seed=seed)
        tensors[name], rows = numbers, rows.reshape(len(rows), -1)
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            rows = interleave_halves(rows, heads) if part in name else rows
        raw[name] = rows, Kind[kind.upper()]
    return write_gguf(file, CONFIG, tensors, raw=raw), expected_weights(CONFIG, tensors)


def test_matrices_stay_in_the_formats_of_a_file(kernels, tmp_path):
    file, expected = written(tmp_path / "m.gguf", MIXTURE)
    kept = load(file, dtype="float32")
    assert repr(kept).endswith("q4_k, q6_k and float32)")
    assert kept.forms == {Q4_K, Q6_K, JOINED}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(numbers_of)(kept.weights), expected)


def test_matrices_are_widened_without_kernels(tmp_path):
    file, expected = written(tmp_path / "m.gguf", MIXTURE)
    for weights in (None, "auto", "plain"):
        wide = load(file, dtype="float32", weights=weights)
        assert not wide.forms
        jax.tree.map(np.testing.assert_array_equal, wide.weights, expected)
    told = describe(str(file), dtype="float32")
    assert {row["format"] for row in told["weight_formats"]} == {"float32"}
    assert {row["reason"] for row in told["weight_formats"]} == {"a kernel needs an NVIDIA GPU"}
    assert told["device_weight_bytes"] == sum(x.nbytes for x in jax.tree.leaves(wide.weights))


def test_stored_matrices_stay_without_kernels(tmp_path):
    file, expected = written(tmp_path / "m.gguf", MIXTURE)
    kept = load(file, dtype="float32", weights="stored")
    assert kept.forms == {Q4_K, Q6_K, JOINED}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(numbers_of)(kept.weights), expected)


def test_info_describes_the_formats_that_loading_gives(kernels, tmp_path):
    kinds = {"v_proj": "q5_1", "down_proj": "q5_1", "up_proj": "q5_k"}
    file, expected = written(tmp_path / "m.gguf", kinds)
    asked = ["info", str(file), "--dtype", "float32"]
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    size = 256 * 256
    assert told["weight_formats"] == [
        {"stored": "q4_k", "format": "q4_k", "reason": "", "matrices": 3}
        | {"bytes": (2 * 40 * 256 + size) * 37 // 64},
        {"stored": "q4_k and q5_1", "format": "float32", "matrices": 1, "bytes": 2 * size * 4}
        | {"reason": "joins tensors of different formats"},
        {"stored": "q4_k and q5_k", "format": "q5_k", "reason": "", "matrices": 1}
        | {"bytes": 2 * size * 45 // 64},
        {"stored": "q5_1", "format": "float32", "matrices": 1, "bytes": size * 4}
        | {"reason": "no kernel reads this format"},
    ]
    shown = " ".join(CliRunner().invoke(app, asked).stdout.split())
    assert "1 matrix in float32, 256.00 KiB, from q5_1 (no kernel reads this format)" in shown
    assert "tokens, in q4_k, q5_k and float32" in shown
    ours = load(file, dtype="float32")
    assert told["types"] == ours.types
    assert told["device_weight_bytes"] == sum(x.nbytes for x in jax.tree.leaves(ours.weights))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(numbers_of)(ours.weights), expected)
    on_two = describe(str(file), dtype="float32", tensor_parallel_size=2)["weight_formats"]
    reasons = {row["stored"]: row["reason"] for row in on_two}
    rule = "sums over 256 numbers: must be a multiple of 512 on 2 devices"
    assert reasons["q4_k"] == rule


def test_info_names_the_dtype_in_which_absent_files_are_counted(tmp_path):
    quantized = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    shown = CliRunner().invoke(app, ["info", str(tmp_path)]).stdout
    assert "files are not here: counted in float32, quantized or not" in " ".join(shown.split())


def test_info_describes_what_loading_keeps_on_hopper(monkeypatch, tmp_path):
    monkeypatch.setattr("jsparse.pallas_kernels.quantized_product.api.no_mosaic", lambda: None)
    file, _ = written(tmp_path / "m.gguf", MIXTURE)
    told = describe(str(file), dtype="bfloat16")
    assert told["types"] == load(file, dtype="bfloat16").types == "q4_k, q6_k and bfloat16"
    widened = {row["reason"] for row in told["weight_formats"] if row["format"] == "bfloat16"}
    of_vocabulary = "takes an output size that 64 divides and a width that 64 divides, not 40 and"
    assert widened == {f"a kernel {of_vocabulary} 256"}
    assert describe(str(file), dtype="float16")["types"] == "float16"


@pytest.mark.parametrize("weights", ["plain", "q8_0"])
def test_large_tensors_are_read_in_slices(weights, monkeypatch, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG))
    whole = load(file, dtype="float32", weights=weights)
    monkeypatch.setattr("jsparse.models.weight_reading.SLICE", 9 * 256)  # 9 rows of 40 or 256
    sliced = load(file, dtype="float32", weights=weights)
    assert sliced.types == whole.types
    jax.tree.map(np.testing.assert_array_equal, sliced.weights, whole.weights)


@shared
def mixed():
    """A model in Q4_K_M that two devices can share, and its numbers."""
    config = replace(
        tiny_params(num_layers=1).config,
        hidden_size=256,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    )
    weights = random_weights(config, jnp.float32, form_at=form_at_of("q4_k_m", config))
    kept = Params(weights, config, None, {}, "mixed")
    return kept, replace(kept, weights=jax.jit(numbers_of)(weights))


def test_logits_match_those_of_the_widened_model_on_any_number_of_devices():
    kept, wide = mixed()
    expected = jsparse.logits(wide, [[3, 1, 4]])
    for params in (kept, spread(kept, 2)):
        assert params.forms == {Q4_K, Q6_K, JOINED}
        np.testing.assert_allclose(jsparse.logits(params, [[3, 1, 4]]), expected, atol=1e-5)
    assert repr(spread(kept, 2)).count("q4_k, q6_k and float32") == 1
    narrow = replace(kept.config, intermediate_size=256)
    with pytest.raises(ValueError, match="weights='q6_k': layers_0/mlp/down/kernel sums over 256"):
        random_model(
            narrow, jnp.float32, form_at=form_at_of("q4_k_m", narrow), tensor_parallel_size=2
        )


def test_saved_models_keep_each_format(tmp_path):
    kept, wide = mixed()
    save(kept, tmp_path / "kept")
    config = tmp_path / "kept" / "config.json"  # earlier versions also wrote a field "weights"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"weights": "q8_0"}))
    again = load(tmp_path / "kept", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.weights, kept.weights)
    plain = load(tmp_path / "kept", dtype="float32", weights="plain")
    jax.tree.map(np.testing.assert_array_equal, plain.weights, wide.weights)
    told = describe(str(tmp_path / "kept"), dtype="float32")
    assert told["types"] == kept.types
    assert told["device_weight_bytes"] == sum(x.nbytes for x in jax.tree.leaves(kept.weights))


@pytest.mark.slow
def test_saved_models_are_converted_to_q8_0(tmp_path):
    kept, wide = mixed()
    save(kept, tmp_path / "kept")
    ours = load(tmp_path / "kept", dtype="float32", weights="q8_0")
    assert ours.forms == {FORMS["q8_0"]}
    save(wide, tmp_path / "wide")
    others = load(tmp_path / "wide", dtype="float32", weights="q8_0")
    jax.tree.map(np.testing.assert_array_equal, ours.weights, others.weights)


class Headers(NamedTuple):
    """A checkpoint without values: a format and a shape per tensor."""

    forms: dict[str, Form | None]
    sizes: dict[str, tuple[int, ...]]

    def form(self, name):
        return self.forms[name]

    def kind(self, name):
        return "float32" if self.forms[name] is None else name_of(self.forms[name])

    def nbytes(self, name):
        form = self.forms[name]
        return 4 * math.prod(self.sizes[name]) if form is None else form.nbytes(*self.sizes[name])


def test_untied_embeddings_are_whole_on_each_rank(monkeypatch):
    monkeypatch.setattr("jsparse.pallas_kernels.quantized_product.api.no_mosaic", lambda: None)
    source = TensorSource("w", (192, 256), 0)  # 64 does not divide the 96 rows of a rank
    weights = [Weight(path, (source,)) for path in ("embed", "lm_head")]
    store: Any = Headers({"w": Q4_K}, {"w": source.shape})
    untied, tied = (plan_weights(x, store, "auto", jnp.bfloat16, 2) for x in (weights, weights[:1]))
    assert [each.form for each in untied + tied] == [Q4_K, None, None]


@pytest.mark.parametrize(("width", "layers", "tied"), [(4096, 32, False), (2048, 16, True)])
def test_loading_needs_little_more_memory_than_the_model(kernels, width, layers, tied):
    """Llama 3 8B and 1B in Q4_K_M: at most 15 % more at any time."""
    config = replace(
        mixed()[0].config, vocab_size=128256, hidden_size=width, intermediate_size=7 * width // 2,
        num_layers=layers, num_heads=32, num_kv_heads=8, head_dim=width // 32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    form_at = form_at_of("q4_k_m", config)
    store: Any = Headers({}, {})
    weights = list_weights(Path(), 999, config, FAMILIES["llama"].hf_names)
    for weight in weights:
        form = form_at(weight.path)
        own = [Q4_K, Q4_K, Q6_K] if form == JOINED else [form] * len(weight.sources)
        for source, kind in zip(weight.sources, own, strict=True):
            store.forms[source.name], store.sizes[source.name] = kind, source.shape
    planned = plan_weights(weights, store, "auto", jnp.bfloat16)
    assert all(each.form == form_at(each.weight.path) for each in planned)
    kept = sum(each.nbytes(jnp.bfloat16) for each in planned)
    assert kept < memory_needed(planned, store, jnp.bfloat16) <= 1.15 * kept


@pytest.mark.parametrize("option", ["auto", "plain", "q8_0"])
def test_large_vocabularies_are_loaded_in_little_more_memory_too(kernels, option):
    """Qwen2.5 1.5B with int4 matrices and a head of its own in bfloat16."""
    config = replace(
        mixed()[0].config, vocab_size=151936, hidden_size=1536, intermediate_size=8960,
        num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    store: Any = Headers({}, {})
    weights = list_weights(Path(), 999, config, FAMILIES["llama"].hf_names)
    for weight in weights:
        inner = weight.is_matrix and weight.path.startswith("layers")
        for source in weight.sources:
            store.forms[source.name] = AWQ if inner else None
            store.sizes[source.name] = source.shape
    planned = plan_weights(weights, store, option, jnp.bfloat16)
    kept = sum(each.nbytes(jnp.bfloat16) for each in planned)
    assert kept < memory_needed(planned, store, jnp.bfloat16) <= 1.15 * kept


def test_mixture_is_llama_cpps():
    """v and down of the first and last eighth of layers, and each third between, have 6 bits."""
    config = replace(mixed()[0].config, num_layers=32)
    form_at = form_at_of("q4_k_m", config)
    more = [*range(4), 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)]
    for nth in range(32):
        many = nth in more
        assert form_at(f"layers_{nth}/attention/qkv/kernel") == (JOINED if many else Q4_K)
        assert form_at(f"layers_{nth}/mlp/down/kernel") == (Q6_K if many else Q4_K)
        assert form_at(f"layers_{nth}/attention/o/kernel") == Q4_K
        assert form_at(f"layers_{nth}/mlp/gate_up/kernel") == Q4_K
    assert (form_at("embed"), form_at("lm_head")) == (Q4_K, Q6_K)
    assert form_at_of("q4_k_m", replace(config, tie_word_embeddings=True))("embed") == Q6_K


def test_bf16_is_plain_in_a_model_of_that_type():
    assert parse_weights("bf16", "bfloat16") == parse_weights("plain", "float16") == "plain"
    assert parse_weights(None, "float32") == "auto"
    with pytest.raises(ValueError, match="dtype is float32: must be bfloat16, or weights='plain'"):
        parse_weights("bf16", "float32")


def test_models_in_blocks_are_not_trained(tmp_path):
    with pytest.raises(ValueError, match="must be loaded with weights='plain' to train"):
        trainer(tmp_path, params=mixed()[0])
