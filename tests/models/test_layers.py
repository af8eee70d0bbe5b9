"""Tests the building blocks against slow formulas."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.heads import apply_rope, rms_norm
from jsparse.models.config import LinearRope, Llama3Rope, ModelConfig, YarnRope
from jsparse.models.layers import MLP, rope_frequencies, rope_scale, rope_table
from jsparse.models.rope_scaling import rope_from_hf
from jsparse.models.transformer import Decoder, hidden_states, random_weights
from jsparse.pallas_kernels.skinny_product import api, xla_parts

rotate = jax.jit(apply_rope)

SCALED = json.loads((Path(__file__).parents[1] / "fixtures" / "rope_scaling.json").read_text())


def table_of(frequencies, scale=1.0):
    return jax.jit(partial(rope_table, frequencies=frequencies, scale=scale))


def config(**changes) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 8,
    }
    return ModelConfig("llama", **(sizes | changes))


def llama3_frequency(frequency, rule):
    """Applies Llama 3.1's published rule: by wavelength, in three cases."""
    wavelength = 2 * math.pi / frequency
    shortest_scaled = rule.original_max_position_embeddings / rule.high_freq_factor
    longest_kept = rule.original_max_position_embeddings / rule.low_freq_factor
    if wavelength < shortest_scaled:
        return frequency
    if wavelength > longest_kept:
        return frequency / rule.factor
    smooth = (rule.original_max_position_embeddings / wavelength - rule.low_freq_factor) / (
        rule.high_freq_factor - rule.low_freq_factor
    )
    return (1 - smooth) * frequency / rule.factor + smooth * frequency


def test_rope_frequencies():
    head_dim, theta = 128, 500000.0
    for rule in (None, Llama3Rope(8.0, 1.0, 4.0, 8192), Llama3Rope(32.0, 2.0, 5.0, 64)):
        plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        expected = plain if rule is None else [llama3_frequency(f, rule) for f in plain]
        actual = rope_frequencies(config(rope_theta=theta, head_dim=head_dim, rope_scaling=rule))
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        if rule is not None:
            ratio = np.asarray(plain) / np.asarray(expected)
            assert ratio.min() == 1.0, rule
            assert ratio.max() == pytest.approx(rule.factor), rule


def test_scaled_frequencies_equal_those_of_transformers():
    for name in SCALED:
        expected = SCALED[name]
        head_dim = expected["config"]["head_dim"]
        made = config(head_dim=head_dim, **rope_from_hf(expected["config"]))
        np.testing.assert_allclose(rope_frequencies(made), expected["frequencies"], rtol=2e-6)
        assert rope_scale(made) == pytest.approx(expected["scale"], rel=1e-12), name


def test_only_yarn_scales_cos_and_sin():
    for rule in (None, Llama3Rope(8.0, 1.0, 4.0, 8192), LinearRope(4.0)):
        assert rope_scale(config(rope_scaling=rule)) == 1.0
    assert rope_scale(config(rope_scaling=YarnRope(4.0, 64))) == 0.1 * math.log(4.0) + 1
    frequencies = rope_frequencies(config())
    positions = np.arange(5)[None]
    plain, scaled = (table_of(frequencies, scale)(positions) for scale in (1.0, 1.5))
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(other, 1.5 * np.asarray(one))


def test_rope_rotates_pairs_half_a_head_apart():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    positions = np.array([[0, 1, 100], [7, 8, 5000]])
    frequencies = rope_frequencies(config(head_dim=8))
    rotated = np.asarray(rotate(x, table_of(frequencies)(positions)))
    for b, t, h, i in np.ndindex(2, 3, 2, 4):
        turn = np.exp(1j * positions[b, t] * np.float64(frequencies[i]))
        expected = complex(x[b, t, h, i], x[b, t, h, i + 4]) * turn
        actual = complex(rotated[b, t, h, i], rotated[b, t, h, i + 4])
        # the angle itself is a float32, so that far positions lose digits
        assert abs(actual - expected) < 1e-3 * abs(expected)


def test_rms_norm():
    rng = np.random.default_rng(2)
    x, scale = rng.standard_normal((3, 5)) * 100, rng.standard_normal(5)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * scale
    norm = jax.jit(rms_norm, static_argnames="eps")
    actual = np.asarray(norm(x.astype(np.float32), scale.astype(np.float32), eps=0.5))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    # squares beyond the range of float16 are summed in float32
    wide = norm(np.full((1, 4), 6e4, np.float16), np.ones(4, np.float16), eps=1e-5)
    np.testing.assert_allclose(np.asarray(wide), 1.0, rtol=1e-3)


def test_mlp_is_gated_by_silu():
    rng = np.random.default_rng(3)
    x, delta, scale, up_gate, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((1, 2, 4), (1, 2, 4), (4,), (4, 12), (6, 4))
    )
    total = x + delta
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 0.5) * scale
    gate, up = np.split(normed @ up_gate, 2, axis=-1)
    expected = (gate / (1 + np.exp(-gate)) * up) @ down
    variables = {
        "params": {
            "gate_up": {"kernel": up_gate},
            "down": {"kernel": down},
        }
    }
    residual, actual = jax.jit(MLP(6, 0.5).apply)(variables, x, delta, scale)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(residual, total, rtol=1e-6)


def test_products_in_parts_are_summed_by_their_readers(monkeypatch):
    heads = {"num_heads": 2, "head_dim": 8, "qk_norm": True}
    decoder = Decoder(config(hidden_size=16, intermediate_size=16, num_layers=2, **heads))
    weights = random_weights(decoder.config, jnp.float32)
    ids = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)

    def to_itself(layer, q, k, v):
        return jnp.repeat(v, 2, axis=2)

    def hidden():
        return jax.jit(lambda: hidden_states(decoder, weights, ids, ids, to_itself))()

    whole, own, made = hidden(), xla_parts.skinny_product, []

    def cut(*given):
        made.append(own(*given))
        return made[-1]

    monkeypatch.setattr(xla_parts, "MIN_WIDTH", 4)
    monkeypatch.setattr(xla_parts, "skinny_product", cut)
    monkeypatch.setattr(api, "compute_capability", lambda: (9, 0))
    np.testing.assert_allclose(hidden(), whole, rtol=1e-4, atol=1e-5)
    # products per layer: q, k and v; attention; gate and up; MLP
    assert [len(parts) for parts in made] == [4] * 8
