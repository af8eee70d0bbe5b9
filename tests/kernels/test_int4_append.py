"""Tests int4_append against slow numpy, and against quantising the whole cache."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse import cache as kv
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys, init
from tests.kernels.cases.int4_scores import FrameCase, build, options, out_of_frame
from tests.support.histories import after_each, histories, step
from tests.support.key_checks import around, assert_keys_near, ones, physical, quantised
from tests.support.small_cache import B, K, M, S, T, small_spec

appended = jax.jit(int4_append)
H = 4
SPEC = small_spec(head_dim=H)
FRAME = KeyFrame(ones(K, H), ones(K, H // 2), ones(1, H))


@partial(jax.jit, static_argnums=0)
def made(spec):
    return kv.init(spec), init(spec)


@settings(max_examples=25)
@given(history=histories, paged=st.booleans(), seed=st.integers(0, 2**16))
def test_append_equals_quantising_the_whole_cache(history, paged, seed):
    """The whole pool is equal after chunks and rewrites, so no other page was touched."""
    made_of = made(SPEC._replace(pool_pages=B * K * M + 1 if paged else None))
    for cache, keys in after_each(history, seed, *made_of, keep=int4_append):
        for part, want in zip(keys, quantised(cache.layers[0].k), strict=True):
            np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize(
    ("kind", "table", "page_size", "count"),
    [
        ("both", "scrambled", 8, 41),
        pytest.param("both", "identity", 12, 330, marks=pytest.mark.slow),
        pytest.param("frame", "scrambled", 8, 41, marks=pytest.mark.slow),
        pytest.param("channels", "scrambled", 8, 41, marks=pytest.mark.slow),
    ],
)
def test_append_matches_slow_numpy(kind, table, page_size, count):
    """Tokens are in up to three spans; some of their slots are outside of the head."""
    case = FrameCase(
        "",
        kv_heads=3,
        head_dim=40,
        page_size=page_size,
        num_pages=-(-340 // page_size),
        table=table,
        framed=kind != "channels",
        chosen=None if kind == "frame" else 12,
    )
    _, layer, keys, _ = build(case)
    rng = np.random.default_rng(1)
    first = rng.integers(90, 140, (2, 3)) if count < 100 else rng.integers(-2, 40, (2, 3))
    slots = np.clip(first[..., None] + np.arange(count), 0, case.slots - 1)
    k = rng.normal(size=(2, 3, count, 40)).astype(np.float32)
    if case.framed:
        k = np.asarray(jax.jit(out_of_frame)(k, options(case)["frame"], slots.astype(np.int32)))
    valid = np.array([count, count - 9])
    got = appended(keys, layer, k.swapaxes(1, 2), valid, first, **options(case))
    want = slow_append(keys, layer, k, valid, first, **options(case))
    assert not np.array_equal(want.packed, keys.packed)
    assert_keys_near(got, want)


def slow_append(keys, layer, k, valid, first, frame=None, channels=None):
    """Quantises k [B, K, T, H] by token in float64, with scale and zero rounded to float16."""
    packed, scale, zero = (np.array(pool) for pool in keys)
    for b, n, t in np.ndindex(k.shape[:3]):
        slot = int(first[b, n]) + t
        if t >= valid[b] or not 0 <= slot < layer.capacity:
            continue
        mean, reach = around(frame, n, slot, k.shape[3])
        row = (k[b, n, t].astype(np.float64) - mean) / reach
        row = row if channels is None else row[np.asarray(channels[b, n])]
        at = physical(layer, b, n, slot // layer.page_size), slot % layer.page_size
        zero[at] = low = np.float16(row.min())
        scale[at] = step = np.float16((row.max() - row.min()) / 15)
        codes = np.clip(np.round((row - float(low)) / float(step)), 0, 15).astype(np.uint8)
        packed[at] = codes[::2] | codes[1::2] << 4
    return Int4Keys(packed, scale, zero)


def test_tokens_without_room_are_dropped():
    cache, keys = made(SPEC)
    for _ in range(3):
        k, valid = np.ones((B, T, K, H), np.float32), np.array([T, 0], np.int32)
        cache, keys = step(cache, keys, k, valid, keep=int4_append)
    assert cache.overflow.tolist() == [True, False]
    np.testing.assert_array_equal(
        np.asarray(keys.zero).reshape(B, -1), [[1] * (K * S), [0] * (K * S)]
    )


def test_wrong_appends_are_refused():
    cache, keys = made(SPEC)
    layer = cache.layers[0]
    given = {"k": ones(B, T, K, H), "valid": ones(B, dtype=np.int32), "first": layer.lengths}
    for change, message in (
        ({"k": ones(B, T, K, 2)}, r"k.shape=\(2, 6, 2, 2\): must have the keys' 4 channels"),
        (
            {"channels": ones(B, K, 2, dtype=np.int32)},
            r"channels.shape=\(2, 2, 2\): must have the keys' 4 channels",
        ),
        (
            {"frame": FRAME._replace(angles=ones(2, H))},
            "frame: must have 2 pairs of channels and 1 spans, not 2 and 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            int4_append(keys, layer, **{**given, **change})
