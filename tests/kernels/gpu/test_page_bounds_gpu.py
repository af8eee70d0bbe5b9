"""Tests page_bounds and bounds_append in triton against the float32 references.

Covers exact and 8-bit bounds.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import scaled_queries
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import PageBounds, PageBounds8
from jsparse.pallas_kernels.page_bounds import page_bounds
from tests.kernels.cases.block_sparse_decode import Case
from tests.kernels.cases.page_bounds import CASES, Codes, build, frame_for

pytestmark = pytest.mark.gpu
by_name = {case.name: case for case in CASES}
SIZES = {"head_dim": 128, "num_pages": 300, "table": "scrambled", "dtype": "bfloat16"}
LARGE, LARGE_CODES = (
    kind("large", dense="all", listed="none", capacity=0, **SIZES) for kind in (Case, Codes)
)
both_forms = pytest.mark.parametrize(
    "form", [PageBounds, PageBounds8], ids=lambda form: form.__name__
)
large = pytest.mark.parametrize("case", [LARGE, LARGE_CODES], ids=lambda case: type(case).__name__)


def both(inputs, **kwargs):
    run = jax.jit(
        lambda inputs, name: page_bounds(*inputs, implementation=name, **kwargs), static_argnums=1
    )
    return run(inputs, "triton"), run(inputs, "reference")


def size_of_sums(inputs, q, sm_scale=1.0):
    """The largest possible sums of the pages' products with q: those of equal signs."""
    farthest = jnp.maximum(*(jnp.abs(x) for x in inputs.bounds.values()))
    bounds = PageBounds(farthest, farthest)
    return np.asarray(page_bounds(jnp.abs(q), inputs.layer, bounds, sm_scale=sm_scale))


def assert_near(inputs, got, want, sm_scale):
    """Checks scores to within float32 sums of exact products, and masks exactly.

    1024 is added to codes and subtracted again. No score exceeds its bound.
    """
    size = size_of_sums(inputs, inputs.q, sm_scale)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen, part = np.isfinite(want), 2.0**-16 if isinstance(inputs.bounds, PageBounds8) else 2.0**-18
    assert (
        np.abs(np.asarray(got)[seen] - np.asarray(want)[seen]) <= part * size[seen] + 1e-30
    ).all()


@pytest.mark.parametrize("slack", [1.0, 0.6, 0.0])
@pytest.mark.parametrize(
    "case", [*CASES, LARGE, LARGE_CODES], ids=lambda case: f"{type(case).__name__}-{case.name}"
)
def test_matches_the_reference(case, slack):
    inputs = build(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    assert_near(inputs, *both(inputs, slack=slack, sm_scale=scale), scale)


@pytest.mark.parametrize(
    "case",
    [by_name["group_of_7"], by_name["bfloat16"], by_name["codes_group_of_7"], LARGE, LARGE_CODES],
    ids=lambda case: f"{type(case).__name__}-{case.name}",
)
def test_mean_query_matches_the_reference(case):
    inputs = build(case)
    assert_near(inputs, *both(inputs, slack=0.6, group="mean", sm_scale=1.0), 1.0)


IN_CODES = [*(case for case in CASES if isinstance(case, Codes)), LARGE_CODES]


@pytest.mark.parametrize(("slack", "group"), [(1.0, "max"), (0.5, "max"), (0.5, "mean")])
@pytest.mark.parametrize("case", IN_CODES, ids=str)
def test_codes_in_a_frame_match_the_reference(case, slack, group):
    """Queries times key_scale are rounded to float16, terms to float32."""
    frame = frame_for(case)
    inputs = build(case, frame=frame)
    got, want = both(inputs, frame=frame, slack=slack, group=group, sm_scale=1.0)
    codes = size_of_sums(inputs, scaled_queries(inputs.q, frame))
    of_terms = jnp.max(jnp.abs(scaled_queries(inputs.q, frame._replace(key_scale=largest(frame)))))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    allowed = 2.0**-11 * codes + 2.0**-18 * case.head_dim * float(of_terms)
    assert (np.abs(np.asarray(got)[seen] - np.asarray(want)[seen]) <= allowed[seen]).all()


def largest(frame):
    """The larger of each pair of the frame's middle, in place of its half range."""
    return jnp.max(jnp.abs(frame.mid.reshape(len(frame.mid), 2, -1)), axis=1)


@pytest.mark.parametrize("slack", [1.0, 0.6])
@large
def test_tiling_and_batch_change_no_bit(case, slack):
    from jsparse.pallas_kernels.page_bounds import codes_triton, triton_gpu
    from jsparse.pallas_kernels.page_bounds.triton_gpu import BoundsTiling

    kernel = partial(
        (codes_triton if isinstance(case, Codes) else triton_gpu).page_bounds,
        slack=slack,
        group="max",
        sm_scale=0.1,
    )
    q, layer, bounds = inputs = build(case)
    tilings = (
        None,
        BoundsTiling(16, 3, 1, 1, 2),
        BoundsTiling(64, 2, 1, 4, 1),
        BoundsTiling(32, 16, 1, 2, 4),
    )
    outs = [jax.jit(lambda x, t=t: kernel(*x, tiling=t))(inputs) for t in tilings]
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)
    assert layer.block_table is not None
    alone = layer._replace(lengths=layer.lengths[1:], block_table=layer.block_table[1:])
    np.testing.assert_array_equal(outs[0][1:], kernel(q[1:], alone, bounds))


@pytest.mark.parametrize("name", ["full", "codes_shared_pages"])
def test_lengths_beyond_capacity_read_no_other_memory(name):
    # after an overflow lengths exceed the capacity; results are meaningless, but no memory past the
    # end may be read
    inputs = build(by_name[name])
    longer = inputs._replace(layer=inputs.layer._replace(lengths=inputs.layer.lengths + 1000))
    got = page_bounds(*longer, implementation="triton")
    np.testing.assert_array_equal(got, page_bounds(*inputs, implementation="triton"))


@both_forms
def test_bounds_past_2_to_the_31_values(form):
    head_dim, used = 128, 40
    rng = np.random.default_rng(0)
    last = form.of(
        *(jnp.asarray(rng.normal(size=(used, head_dim)) + by, jnp.bfloat16) for by in (-2, 2))
    )
    q = jnp.asarray(rng.normal(size=(1, 4, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(used)[None, None], jnp.int32)
    lengths = jnp.full((1, 1), used * 16, jnp.int32)

    def run(q, last, table, front):
        pools = (
            jnp.zeros((front + used, *kept.shape[1:]), kept.dtype).at[front:].set(kept)
            for kept in last
        )
        unread = jnp.zeros((front + used, 1, head_dim), jnp.bfloat16)
        layer = LayerCache(unread, unread, lengths // 16, block_table=table + front)
        return page_bounds(q, layer, form(*pools), implementation="triton")

    run = jax.jit(run, static_argnums=3)
    np.testing.assert_array_equal(run(q, last, table, 2**31 // head_dim), run(q, last, table, 0))


APPENDED = (
    Case("ragged"),
    Case("bfloat16", dtype="bfloat16", head_dim=128, num_pages=9),
    Case("float16", dtype="float16", head_dim=128),
    Case("scrambled", table="scrambled", dtype="bfloat16"),
    Case("head_dim_40", head_dim=40, page_size=24, num_pages=3, dtype="bfloat16"),
    Case("head_dim_7", head_dim=7, page_size=5),
    Case("head_dim_96", head_dim=96, page_size=8, table="scrambled"),
    Case("head_dim_256", head_dim=256, page_size=64, num_pages=2, dtype="bfloat16"),
    Case("tiny_pages", page_size=1, num_pages=40),
    Case("huge", spread=1e4, table="scrambled"),
)


@both_forms
@pytest.mark.parametrize("case", APPENDED, ids=str)
def test_append_matches_the_reference_bit_for_bit(case, form):
    """Bounds are equal after steps of one token and after chunks of many.

    Some tokens are before the first slot or past the last, and some rows have no new token.
    """
    _, layer, _ = case.build()
    rng = np.random.default_rng(1)
    layer = layer._replace(
        k=jnp.asarray(rng.normal(size=layer.k.shape) * case.spread, layer.k.dtype)
    )
    old = form.of(
        *(jnp.asarray(rng.normal(size=layer.k[:, 0].shape) + by, layer.k.dtype) for by in (-9, 9))
    )
    run = jax.jit(bounds_append, static_argnames=("max_new", "implementation"))
    for new, over in ((1, 0), (1, 3), (9, 0), (case.slots, 0), (case.slots, 5)):
        lengths = jnp.where(layer.lengths == case.slots, layer.lengths + over, layer.lengths)
        for valid in (
            jnp.full(case.batch, new, jnp.int32),
            jnp.asarray(rng.integers(0, new + 1, case.batch), jnp.int32),
        ):
            call = (old, layer._replace(lengths=lengths), valid, lengths - valid[:, None])
            got, want = (
                run(*call, max_new=new, implementation=name) for name in ("triton", "reference")
            )
            assert over or not bool(valid.any()) or not np.array_equal(want.high, old.high)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", [case for case in APPENDED if case.head_dim % 2 == 0], ids=str)
def test_append_into_a_frame_matches_the_reference(case):
    """Bounds halfway between two codes may round to either."""
    _, layer, _ = case.build()
    rng = np.random.default_rng(1)
    layer = layer._replace(k=jnp.asarray(rng.normal(size=layer.k.shape), layer.k.dtype))
    old = PageBounds8.of(*(jnp.full(layer.k[:, 0].shape, by, layer.k.dtype) for by in (-9, 9)))
    frame, run = (
        frame_for(case),
        jax.jit(bounds_append, static_argnames=("max_new", "implementation")),
    )
    for new in (1, 9, case.slots):
        valid = jnp.asarray(rng.integers(1, new + 1, case.batch), jnp.int32)
        call = (old, layer, valid, layer.lengths - valid[:, None])
        got, want = (
            run(*call, max_new=new, frame=frame, implementation=name)
            for name in ("triton", "reference")
        )
        scale, zero = np.split(np.abs(np.asarray(want.affine, np.float32)), 2, axis=-1)
        for a, b in zip(got.values(), want.values(), strict=True):
            off = np.abs(np.asarray(a) - np.asarray(b))
            assert (off <= 1.02 * scale + 2.0**-7 * zero).all()
            assert (off > 0).mean() < 1e-3
