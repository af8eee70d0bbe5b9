"""Tests the rounding of channels to 4-bit codes, a scale and a zero: errors, and finite results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.pallas_kernels.int4_keys import dequantise, quantise
from tests.support.key_checks import quantised

rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=8).filter(
    lambda row: len(row) % 2 == 0
)


@jax.jit
def there_and_back(k):
    return dequantise(*quantise(k))


@given(row=rows)
def test_channel_error_is_at_most_half_a_step(row):
    k = np.array(row, np.float32)
    back = np.asarray(there_and_back(k))
    step = (k.max() - k.min()) / 15
    # scale and zero have 11 bits; below 2^-14 float16 has fewer
    slack = 2.0**-11 * (abs(k.min()) + 15 * step) + 16 * 2.0**-24
    assert np.abs(back - k).max() <= step / 2 + slack


def test_rows_of_equal_channels_are_finite():
    values = np.array([0.0, -3.5, 1e30, -1e30, 1e-30], np.float32)
    packed, scale, zero = quantised(np.repeat(values[:, None], 8, axis=1))
    assert (np.asarray(scale) == 1).all()
    wanted = np.clip(values, -65504, 65504)[:, None].repeat(8, axis=1)
    back = jax.jit(dequantise)(packed, scale, zero)
    np.testing.assert_allclose(back, wanted, rtol=1e-3, atol=1e-7)


def test_rows_beyond_float16_stay_finite():
    for part in quantised(np.array([[-1e30, 1e30], [0.0, 3e38]], np.float32)):
        assert np.isfinite(np.asarray(part, np.float32)).all()


def test_neighbours_share_a_byte_with_the_even_channel_low():
    packed, scale, zero = quantised(np.array([0.0, 15.0, 3.0, 7.0], np.float32))
    assert (packed.tolist(), float(scale), float(zero)) == ([0xF0, 0x73], 1.0, 0.0)
    with pytest.raises(ValueError, match=r"k.shape=\(2, 3\): the last axis must be even"):
        quantised(np.zeros((2, 3), np.float32))


def test_codes_are_rounded_with_the_stored_scale():
    """Rounding uses the stored scale and zero, halves to even.

    XLA neither divides differently nor uses the unrounded minimum.
    """
    rng = np.random.default_rng(0)
    halves = rng.integers(0, 31, (2000, 64)) / 2
    halves[:, :2] = 0, 15
    rows = np.concatenate(
        [halves, *(rng.normal(size=(2000, 64)) * size for size in (1e-5, 1.0, 1e4))]
    )
    k = rows.astype(jnp.bfloat16).astype(np.float32)
    zero = k.min(1).astype(np.float16)
    scale = ((k.max(1) - k.min(1)) * np.float32(1 / 15)).astype(np.float16)
    steps = (k - zero[:, None].astype(np.float32)) * (1 / scale.astype(np.float32))[:, None]
    codes = np.clip(np.round(steps), 0, 15).astype(np.uint8)
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's reciprocal may be off by an ulp
        kept = quantised(jax.device_put(k))
        for part, want in zip(
            kept, (codes[:, ::2] | codes[:, 1::2] << 4, scale, zero), strict=True
        ):
            np.testing.assert_array_equal(part, want)
