"""Tests page_bounds against slow numpy, for exact bounds and for codes.

The essential property: no token scores above its page.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jsparse import cache as kv
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import PageBounds, PageBounds8
from jsparse.pallas_kernels.page_bounds import page_bounds
from tests.kernels.cases.page_bounds import CASES, Codes, build, frame_for
from tests.support.key_checks import of, physical
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}
compiled = jax.jit(page_bounds, static_argnames=("slack", "sm_scale", "group"))
score = partial(compiled, sm_scale=1.0)
read_heads = jax.jit(kv.read_heads)
in_codes = [case for case in CASES if isinstance(case, Codes)]


def numbers(bounds):
    """Returns low and high, float64."""
    low, high = (np.asarray(x, np.float64) for x in (bounds.low, bounds.high))
    if isinstance(bounds, PageBounds):
        return low, high
    scale, zero = (np.asarray(bounds.affine, np.float64)[..., i : i + 1] for i in (0, 1))
    return scale * low + zero, scale * high + zero


def slow(q, layer, bounds, slack, sm_scale, mean=False):
    q, (low, high) = np.asarray(q, np.float64), numbers(bounds)
    if mean:
        q = q.reshape(len(q), layer.lengths.shape[1], -1, q.shape[-1]).mean(2)
    mid, half = (low + high) / 2, (high - low) / 2
    lengths, (batch, heads) = np.asarray(layer.lengths), layer.lengths.shape
    group = q.shape[1] // heads
    out = np.full((batch, heads, layer.num_pages), -np.inf)
    for b, n, page in np.ndindex(out.shape):
        if page * layer.page_size >= lengths[b, n]:
            continue
        lies = physical(layer, b, n, page)
        for query in q[b, n * group : (n + 1) * group]:
            score = sm_scale * (query * mid[lies] + slack * np.abs(query) * half[lies]).sum()
            out[b, n, page] = max(out[b, n, page], score)
    return out


@pytest.mark.parametrize(
    "case", slow_except_named(CASES, "head_dim_40", "codes_group_of_7"), ids=str
)
def test_matches_the_slow_formula(case):
    assert_matches(case, 0.6)


def test_extreme_slack_matches_the_slow_formula():
    for slack in (0.0, 1.0):
        assert_matches(by_name["scrambled"], slack)


def test_mean_query_replaces_its_group():
    """In float32, or rounded to the queries' dtype; in a frame the mean is scaled."""
    case = by_name["group_of_7"]
    inputs = build(case)
    got = compiled(*inputs, slack=0.6, sm_scale=0.3, group="mean")
    np.testing.assert_allclose(got, slow(*inputs, 0.6, 0.3, mean=True), rtol=1e-5, atol=1e-5)
    framed = by_name["codes_group_of_7"]
    frame = frame_for(framed)
    q, layer, bounds = build(framed, frame=frame)
    means = q.reshape(len(q), layer.lengths.shape[1], -1, q.shape[-1]).astype(np.float32).mean(2)
    np.testing.assert_allclose(
        compiled(q, layer, bounds, frame=frame, group="mean"),
        compiled(means.astype(q.dtype), layer, bounds, frame=frame),
        rtol=1e-5,
        atol=1e-2,
    )


def assert_matches(case, slack):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    out = compiled(*inputs, slack=slack, sm_scale=case.sm_scale)
    assert out.dtype == np.float32
    want = slow(*inputs, slack, scale)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * case.spread)


@pytest.mark.parametrize(
    "case", slow_except_named(CASES, "group_of_7", "codes_head_dim_40"), ids=str
)
def test_no_token_scores_above_its_page(case):
    q, layer, bounds = build(case, 1)
    out = np.asarray(score(q, layer, bounds))
    keys = np.asarray(read_heads(layer.k, layer), np.float64)
    grouped = np.asarray(q, np.float64).reshape(*out.shape[:2], -1, q.shape[-1])
    scores = np.einsum("bkgh,bksh->bkgs", grouped, keys).max(2).reshape(*out.shape, layer.page_size)
    held = (np.arange(layer.capacity) < np.asarray(layer.lengths)[..., None]).reshape(scores.shape)
    top = np.where(held, scores, -np.inf).max(-1)
    assert (out >= top - 1e-5 * np.abs(top).max(initial=1.0, where=np.isfinite(top))).all()
    np.testing.assert_array_equal(np.isneginf(out), ~held.any(-1))


@pytest.mark.parametrize("case", slow_except_named(in_codes, "codes_group_of_7"), ids=str)
def test_codes_bound_the_exact_bounds_tightly(case):
    q, layer, codes = build(case, 1)
    exact = appended(case, layer, PageBounds)
    wide, tight = (np.asarray(score(q, layer, bounds)) for bounds in (codes, exact))
    seen = np.isfinite(tight)
    np.testing.assert_array_equal(seen, np.isfinite(wide))
    largest = np.abs(tight[seen]).max()
    assert (wide >= tight - 1e-5 * largest)[seen].all()
    assert (wide[seen] - tight[seen]).max() < 0.05 * largest


def middles(layer, frame):
    """R(span)·mid of all pages, and key_scale by channel: float64[K, M, H], [K, 1, H]."""
    mid, reach, angles = (np.asarray(x, np.float64) for x in frame)
    angles = angles[np.arange(layer.num_pages) * layer.page_size // 128]
    cos, sin = np.split(angles, 2, axis=-1)
    low, high = np.split(mid[:, None], 2, axis=-1)
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned, np.tile(reach, 2)[:, None]


def constant(layer, frame):
    """The layer with keys at the same distance from the frame's middle as before from 0."""
    turned, reach = middles(layer, frame)
    own = np.asarray(read_heads(layer.k, layer), np.float64)
    own = own.reshape(*layer.lengths.shape, layer.num_pages, layer.page_size, -1)
    moved = np.clip(own, -4, 4) / 4 * reach[:, None] + turned[:, :, None]
    moved = moved.reshape(layer.k.shape)
    return layer._replace(k=jax.device_put(np.asarray(moved, layer.k.dtype)))


@partial(jax.jit, static_argnames=("case", "form"))
def appended(case, layer, form, frame=None):
    pages = jnp.zeros((layer.k.shape[0], case.head_dim), layer.k.dtype)
    everything = jnp.full(case.batch, case.slots, jnp.int32)
    first = jnp.zeros_like(layer.lengths)
    return bounds_append(
        form.of(pages, pages), layer, everything, first, max_new=case.slots, frame=frame
    )


def test_codes_in_a_frame_score_like_exact_bounds():
    """Constant channels of 100 make steps too coarse without a frame."""
    case = replace(by_name["codes_head_dim_40"], table="identity", dtype="float32")
    frame = frame_for(case)
    q, layer, _ = build(case)
    layer = constant(layer, frame)
    run = partial(score, q, layer)
    exact = np.asarray(run(appended(case, layer, PageBounds)), np.float64)
    framed = run(appended(case, layer, PageBounds8, frame), frame=frame)
    plain = run(appended(case, layer, PageBounds8))
    held = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(framed), held)
    spread = exact[held].std()
    far, near = (np.abs(np.asarray(x)[held] - exact[held]).mean() for x in (plain, framed))
    assert near < 0.02 * spread < far
    assert (np.asarray(framed) >= exact - 1e-5 * np.abs(exact[held]).max())[held].all()


def test_bounds_in_a_frame_are_codes_of_the_framed_keys():
    case = replace(by_name["codes_head_dim_40"], table="scrambled", dtype="float32")
    frame = frame_for(case)
    _, layer, _ = build(case)
    kept = appended(case, layer, PageBounds8, frame)
    turned, reach = middles(layer, frame)
    keys = np.asarray(layer.k, np.float64)
    for b, n, page in np.ndindex(*layer.lengths.shape, layer.num_pages):
        held = min(max(int(layer.lengths[b, n]) - page * case.page_size, 0), case.page_size)
        if held:
            lies = physical(layer, b, n, page)
            inside = (keys[lies, :held] - turned[n, page]) / reach[n]
            low, high = (x[lies] for x in numbers(kept))
            step = 1.02 * (inside.max() - inside.min() + np.abs(inside).max() / 64) / 254
            assert (low <= inside.min(0) + 1e-4).all() and (inside.max(0) <= high + 1e-4).all()
            assert (low >= inside.min(0) - step).all() and (inside.max(0) >= high - step).all()


def floats(bits):
    """Reads 32 bits as a float32, within the range of 8-bit bounds."""
    value = np.uint32(bits).view(np.float32)
    return float(value) if abs(value) <= 2.0**120 else 1.0


values = st.one_of(
    st.integers(0, 2**32 - 1).map(floats),
    st.floats(-9, 9, width=16),
    st.sampled_from([0.0, -0.0, 1.0]),
)
pages = st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=4)


@jax.jit
def in_codes_of(low, high):
    codes = PageBounds8.of(low, high)
    return codes, codes.values()


@settings(max_examples=400)
@given(
    page=pages,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    offset=st.sampled_from([0.0, 7.3, -1e4]),
)
@example(page=[[3.0, 3.0, 3.0]], dtype="bfloat16", offset=0.0)
@example(page=[[1.0, 1.0 + 2.0**-23, 1.0]], dtype="float32", offset=0.0)
@example(page=[[-1e-39, 1.0, 1e-39]], dtype="float32", offset=0.0)
@example(page=[[-1.0, 1e-39, 127 / 128]], dtype="float32", offset=0.0)
def test_codes_contain_every_key(page, dtype, offset):
    """Including large, equal and subnormal keys.

    A bound is off by at most one step, 1/254 of the page's range.
    """
    keys = np.asarray(page, np.float32) + np.float32(offset)
    if dtype == "float16":
        keys = np.clip(keys, -6e4, 6e4)
    keys = keys.astype(dtype)
    minimum, greatest = (f(np.asarray(keys, np.float64), axis=0) for f in (np.min, np.max))
    codes, values = in_codes_of(minimum.astype(dtype), greatest.astype(dtype))
    low, high = (np.asarray(x, np.float64) for x in values)
    assert np.asarray(codes.affine)[0] > 0
    assert (low <= minimum).all()
    assert (greatest <= high).all()
    step = (
        1.02 * ((greatest.max() - minimum.min()) + np.abs([minimum, greatest]).max() / 64) / 254
        + 2.0**-98
    )
    assert (minimum - low <= step).all()
    assert (high - greatest <= step).all()


def test_codes_of_keys_out_of_range_are_finite():
    huge = np.finfo(np.float32).max
    for ends in ((-huge, huge), (huge, huge), (-huge, -huge), (-1.0, huge), (-np.inf, np.inf)):
        _, kept = in_codes_of(*(np.full((2, 4), end, np.float32) for end in ends))
        low, high = map(np.asarray, kept)
        assert (np.isfinite(low) & np.isfinite(high) & (low <= high)).all(), ends


def test_wrong_calls_are_refused():
    q, layer, bounds = build(by_name["ragged"])
    codes = of(PageBounds8, *bounds)
    half = q.astype(jnp.bfloat16)
    odd = layer._replace(k=layer.k[..., :63], v=layer.v[..., :63])
    odd_codes = PageBounds8.of(*(x[..., :63] for x in bounds))
    triton = {"implementation": "triton"}
    for args, options, message in (
        ((q, layer, codes), triton, "queries that float16 can hold, .*, not float32"),
        ((half[..., :63], odd, odd_codes), triton, "takes an even head dimension, not 63"),
        ((half, layer, bounds), triton, "queries of the bounds' dtype, float32, not bfloat16"),
        (
            (q, layer, bounds),
            {"frame": frame_for(by_name["ragged"])},
            "frame: must be None with PageBounds",
        ),
        ((q, layer, bounds), {"slack": 1.5}, "slack=1.5: must be a number from 0 to 1"),
        ((q, layer, bounds), {"sm_scale": -1.0}, "sm_scale=-1.0: must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            page_bounds(*args, **options)
