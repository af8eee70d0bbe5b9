"""Checks 4-bit keys whose channels were computed in another order of float32's operations."""

import numpy as np

from jsparse.pallas_kernels.int4_keys import Int4Keys


def assert_keys_near(got: Int4Keys, want: Int4Keys) -> None:
    """Checks scales and zeros to an ulp, and codes to one where a channel lies halfway."""
    for a, b in ((got.scale, want.scale), (got.zero, want.zero)):
        assert a.dtype == b.dtype
        assert (np.abs(_ordered(a) - _ordered(b)) <= 1).all()
    off = np.abs(_codes(got) - _codes(want))
    assert off.max(initial=0) <= 1
    assert (off > 0).sum() <= max(2e-3 * off.size, 2)


def _ordered(x) -> np.ndarray:
    """Returns the place of each float16 among all of them."""
    bits = np.asarray(x).view(np.int16).astype(int)
    return np.where(bits < 0, -32768 - bits, bits)


def _codes(keys: Int4Keys) -> np.ndarray:
    packed = np.asarray(keys.packed).astype(int)
    return np.stack([packed & 15, packed >> 4])
