"""Tests that quantized safetensors are the numbers that their formats define, bit for bit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jsparse
from jsparse.models.quantization_config import scheme_of
from jsparse.models.quantized_safetensors import QuantizedSafetensors
from jsparse.pallas_kernels.weight_blocks import Form, dequantized, form_of
from tests.support.quantized_writers import BLOCK_FP8, FORMATS, W4A16, quantized
from tests.support.writers import assert_refused, hf_config, hf_tensors, write_folder

CONFIG = hf_config("qwen2", num_hidden_layers=1)
TENSORS = hf_tensors(CONFIG)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
MODULE = "model.layers.0.mlp.down_proj"


def store_of(folder, format_, tensors):
    scheme = scheme_of({"quantization_config": format_.config})
    assert scheme is not None
    return QuantizedSafetensors(write_folder(folder, {}, tensors), scheme)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_format(name, tmp_path):
    rng, format_ = np.random.default_rng(0), FORMATS[name]
    # 192 rows are 1.5 blocks of 128; 48 columns are 1.5 blocks of 32
    for width, largest in [(256, 128), (192, 64), (48, 0)]:
        parts, numbers = format_.write(rng, 192, width)
        tensors = {f"{MODULE}.{suffix}": part for suffix, part in parts.items()}
        store = store_of(tmp_path / str(width), format_, tensors)
        weight = f"{MODULE}.weight"
        assert store.shapes == {weight: (192, width)}
        assert store.nbytes(weight) == sum(
            part.nbytes for suffix, part in parts.items() if suffix != "input_scale"
        )
        np.testing.assert_array_equal(store.read(weight), numbers)
        stored, form = store.blocks(weight), store.form(weight)
        if format_.blocks is None or not largest:
            assert stored is None and form is None
            continue
        bits, group, scales, mins, floats = format_.blocks
        assert stored is not None
        assert form == Form(bits, min(group, largest), scales, mins=mins, floats=floats)
        if width == 256:
            blocks = stored.convert({name: jnp.asarray(a) for name, a in stored.arrays.items()})
            assert form_of(blocks) == form
            made = jax.jit(dequantized, static_argnums=1)(blocks, jnp.float32)
            np.testing.assert_array_equal(made, numbers)


def test_groups_end_with_a_row(tmp_path):
    format_ = FORMATS["gptq, symmetric with one group"]
    parts, numbers = format_.write(np.random.default_rng(0), 64, 96)
    tensors = {f"{MODULE}.{suffix}": part for suffix, part in parts.items()}
    longer = format_._replace(config=format_.config | {"group_size": 2**70})
    weight = f"{MODULE}.weight"
    np.testing.assert_array_equal(store_of(tmp_path, longer, tensors).read(weight), numbers)


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("*/")), ids=lambda folder: folder.name)
def test_numbers_are_those_of_the_packages(folder):
    """Reads what the formats' own packages wrote."""
    scheme = scheme_of(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    store = QuantizedSafetensors(folder, scheme)
    np.testing.assert_array_equal(store.read("m.weight"), store.read("expected"))


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        pytest.param("fp8 of blocks", marks=pytest.mark.slow),
        pytest.param("gptq", marks=pytest.mark.slow),
        pytest.param("pack-quantized, 4 bits", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_numbers(name, tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 4}
    sizes["tie_word_embeddings"] = True
    config = CONFIG | sizes  # all matrices of a layer have one shape, for fewer programs
    tensors, plain = quantized(FORMATS[name], hf_tensors(config))
    of = config | {"quantization_config": FORMATS[name].config}
    folder = write_folder(tmp_path / "quantized", of, tensors, num_shards=3)
    reference = jsparse.load(write_folder(tmp_path / "plain", config, plain))
    widened = jsparse.load(folder)
    monkeypatch.setattr("jsparse.models.weight_plan.no_kernel", lambda *_: None)
    kept = jsparse.load(folder)
    expected, same, close = (
        jsparse.logits(params, [[3, 1, 4, 1, 5]]) for params in (reference, widened, kept)
    )
    np.testing.assert_array_equal(same, expected)
    np.testing.assert_allclose(close, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert kept.types == f"{'fp8' if 'fp8' in name else 'int4'} and float32"


def test_tensors_that_do_not_match_are_refused(tmp_path):
    """The matrix has 32 rows and 48 columns in groups of 32."""
    format_ = FORMATS["gptq, 8 bits"]
    tensors, _ = quantized(format_, TENSORS)
    config = CONFIG | {"quantization_config": format_.config}

    def refused(changes, match):
        changed = {k: v for k, v in (tensors | changes).items() if v is not None}
        assert_refused(write_folder(tmp_path, config, changed), match)

    at = f"{MODULE}."
    order = tensors[f"{at}g_idx"]
    refused({f"{at}g_idx": order[::-1].copy()}, r"g_idx is not in order \(act-order, desc_act\)")
    refused({f"{at}g_idx": order[:-1]}, r"g_idx has shape \(47,\): must be \(48,\)")
    refused({f"{at}scales": None}, "lacks .*down_proj.scales")
    refused({f"{at}qzeros": None}, "lacks .*down_proj.qzeros")
    refused(
        {f"{at}scales": tensors[f"{at}scales"][:, :-1]}, r"scales has shape .*must be \(2, 32\)"
    )
    refused({f"{at}qzeros": tensors[f"{at}qzeros"][:, :-1]}, r"qzeros has shape .*must be \(2, 8\)")
    refused({f"{at}scales": order}, "scales has dtype 'I32': must be one of")
    refused({f"{at}weight": np.zeros((32, 48), np.float32)}, "down_proj.weight is F32")
    refused({f"{at}other": order}, r"other is I32\[48\]")
    refused(
        {f"{at}qweight": tensors[f"{at}qweight"][0]}, "qweight has shape .*two positive numbers"
    )
    short = {name: tensors[at + name][..., :16] for name in ("qweight", "scales", "qzeros")}
    short["qzeros"] = short["qzeros"][:, :4]
    refused({at + name: part.copy() for name, part in short.items()}, "config asks for")


def test_zero_points_of_a_symmetric_scheme_are_checked(tmp_path):
    format_ = FORMATS["gptq, symmetric with one group"]
    tensors, _ = quantized(format_, TENSORS)
    tensors[f"{MODULE}.qzeros"][0, 0] += 1
    config = CONFIG | {"quantization_config": format_.config}
    assert_refused(write_folder(tmp_path, config, tensors), "qzeros has zero points other than")


def test_packed_shape_is_compared_with_codes(tmp_path):
    name = "pack-quantized, 4 bits"
    tensors, _ = quantized(FORMATS[name], TENSORS)
    config = CONFIG | {"quantization_config": W4A16}
    shape = f"{MODULE}.weight_shape"
    for wrong in [(32, 49), (32, 40), (31, 48), (-32, 48), (2**40, 48)]:
        changed = tensors | {shape: np.array(wrong, np.int64)}
        assert_refused(write_folder(tmp_path, config, changed), "weight_packed has shape")
    assert_refused(
        write_folder(tmp_path, config, {k: v for k, v in tensors.items() if k != shape}),
        "lacks .*weight_shape",
    )


def test_nan_in_fp8_is_refused(tmp_path):
    tensors, _ = quantized(FORMATS["fp8 of blocks"], TENSORS)
    for code in (0x7F, 0xFF):
        codes = tensors[f"{MODULE}.weight"].copy()
        codes.view(np.uint8)[3, 5] = code
        config = CONFIG | {"quantization_config": BLOCK_FP8}
        folder = write_folder(tmp_path, config, tensors | {f"{MODULE}.weight": codes})
        assert_refused(folder, "down_proj.weight has NaN among its numbers")


def test_other_8_bit_floats_are_refused(tmp_path):
    tensors, _ = quantized(FORMATS["fp8 of blocks"], TENSORS)
    codes = np.zeros((32, 48), ml_dtypes.float8_e5m2)
    config = CONFIG | {"quantization_config": BLOCK_FP8}
    folder = write_folder(tmp_path, config, tensors | {f"{MODULE}.weight": codes})
    assert_refused(folder, "down_proj.weight has dtype 'F8_E5M2': must be one of")


def test_scales_of_activations_and_the_cache_are_unused(tmp_path):
    tensors, _ = quantized(FORMATS["fp8 of a tensor"], TENSORS)
    one = np.ones(1, np.float32)
    unused = {f"model.layers.0.self_attn.{name}": one for name in ("k_scale", "v_scale")}
    config = CONFIG | {"quantization_config": FORMATS["fp8 of a tensor"].config}
    folders = tmp_path / "with", tmp_path / "without"
    loaded = [
        jsparse.load(write_folder(folder, config, tensors | more)).weights
        for folder, more in zip(folders, (unused, {}), strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *loaded)
