"""Tests int4_scores against slow numpy: their error, and which slots have one."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jsparse import cache as kv
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.selection import everything, nothing
from tests.kernels.cases.int4_scores import (
    CASES,
    build,
    frame_for,
    options,
)
from tests.support.key_checks import around, ones, physical, quantised
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}
jitted = jax.jit(int4_scores, static_argnames="sm_scale")


def kept(keys, page, slot):
    """Reads one token's channels, nibble by nibble."""
    packed = np.asarray(keys.packed)[page, slot].astype(int)
    codes = [packed[d // 2] >> 4 if d % 2 else packed[d // 2] & 15 for d in range(2 * packed.size)]
    return np.array(codes) * float(keys.scale[page, slot]) + float(keys.zero[page, slot])


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
                    key = kept(keys, physical(layer, b, n, page), slot)
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
        "head_dim_40",
        "in_frame_bits",
    ),
    ids=str,
)
def test_matches_the_slow_formula(case):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    out = jitted(*inputs, **options(case), sm_scale=case.sm_scale)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, slow(*inputs, scale, **options(case)), rtol=1e-5, atol=1e-4)


def test_estimate_is_close_to_the_true_scores():
    q, layer, keys, _ = build(by_name["whole_full"])
    out = np.asarray(jitted(q, layer, keys, None))
    grouped = np.asarray(q).reshape(2, 2, 4, 64)
    k = np.asarray(jax.jit(kv.read_heads)(layer.k, layer))
    true = np.einsum("bkgh,bksh->bkgs", grouped, k).reshape(out.shape) / 8
    assert np.abs(out - true).max() < 0.6
    assert np.corrcoef(out.reshape(-1), true.reshape(-1))[0, 1] > 0.99


@pytest.mark.slow
def test_large_constant_channels_cost_nothing_in_a_frame():
    """Without a frame they use up the whole range of the codes."""
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


def test_only_listed_tokens_are_scored():
    """Dense heads and the newest token get no scores beyond their list."""
    q, layer, keys, selection = build(by_name["newest_unlisted"])
    out = np.asarray(jitted(q, layer, keys, selection))
    assert np.isneginf(out[..., layer.page_size :]).all()
    shape = jax.eval_shape(lambda: int4_scores(q, layer, keys, everything(layer.lengths))).shape
    assert shape == (2, 8, 0)


def test_wrong_calls_are_refused():
    q, layer, keys, _ = build(by_name["pages"])
    frame = frame_for(replace(by_name["pages"], num_pages=9))
    odd = np.asarray(layer.k).reshape(32, 12, 64)
    of_12 = layer._replace(k=odd, v=odd), Int4Keys(*quantised(odd))
    token = nothing(layer.lengths, "token")
    for args, options_, message in (
        ((q[..., :32], layer, keys, None), {}, "must equal the keys' head dimension, 64"),
        ((q, layer, keys, token), {}, "granularity='token'.*takes 'page'"),
        (
            (q, layer, keys, None),
            {"channels": ones(2, 2, 16, dtype=np.int32)},
            r"channels.shape=\(2, 2, 16\): the keys have 64 channels",
        ),
        (
            (q, layer, keys, None),
            {"frame": frame},
            "frame: must have 32 pairs of channels and 1 spans, not 32 and 2",
        ),
        (
            (q, *of_12, None),
            {"implementation": "triton"},
            "takes pages of a power of two up to 128 tokens, not 12",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            int4_scores(*args, **options_)
