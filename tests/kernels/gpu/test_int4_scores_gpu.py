"""Tests int4_scores in triton against the float32 reference, and int4_append against a CPU.

The results of int4_append are bitwise equal, except in a frame.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys, dequantise, quantise
from jsparse.pallas_kernels.int4_scores import int4_scores
from tests.kernels.cases.block_sparse_decode import Case
from tests.kernels.cases.int4_scores import (
    CASES,
    FrameCase,
    build,
    options,
    out_of_frame,
)
from tests.support.key_checks import assert_keys_near

pytestmark = pytest.mark.gpu
by_name = {case.name: case for case in CASES}
WHOLE = Case(
    "",
    head_dim=128,
    num_pages=70,
    dense="all",
    listed="none",
    capacity=0,
    table="scrambled",
    dtype="bfloat16",
)
LISTED = Case("", head_dim=128, num_pages=70, bits=True, table="scrambled", dtype="bfloat16")


FRAMED_WHOLE = FrameCase(
    "",
    head_dim=128,
    num_pages=70,
    dense="all",
    listed="none",
    capacity=0,
    table="scrambled",
    dtype="bfloat16",
)
FRAMED_LISTED = FrameCase(
    "", head_dim=128, num_pages=70, bits=True, table="scrambled", dtype="bfloat16", chosen=32
)


def both(inputs, kept=None, **kwargs):
    run = jax.jit(
        lambda inputs, kept, name: int4_scores(*inputs, **kept, implementation=name, **kwargs),
        static_argnums=2,
    )
    return run(inputs, kept or {}, "triton"), run(inputs, kept or {}, "reference")


def assert_near(inputs, got, want, sm_scale, kept=None, *, of_terms=1e-3):
    """Checks scores and masks; each product may be off by 2^-12 of itself.

    That is the rounding of the query to 11 bits. Terms of a frame may be off by `of_terms`. Masks
    are equal.
    """
    kept, slack = dict(kept or {}), 1e-30
    if (frame := kept.get("frame")) is not None:
        kept["frame"], slack = frame._replace(mid=jnp.zeros_like(frame.mid)), of_terms
    size = inputs._replace(
        q=jnp.abs(inputs.q.astype(jnp.float32)),
        keys=Int4Keys(*quantise(jnp.abs(dequantise(*inputs.keys)))),
    )
    products = np.asarray(int4_scores(*size, **kept, sm_scale=sm_scale, implementation="reference"))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert (
        np.abs(np.asarray(got)[seen] - np.asarray(want)[seen]) <= 2.0**-11 * products[seen] + slack
    ).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case):
    inputs, kept = build(case), options(case)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    assert_near(inputs, *both(inputs, kept, sm_scale=scale), scale, kept)


@pytest.mark.parametrize("chosen", [None, 32])
@pytest.mark.parametrize(
    ("page_size", "lists"),
    [
        (8, {"dense": "all", "listed": "none", "capacity": 0}),
        (64, {"dense": "all", "listed": "none", "capacity": 0}),
        (16, {"capacity": 2048}),
        (128, {"capacity": 256}),
        (32, {"capacity": 1024, "bits": True}),
    ],
    ids=["pages of 8", "pages of 64", "listed pages of 16", "listed pages of 128", "bits"],
)
def test_positions_to_128k_in_a_frame(page_size, lists, chosen):
    """Terms of 1024 spans are as exact as float32 logits in the hundreds."""
    case = FrameCase(
        "",
        batch=1,
        head_dim=128,
        page_size=page_size,
        num_pages=131072 // page_size,
        lengths="full",
        table="scrambled",
        dtype="bfloat16",
        chosen=chosen,
        **lists,
    )
    inputs, kept = build(case), options(case)
    assert kept["frame"].angles.shape == (1024, 128)
    scale = 128**-0.5
    got, want = both(inputs, kept, sm_scale=scale)
    assert float(jnp.where(jnp.isfinite(want), jnp.abs(want), 0).max()) > 40
    assert_near(inputs, got, want, scale, kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e3])
def test_queries_of_any_magnitude(dtype, size):
    inputs = build(by_name["whole_full"])
    inputs = inputs._replace(q=(inputs.q * (1.0 if dtype == "float16" else size)).astype(dtype))
    assert_near(inputs, *both(inputs, sm_scale=1.0), 1.0)


BOTH_LISTS = pytest.mark.parametrize(
    "case",
    [WHOLE, LISTED, FRAMED_WHOLE, FRAMED_LISTED],
    ids=["whole", "listed", "whole in a frame", "listed in a frame"],
)


@BOTH_LISTS
def test_tiling_and_batch_change_no_bit(case):
    from jsparse.pallas_kernels.int4_scores.triton_gpu import ScoresTiling
    from jsparse.pallas_kernels.int4_scores.triton_gpu import int4_scores as kernel

    inputs, kept = build(case), options(case)
    tilings = (
        None,
        ScoresTiling(64, 3, 1, 1, 2),
        ScoresTiling(256, 2, 1, 4, 1),
        ScoresTiling(128, 16, 1, 4, 4),
    )
    outs = [
        jax.jit(lambda x, kept, t=t: kernel(*x, **kept, sm_scale=0.1, tiling=t))(inputs, kept)
        for t in tilings
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)

    def row(tree):
        return jax.tree.map(lambda x: x[1:], tree)

    q, layer, keys, selection = inputs
    assert layer.block_table is not None
    alone = layer._replace(lengths=layer.lengths[1:], block_table=layer.block_table[1:])
    kept["channels"] = row(kept["channels"])
    out = kernel(q[1:], alone, keys, row(selection), **kept, sm_scale=0.1)
    np.testing.assert_array_equal(outs[0][1:], out)


@BOTH_LISTS
def test_fifty_runs_give_the_same_bits(case):
    inputs, kept = build(case), options(case)
    run = jax.jit(lambda inputs, kept: int4_scores(*inputs, **kept, implementation="triton"))
    first = np.asarray(run(inputs, kept))
    for _ in range(49):
        np.testing.assert_array_equal(first, run(inputs, kept))


def test_lengths_beyond_capacity_read_no_other_memory():
    # after an overflow lengths exceed the capacity; results are meaningless, but no memory past the
    # end may be read
    for name in ("whole_full", "whole_in_frame_pages_of_64"):
        inputs, kept = build(by_name[name]), options(by_name[name])
        longer = inputs._replace(layer=inputs.layer._replace(lengths=inputs.layer.lengths + 1000))
        got = int4_scores(*longer, **kept, implementation="triton")
        np.testing.assert_array_equal(got, int4_scores(*inputs, **kept, implementation="triton"))


ON_GPU = partial(int4_append, implementation="triton")
OWN_PAGES = [case for case in CASES if case.table != "shared"]
LONG = Case(
    "",
    head_dim=128,
    num_pages=70,
    page_size=16,
    table="scrambled",
    dtype="bfloat16",
    kv_heads=3,
    batch=3,
)


def tokens_for(case, count, seed=0):
    """Arguments of `int4_append`: `count` tokens per row, some of them not valid.

    Some of their slots are outside of the head.
    """
    q, layer, keys, _ = build(case)
    rng = np.random.default_rng(seed)
    batch, heads = layer.lengths.shape
    k = rng.normal(size=(batch, count, heads, q.shape[-1])) + rng.normal(
        scale=4, size=(batch, count, heads, 1)
    )
    valid = rng.integers(0, count + 1, batch)
    valid[0] = count
    first = rng.integers(-2, layer.capacity, (batch, heads))
    if (frame := options(case)["frame"]) is not None:
        slots = np.clip(first[..., None] + np.arange(count), 0, layer.capacity - 1)
        slots = jnp.asarray(slots, jnp.int32)
        k = out_of_frame(jnp.asarray(k, jnp.float32).swapaxes(1, 2), frame, slots).swapaxes(1, 2)
    return (
        keys,
        layer,
        jnp.asarray(k, layer.k.dtype),
        jnp.asarray(valid, jnp.int32),
        jnp.asarray(first, jnp.int32),
    )


def assert_as_on_cpu(got, arguments, kept=None):
    """Checks results against the reference on a CPU, whose reciprocals are exact."""
    arguments, kept = jax.device_put((arguments, kept or {}), jax.devices("cpu")[0])
    want = jax.jit(partial(int4_append, implementation="reference"))(*arguments, **kept)
    if kept.get("frame") is not None:
        assert_keys_near(got, want)
        return
    for part, wanted in zip(got, want, strict=True):
        assert part.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(part), np.asarray(wanted))


@pytest.mark.parametrize("count", [1, 37])
@pytest.mark.parametrize("case", OWN_PAGES, ids=str)
def test_append_matches_the_reference(case, count):
    arguments, kept = tokens_for(case, count), options(case)
    before = jax.tree.map(np.array, arguments[0])
    assert_as_on_cpu(jax.jit(ON_GPU)(*arguments, **kept), arguments, kept)
    for part, was in zip(arguments[0], before, strict=True):
        np.testing.assert_array_equal(part, was)  # not donated


FRAMED_LONG = FrameCase(
    "", head_dim=128, num_pages=70, table="scrambled", dtype="bfloat16", kv_heads=3, batch=3
)


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        by_name["8_of_128_channels"],
        FRAMED_LONG,
        replace(FRAMED_LONG, chosen=32),
        replace(FRAMED_LONG, chosen=32, framed=False),
    ],
    ids=["long", "narrow", "framed", "framed channels", "channels"],
)
@pytest.mark.parametrize("count", [2, 31, 1000])
def test_append_of_many_tokens(case, count):
    arguments, kept = tokens_for(case, count), options(case)
    assert_as_on_cpu(jax.jit(ON_GPU)(*arguments, **kept), arguments, kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-4, 1e3, 1e30])
def test_append_of_channels_of_any_magnitude(dtype, size):
    keys, layer, k, valid, first = tokens_for(LONG, 37)
    layer = layer._replace(k=layer.k.astype(dtype))
    k = jnp.clip(
        k.astype(jnp.float32) * size,
        *([-65504.0, 65504.0] if dtype == "float16" else [-3e38, 3e38]),
    )
    for kept in (k, jnp.broadcast_to(k[..., :1], k.shape)):
        arguments = keys, layer, kept.astype(dtype), valid, first
        got = jax.jit(ON_GPU)(*arguments)
        assert_as_on_cpu(got, arguments)
        assert bool(jnp.isfinite(dequantise(*got)).all())


def test_repeated_appends_in_place():
    """Donated appends over the same slots copy nothing and leave no older values."""
    run = jax.jit(ON_GPU, donate_argnums=0)
    keys, layer, *_ = tokens_for(LONG, 1)
    memory = run.lower(*tokens_for(LONG, 1)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in keys)
    assert memory.temp_size_in_bytes < keys.packed.nbytes // 4
    for seed, count in enumerate((37, 1, 1, 20, 37)):
        before = jax.tree.map(np.array, keys)
        _, _, k, valid, _ = tokens_for(LONG, count, seed)
        first = jnp.full(layer.lengths.shape, 5 + seed, jnp.int32)
        keys = run(keys, layer, k, valid, first)
        assert_as_on_cpu(keys, (before, layer, k, valid, first))


def test_append_past_2_to_the_31_elements():
    size, head_dim, pages = 64, 256, 2**17 + 64
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(1, 2, 2, head_dim)), jnp.bfloat16)
    slot = pages * size - 2

    def run(k):
        unread = jnp.zeros((2 * pages, size, head_dim), jnp.bfloat16)
        table = jnp.arange(2 * pages, dtype=jnp.int32).reshape(1, 2, pages)
        layer = LayerCache(unread, unread, jnp.full((1, 2), slot + 2, jnp.int32), table)
        rows = (2 * pages, size)
        keys = Int4Keys(
            jnp.zeros((*rows, head_dim // 2), jnp.uint8),
            jnp.ones(rows, jnp.float16),
            jnp.zeros(rows, jnp.float16),
        )
        assert keys.packed.size > 2**31
        keys = ON_GPU(keys, layer, k, jnp.full(1, 2, jnp.int32), jnp.full((1, 2), slot, jnp.int32))
        last = jnp.array([pages - 1, 2 * pages - 1])
        return Int4Keys(*(pool[last, -2:] for pool in keys)), jnp.count_nonzero(keys.zero)

    rows, written = jax.jit(run)(k)
    for part, want in zip(
        rows, quantise(jax.device_put(k, jax.devices("cpu")[0]).swapaxes(1, 2)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(part)[None], np.asarray(want))
    assert int(written) == 4
