"""Tests weights in 8-bit blocks: their values, loading, and cost."""

from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

import jsparse
from jsparse.evaluation.info import describe
from jsparse.models.checkpoint import Params, load, save, spread
from jsparse.models.quantized import all_q8_0, is_matrix, is_transposed, to_blocks
from jsparse.models.transformer import random_weights, weight_shapes
from jsparse.models.weights import by_path, tree
from jsparse.pallas_kernels.weight_blocks import BLOCK, FORMS, dequantized
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params
from tests.support.writers import (
    expected_weights,
    hf_config,
    hf_tensors,
    interleave_halves,
    write_folder,
    write_gguf,
)

Q8_0 = gguf.GGMLQuantizationType.Q8_0
SIZES = {"intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}


def llama_cpps(matrix):
    """llama.cpp's blocks of a matrix [out, in]."""
    return dequantize(quantize(np.ascontiguousarray(matrix), Q8_0), Q8_0)


def in_blocks(weights):
    """The tree with its matrices in Q8_0."""
    made = {}
    for keys, leaf in jax.tree.leaves_with_path(weights["params"]):
        path = "/".join(key.key for key in keys)
        if is_matrix(path):
            leaf = to_blocks(leaf.T if is_transposed(path) else leaf)
        made |= dict(by_path(path, leaf))
    return tree(made)


def numbers_of(weights):
    """The tree with the numbers that its blocks represent."""

    def plain(tree, name):
        if not isinstance(tree, dict):
            return tree
        if "values" in tree:
            rows = dequantized(tree, jnp.float32)
            return rows if name == "embed" else rows.T
        return {name: plain(part, name) for name, part in tree.items()}

    return plain(weights, "")


def test_error_is_at_most_half_a_step():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 128)).astype(np.float32) * np.geomspace(1e-3, 1e3, 128)
    rows[2, 32:64] = 0
    blocks = to_blocks(rows)
    assert blocks["values"].shape == rows.shape
    assert blocks["scales"].shape == (4, 6)
    assert blocks["values"].dtype == jnp.int8
    assert blocks["scales"].dtype == jnp.float16
    steps = np.repeat(np.asarray(blocks["scales"], np.float32), BLOCK, axis=0).T
    np.testing.assert_array_equal(dequantized(blocks, jnp.float32), steps * blocks["values"])
    # a largest number below 127.5 costs a little where float16 rounds the step down
    assert (np.abs(steps * blocks["values"] - rows) <= 0.56 * steps).all()
    assert np.abs(blocks["values"]).max() == 127


def test_scales_minimise_squared_errors():
    """They are never worse than llama.cpp's, and far better for numbers on a coarse grid."""
    rng = np.random.default_rng(1)
    smooth = rng.normal(size=(64, 256)).astype(np.float32)
    coarse = dequantize(
        quantize(smooth, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1
    )
    for matrix, share in ((smooth, 1.0), (coarse, 0.5)):
        blocks = matrix.reshape(-1, BLOCK)
        ours, theirs = (
            np.sum((made.reshape(blocks.shape) - blocks) ** 2, axis=-1)
            for made in (
                np.asarray(dequantized(to_blocks(matrix), np.float32)),
                llama_cpps(matrix),
            )
        )
        assert (ours <= 1.001 * theirs + 1e-12).all()
        assert ours.sum() < share * theirs.sum()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_of_a_file_are_kept(family, tmp_path):
    """Rows of q and k that llama.cpp reordered are put back, with their scales."""
    config = hf_config(family, **SIZES)
    tensors, raw = hf_tensors(config), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            ordered = tensor
            for which, heads in (("q_proj", 4), ("k_proj", 2)):
                if family == "llama" and which in name:
                    ordered = interleave_halves(tensor, heads)
            raw[name] = quantize(np.ascontiguousarray(ordered), Q8_0), Q8_0
    file = write_gguf(tmp_path / "model.gguf", config, tensors, raw=raw)
    ours = load(file, dtype="float32", weights="q8_0")
    assert ours.forms == {FORMS["q8_0"]}
    numbers = {name: llama_cpps(x) if x.ndim == 2 else x for name, x in tensors.items()}
    expected = expected_weights(config, numbers)
    jax.tree.map(np.testing.assert_array_equal, numbers_of(ours.weights), expected)
    shapes = weight_shapes(ours.config, jnp.float32, all_q8_0)
    assert jax.tree.structure(ours.weights) == jax.tree.structure(shapes)
    assert [x.shape for x in jax.tree.leaves(ours.weights)] == [
        x.shape for x in jax.tree.leaves(shapes)
    ]
    assert repr(ours).endswith("q8_0 and float32)")


@shared
def of_numbers(tied):
    """A model's files, and its weights as numbers and in blocks."""
    config = hf_config("llama", tie_word_embeddings=tied, **SIZES)
    tensors = hf_tensors(config)
    numbers = jax.tree.map(jnp.asarray, {"params": expected_weights(config, tensors)["params"]})
    return config, tensors, numbers, in_blocks(numbers)


@pytest.mark.parametrize("tied", slow_except([False, True], True))
def test_blocks_are_made_from_any_format(tied, tmp_path):
    """From safetensors and from a saved model; saved blocks are kept."""
    config, tensors, numbers, blocks = of_numbers(tied)
    ours = load(write_folder(tmp_path / "model", config, tensors), dtype="float32", weights="q8_0")
    jax.tree.map(np.testing.assert_array_equal, ours.weights, blocks)
    save(replace(ours, weights=numbers), tmp_path / "plain")
    save(ours, tmp_path / "ours")
    told = describe(str(tmp_path / "ours"), dtype="float32")
    assert told["device_weight_bytes"] == sum(x.nbytes for x in jax.tree.leaves(ours.weights))
    for again in (
        load(tmp_path / "plain", dtype="bfloat16", weights="q8_0"),
        load(tmp_path / "ours", dtype="float32"),
    ):
        assert again.forms == {FORMS["q8_0"]}
        for own, other in zip(jax.tree.leaves(again.weights), jax.tree.leaves(blocks), strict=True):
            np.testing.assert_array_equal(own, other.astype(own.dtype))


@shared
def wide() -> Params:
    """A model with sizes that 32 divides, also on each of two devices."""
    config = replace(tiny_params(num_layers=1).config, hidden_size=64, intermediate_size=128)
    return Params(random_weights(config, jnp.float32, seed=3), config, None, {}, "wide")


@shared
def wide_in_blocks() -> Params:
    return replace(wide(), weights=in_blocks(wide().weights))


def dequantised() -> Params:
    return replace(wide(), weights=numbers_of(wide_in_blocks().weights))


def test_logits_match_those_of_the_dequantised_model():
    ours, theirs, exact = (
        jsparse.logits(params, [[3, 1, 4]]) for params in (wide_in_blocks(), dequantised(), wide())
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(theirs - exact).max() > 1e-3


@pytest.mark.slow
def test_outputs_match_those_of_the_dequantised_model():
    options = {"max_new_tokens": 9, "eos_token_id": (), "policy": "quest(budget=16)"}
    ours, theirs = (
        [out.token_ids for out in jsparse.generate(params, random_prompts((9, 41)), **options)]
        for params in (wide_in_blocks(), dequantised())
    )
    assert ours == theirs


@pytest.mark.parametrize("tied", slow_except([False, True], True))
def test_blocks_are_spread_over_devices(tied):
    params = wide_in_blocks()
    if tied:
        config = replace(params.config, tie_word_embeddings=True)
        own = {name: x for name, x in params.weights["params"].items() if name != "lm_head"}
        params = replace(params, config=config, weights={"params": own})
    ours = jsparse.logits(spread(params, 2), [[3, 1, 4]])
    np.testing.assert_allclose(ours, jsparse.logits(params, [[3, 1, 4]]), atol=1e-5)


def test_weights_that_do_not_fit_blocks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="weights='int4': must be one of .*'plain'"):
        load("smollm2", weights="int4")
    config = hf_config("llama", **SIZES | {"intermediate_size": 48})
    folder = write_folder(tmp_path / "odd", config, hf_tensors(config))
    where = (
        "weights='q8_0': layers_0/mlp/down/kernel sums over 48 numbers: must be a multiple of 32"
    )
    with pytest.raises(ValueError, match=where):
        load(folder, weights="q8_0")
    save(load(folder), tmp_path / "saved")
    with pytest.raises(ValueError, match=where):
        load(tmp_path / "saved", weights="q8_0")
    config = hf_config("llama", **SIZES)
    folder = write_folder(tmp_path / "narrow", config, hf_tensors(config))
    with pytest.raises(ValueError, match="must be a multiple of 64 on 2 devices"):
        load(folder, weights="q8_0", tensor_parallel_size=2)


def test_blocks_of_an_earlier_version_are_refused(tmp_path):
    params = wide_in_blocks()
    embed = dict(params.weights["params"]["embed"])
    embed["scales"] = embed["scales"].T
    weights = {"params": params.weights["params"] | {"embed": embed}}
    save(replace(params, weights=weights), tmp_path / "old")
    with pytest.raises(ValueError, match="as an earlier version saved them: save it anew"):
        load(tmp_path / "old")


def test_nan_and_infinities_stay_visible():
    for number in [np.nan, np.inf, 1e8]:
        rows = np.ones((1, 64), np.float32)
        rows[0, 3] = number
        made = dequantized(to_blocks(rows), jnp.float32)
        assert not np.isfinite(made[0, :32]).any(), number
        np.testing.assert_allclose(made[0, 32:], 1, rtol=1e-3)
