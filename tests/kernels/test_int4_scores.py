"""Tests int4_scores and int4_append against slow numpy.

They check what is stored, how far off it is, and which slots have a score.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow_except, slow_except_named
from small_cache import B, K, M, S, T, small_spec

from jsparse import cache as kv
from jsparse.model_facts.key_constants import KeyFrame
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys, dequantise, init, quantise
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.int4_scores.cases import (
    CASES,
    FrameCase,
    build,
    frame_for,
    options,
    out_of_frame,
)
from jsparse.selection import everything, nothing
from tests.kernels.int4_checks import assert_keys_near

by_name = {case.name: case for case in CASES}
jitted = jax.jit(int4_scores, static_argnames="sm_scale")
quantised = jax.jit(quantise)
appended = jax.jit(int4_append)
H = 4
SPEC = small_spec(head_dim=H)


def ones(*shape, dtype=np.float32):
    return jax.device_put(np.ones(shape, dtype))


FRAME = KeyFrame(ones(K, H), ones(K, H // 2), ones(1, H))


def kept(keys, page, slot):
    """Reads one token's channels, nibble by nibble."""
    packed = np.asarray(keys.packed)[page, slot].astype(int)
    codes = [packed[d // 2] >> 4 if d % 2 else packed[d // 2] & 15 for d in range(2 * packed.size)]
    return np.array(codes) * float(keys.scale[page, slot]) + float(keys.zero[page, slot])


def lies(layer, b, n, page):
    """Finds where a head's page lies."""
    if layer.block_table is not None:
        return int(layer.block_table[b, n, page])
    return (b * layer.lengths.shape[1] + n) * layer.num_pages + page


def around(frame, n, slot, head_dim):
    """Returns the mean key of a head at a slot, and the reach of each channel: 0 and 1 without."""
    if frame is None:
        return np.zeros(head_dim), np.ones(head_dim)
    mid, reach, angles = (np.asarray(x, np.float64) for x in frame)
    half = head_dim // 2
    turn = angles[slot // 128, :half] + 1j * angles[slot // 128, half:]
    turned = (mid[n, :half] + 1j * mid[n, half:]) * turn
    return np.concatenate([turned.real, turned.imag]), np.tile(reach[n], 2)


def slow(q, layer, keys, selection, sm_scale, frame=None, channels=None):
    q, lengths = np.asarray(q, np.float64), np.asarray(layer.lengths)
    (batch, heads), size, head_dim = lengths.shape, layer.page_size, q.shape[-1]
    group, entries = (
        q.shape[1] // heads,
        layer.num_pages if selection is None else selection.ids.shape[2],
    )
    keys = Int4Keys(*map(np.asarray, keys))
    out = np.full((batch, q.shape[1], entries * size), -np.inf)
    for b, n in np.ndindex(batch, heads):
        count = entries if selection is None else int(selection.count[b, n])
        chosen = np.arange(head_dim) if channels is None else np.asarray(channels[b, n])
        for entry in range(count):
            page = entry if selection is None else int(selection.ids[b, n, entry])
            word = (
                -1
                if selection is None or selection.bits is None
                else int(selection.bits[b, n, entry])
            )
            for slot in range(size):
                if page * size + slot < lengths[b, n] and word >> slot & 1:
                    mean, reach = around(frame, n, page * size + slot, head_dim)
                    key = kept(keys, lies(layer, b, n, page), slot)
                    rows = q[b, n * group : (n + 1) * group]
                    scores = (rows * reach)[:, chosen] @ key + rows @ mean
                    out[b, n * group : (n + 1) * group, entry * size + slot] = sm_scale * scores
    return out


@pytest.mark.parametrize(
    "case",
    slow_except_named(
        CASES,
        "newest_unlisted",
        "whole_16_of_64_channels",
        "in_frame_32_channels",
        "head_dim_40",
        "in_frame_bits",
    ),
    ids=lambda case: case.name,
)
def test_matches_the_slow_formula(case):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    out = jitted(*inputs, **options(case), sm_scale=case.sm_scale)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, slow(*inputs, scale, **options(case)), rtol=1e-5, atol=1e-4)


def test_the_estimate_is_near_the_true_scores():
    q, layer, keys, _ = build(by_name["whole_full"])
    out = np.asarray(jitted(q, layer, keys, None))
    grouped = np.asarray(q).reshape(2, 2, 4, 64)
    k = np.asarray(jax.jit(kv.read_heads)(layer.k, layer))
    true = np.einsum("bkgh,bksh->bkgs", grouped, k).reshape(out.shape) / 8
    assert np.abs(out - true).max() < 0.6
    assert np.corrcoef(out.reshape(-1), true.reshape(-1))[0, 1] > 0.99


def test_large_constant_channels_cost_nothing_in_a_frame():
    """Outside of it they take up all of the codes' range."""
    case = by_name["whole_in_frame"]
    inputs, frame = build(case), options(case)["frame"]
    q, layer, keys, _ = inputs
    k = np.asarray(jax.jit(kv.read_heads)(layer.k, layer), np.float64)
    true = np.einsum("bkgh,bksh->bkgs", np.asarray(q, np.float64).reshape(2, 2, 4, 64), k) / 8
    out = np.asarray(jitted(q, layer, keys, None, frame=frame))
    plain = np.asarray(jitted(q, layer, Int4Keys(*quantised(layer.k)), None))
    seen = np.isfinite(out)
    off, far = (np.abs(x - true.reshape(out.shape))[seen].mean() for x in (out, plain))
    assert 8 * off < far


def test_only_the_list_counts():
    """Dense heads and the newest token get no scores beyond their list."""
    q, layer, keys, selection = build(by_name["newest_unlisted"])
    out = np.asarray(jitted(q, layer, keys, selection))
    assert np.isneginf(out[..., layer.page_size :]).all()
    shape = jax.eval_shape(lambda: int4_scores(q, layer, keys, everything(layer.lengths))).shape
    assert shape == (2, 8, 0)


rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=8).filter(
    lambda row: len(row) % 2 == 0
)


@jax.jit
def there_and_back(k):
    return dequantise(*quantise(k))


@given(row=rows)
def test_a_channel_is_off_by_half_a_step(row):
    k = np.array(row, np.float32)
    back = np.asarray(there_and_back(k))
    step = (k.max() - k.min()) / 15
    # scale and zero carry 11 bits; below 2^-14 float16 has fewer
    slack = 2.0**-11 * (abs(k.min()) + 15 * step) + 16 * 2.0**-24
    assert np.abs(back - k).max() <= step / 2 + slack


@pytest.mark.parametrize("value", [0.0, -3.5, 1e30, -1e30, 1e-30])
def test_a_row_of_equal_channels_is_finite(value):
    packed, scale, zero = quantised(np.full((3, 8), value, np.float32))
    assert (np.asarray(scale) == 1).all()
    np.testing.assert_allclose(
        jax.jit(dequantise)(packed, scale, zero),
        np.clip(value, -65504, 65504),
        rtol=1e-3,
        atol=1e-7,
    )


def test_rows_beyond_float16_stay_finite():
    for part in quantised(np.array([[-1e30, 1e30], [0.0, 3e38]], np.float32)):
        assert np.isfinite(np.asarray(part, np.float32)).all()


def test_neighbours_share_a_byte_the_even_channel_low():
    packed, scale, zero = quantised(np.array([0.0, 15.0, 3.0, 7.0], np.float32))
    assert (packed.tolist(), float(scale), float(zero)) == ([0xF0, 0x73], 1.0, 0.0)
    with pytest.raises(ValueError, match=r"k.shape=\(2, 3\): the last axis must be even"):
        quantised(np.zeros((2, 3), np.float32))


counts = st.lists(st.integers(0, T), min_size=B, max_size=B)
histories = st.lists(
    st.tuples(st.sampled_from(["append", "write"]), counts), min_size=1, max_size=8
)


@partial(jax.jit, static_argnums=0)
def made(spec):
    return kv.init(spec), init(spec)


@jax.jit
def step(cache, keys, k, valid):
    first = cache.layers[0].lengths
    cache = kv.append(cache, 0, k, k, jnp.zeros((B, T), jnp.int32), valid)
    return cache, int4_append(keys, cache.layers[0], k, valid, first)


@jax.jit
def rewrite(cache, keys, k, valid):
    layer = cache.layers[0]
    first = layer.lengths - valid[:, None]
    layer = kv.write(layer, k, k, jnp.zeros((B, T), jnp.int32), valid, first)
    return kv.replace_layer(cache, 0, layer), int4_append(keys, layer, k, valid, first)


@settings(max_examples=25)
@given(history=histories, paged=st.booleans(), seed=st.integers(0, 2**16))
def test_appending_is_quantising_what_the_cache_holds(history, paged, seed):
    """The whole pool agrees after chunks and rewrites, so nothing else was touched."""
    rng = np.random.default_rng(seed)
    pool = B * K * M + 1 if paged else None
    cache, keys = made(SPEC._replace(pool_pages=pool))
    for kind, valid in history:
        lengths = np.asarray(cache.layers[0].lengths)
        room = S - lengths.max(1) if kind == "append" else lengths.min(1)
        valid = np.minimum(valid, room).astype(np.int32)
        k = rng.normal(size=(B, T, K, H)).astype(np.float32)
        cache, keys = (step if kind == "append" else rewrite)(cache, keys, k, valid)
        for part, want in zip(keys, quantised(cache.layers[0].k), strict=True):
            np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize("jit", slow_except([True, False], True))
def test_codes_are_rounded_the_same_jitted_or_not(jit):
    """Codes are rounded by the stored scale and zero, halves to even.

    XLA neither divides otherwise nor uses the unrounded minimum.
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
        kept = (quantised if jit else quantise)(jax.device_put(k))
        for part, want in zip(
            kept, (codes[:, ::2] | codes[:, 1::2] << 4, scale, zero), strict=True
        ):
            np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize(
    ("kind", "table", "page_size", "count"),
    [
        ("both", "scrambled", 8, 41),
        ("both", "identity", 12, 330),
        pytest.param("both", "identity", 16, 330, marks=pytest.mark.slow),
        pytest.param("both", "scrambled", 64, 330, marks=pytest.mark.slow),
        pytest.param("frame", "scrambled", 8, 41, marks=pytest.mark.slow),
        pytest.param("channels", "scrambled", 8, 41, marks=pytest.mark.slow),
    ],
)
def test_appends_what_slow_numpy_does(kind, table, page_size, count):
    """Tokens lie in up to three spans; some of their slots lie outside of the head."""
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
        at = lies(layer, b, n, slot // layer.page_size), slot % layer.page_size
        zero[at] = low = np.float16(row.min())
        scale[at] = step = np.float16((row.max() - row.min()) / 15)
        codes = np.clip(np.round((row - float(low)) / float(step)), 0, 15).astype(np.uint8)
        packed[at] = codes[::2] | codes[1::2] << 4
    return Int4Keys(packed, scale, zero)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": ones(B, T, K, 2)},
            r"k.shape=\(2, 6, 2, 2\): \[B, K, H\] must be \(2, 2, 4\)",
        ),
        ({"implementation": "abacus"}, "implementation='abacus': int4_append has"),
        (
            {"channels": ones(B, K, 2, dtype=np.int32)},
            r"channels.shape=\(2, 2, 2\): \[B, K, r\] must be \(2, 2, 4\), to fit the keys",
        ),
        (
            {"channels": ones(B, K + 1, H, dtype=np.int32)},
            r"channels.shape=\(2, 3, 4\): must begin with \[B, K\] = \(2, 2\)",
        ),
        (
            {"frame": FRAME._replace(mid=ones(K, 2 * H))},
            r"frame.mid.shape=\(2, 8\): must be \(2, 4\), to fit the cache and k",
        ),
        (
            {"frame": FRAME._replace(key_scale=ones(K + 1, H // 2))},
            r"frame.key_scale.shape=\(3, 2\): must be \(2, 2\), to fit the cache and k",
        ),
        (
            {"frame": FRAME._replace(angles=ones(2, H))},
            r"frame.angles.shape=\(2, 4\): must be \(1, 4\), to fit the cache and k",
        ),
        *(
            []
            if jax.default_backend() == "gpu"
            else [({"implementation": "triton"}, "needs an NVIDIA GPU")]
        ),
    ],
)
def test_wrong_appends_are_refused(change, message):
    cache, keys = made(SPEC)
    layer = cache.layers[0]
    rows = {
        "k": ones(B, T, K, H),
        "valid": ones(B, dtype=np.int32),
        "first": layer.lengths,
    }
    with pytest.raises(ValueError, match=message):
        int4_append(keys, layer, **{**rows, **change})


def test_tokens_without_room_are_dropped():
    cache, keys = made(SPEC)
    for _ in range(3):
        cache, keys = step(
            cache, keys, np.ones((B, T, K, H), np.float32), np.array([T, 0], np.int32)
        )
    assert cache.overflow.tolist() == [True, False]
    np.testing.assert_array_equal(
        np.asarray(keys.zero).reshape(B, -1), [[1] * (K * S), [0] * (K * S)]
    )


def part(x, *of):
    return jax.device_put(np.asarray(x)[of])


@cache
def wrong_calls():
    q, layer, keys, selection = build(by_name["pages"])
    frame = frame_for(by_name["pages"])
    odd = np.asarray(layer.k).reshape(32, 12, 64)
    return {
        "head dimension": (
            (part(q, ..., slice(32)), layer, keys, None),
            {},
            "must equal the keys' head dimension, 64",
        ),
        "heads of q": (
            (part(q, slice(None), slice(5)), layer, keys, selection),
            {},
            r"q.shape=\(2, 5, 64\).*N a multiple of K",
        ),
        "granularity": (
            (q, layer, keys, nothing(layer.lengths, "token")),
            {},
            "granularity='token'.*takes 'page'",
        ),
        "packed": (
            (q, layer, keys._replace(packed=part(keys.packed, slice(3))), None),
            {},
            r"keys.packed.shape=\(3, 16, 32\): must be \(24, 16, 32\)",
        ),
        "scale": (
            (q, layer, keys._replace(scale=part(keys.scale, slice(3))), None),
            {},
            r"keys.scale.shape=\(3, 16\)",
        ),
        "channels": (
            (q, layer, keys, None),
            {"channels": ones(2, 2, 16, dtype=np.int32)},
            r"channels.shape=\(2, 2, 16\): the keys have 64 channels",
        ),
        "heads of channels": (
            (q, layer, keys, None),
            {"channels": ones(2, 3, 64, dtype=np.int32)},
            r"channels.shape=\(2, 3, 64\): must begin with \[B, K\] = \(2, 2\)",
        ),
        "heads of the frame": (
            (q, layer, keys, None),
            {"frame": frame_for(replace(by_name["pages"], kv_heads=4))},
            r"frame.mid.shape=\(4, 64\): must be \(2, 64\), to fit the cache and q",
        ),
        "pairs of the frame": (
            (q, layer, keys, None),
            {"frame": frame._replace(key_scale=part(frame.key_scale, slice(None), slice(20)))},
            r"frame.key_scale.shape=\(2, 20\): must be \(2, 32\), to fit the cache and q",
        ),
        "spans of the frame": (
            (q, layer, keys, selection),
            {"frame": frame_for(replace(by_name["pages"], num_pages=9))},
            r"frame.angles.shape=\(2, 64\): must be \(1, 64\), to fit the cache and q",
        ),
        "backend": (
            (q, layer, keys, None),
            {"implementation": "abacus"},
            "implementation='abacus': int4_scores has",
        ),
        "page size": (
            (
                q,
                layer._replace(k=odd),
                Int4Keys(*quantised(odd)),
                None,
            ),
            {"implementation": "triton"},
            "takes pages of a power of two up to 128 tokens, not 12",
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_calls_are_refused(name):
    args, kwargs, message = wrong_calls()[name]
    with pytest.raises(ValueError, match=message) as error:
        int4_scores(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_cases_have_names_of_their_own():
    assert len(by_name) == len(CASES)
