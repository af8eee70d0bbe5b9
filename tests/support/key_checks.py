"""Finds pages, 4-bit keys and bounds in numpy, and compares keys from different computations."""

from functools import partial

import jax
import numpy as np

from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise

quantised = jax.jit(quantise)


@partial(jax.jit, static_argnums=0)
def of(form, low, high):
    """Makes bounds of a form."""
    return form.of(low, high)


def ones(*shape, dtype=np.float32):
    return jax.device_put(np.ones(shape, dtype))


def physical(layer, b, n, page):
    """Returns the physical page of a head's logical page."""
    if layer.block_table is not None:
        return int(layer.block_table[b, n, page])
    return (b * layer.lengths.shape[1] + n) * layer.num_pages + page


def around(frame, n, slot, head_dim):
    """Returns the mean key of a head at a slot, and the scale of each channel: 0 and 1 without a
    frame.
    """
    if frame is None:
        return np.zeros(head_dim), np.ones(head_dim)
    mid, reach, angles = (np.asarray(x, np.float64) for x in frame)
    half = head_dim // 2
    turn = angles[slot // 128, :half] + 1j * angles[slot // 128, half:]
    turned = (mid[n, :half] + 1j * mid[n, half:]) * turn
    return np.concatenate([turned.real, turned.imag]), np.tile(reach[n], 2)


def assert_keys_near(got: Int4Keys, want: Int4Keys) -> None:
    """Checks scales and zeros to an ulp, and codes to one step if a channel is halfway."""
    for a, b in ((got.scale, want.scale), (got.zero, want.zero)):
        assert a.dtype == b.dtype
        assert (np.abs(_ordered(a) - _ordered(b)) <= 1).all()
    off = np.abs(_codes(got) - _codes(want))
    assert off.max(initial=0) <= 1
    assert (off > 0).sum() <= max(2e-3 * off.size, 2)


def _ordered(x) -> np.ndarray:
    """Returns the rank of each float16 among all of them."""
    bits = np.asarray(x).view(np.int16).astype(int)
    return np.where(bits < 0, -32768 - bits, bits)


def _codes(keys: Int4Keys) -> np.ndarray:
    packed = np.asarray(keys.packed).astype(int)
    return np.stack([packed & 15, packed >> 4])
