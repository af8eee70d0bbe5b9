"""Tests that kernels address arrays of more than 2^31 elements: 32 bits would wrap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.key_bounds import PageBounds, PageBounds8
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.place_logits import place_logits
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.selection import Selection, everything

pytestmark = pytest.mark.gpu


def test_centroid_scores():
    pairs, clusters, width = 17, 1 << 20, 128

    @partial(jax.jit, static_argnames="implementation")
    def last(implementation):
        made = jnp.zeros((1, pairs, clusters, width), jnp.bfloat16).at[:, :, -1].set(1)
        number = jnp.full((1, pairs), clusters, jnp.int32)
        q = jnp.arange(pairs, dtype=jnp.bfloat16)[None, :, None] * jnp.ones(width, jnp.bfloat16)
        return centroid_scores(q, made, number, implementation=implementation)[0, :, -2:]

    want = np.stack([np.zeros(pairs), np.arange(pairs) * width], -1)
    np.testing.assert_array_equal(last("triton"), want)


def test_place_logits_in_and_out():
    pairs, pages, size = 9, 1 << 24, 16
    lengths = jnp.full((1, pairs), pages * size, jnp.int32)
    sizes = {"num_pages": pages, "page_size": size, "implementation": "triton"}

    @jax.jit
    def last():
        logits = jnp.arange(pairs * 2 * size, dtype=jnp.float32).reshape(pairs, -1)
        listed = Selection(jnp.full((1, pairs, 1), pages - 1, jnp.int32), jnp.ones_like(lengths))
        placed = place_logits(logits, listed, lengths, stats="token_logits", **sizes)
        many = jnp.full((pairs, pages * size), -jnp.inf).at[-1, -1].set(7.0)
        mass = place_logits(many, everything(lengths), lengths, stats="page_mass", **sizes)
        return placed[0, -1, -size:], logits[-1, :size], mass[0, -1, -2:]

    placed, want, mass = last()
    np.testing.assert_array_equal(placed, want)
    np.testing.assert_array_equal(mass, [-np.inf, 7.0])


def test_runs_to_tokens():
    pairs, capacity = 17, 1 << 27
    ids = jnp.zeros((1, pairs, 1), jnp.int32)
    edges = jnp.array([[[5, 8]]], jnp.int32)

    @jax.jit
    def ends():
        one = jnp.ones((1, pairs), jnp.int32)
        got = runs_to_tokens(ids, one, edges, capacity=capacity, implementation="triton")
        return got.ids[0, -1, :5], got.ids[0, :, -1], got.count

    first, last, count = ends()
    np.testing.assert_array_equal(first, [5, 6, 7, 0, 0])
    assert not np.asarray(last).any()
    np.testing.assert_array_equal(count, np.full((1, pairs), 3))


def test_row_gather():
    pool = jnp.zeros((70000, 32768), jnp.int8).at[69999].set(7)
    got = row_gather(pool, jnp.array([0, 69999], jnp.int32), None, implementation="triton")
    np.testing.assert_array_equal(got[:, 5], [0, 7])


def test_nearest_centroid():
    heads, count, width = 17, 1 << 20, 128
    centroid = jnp.eye(width, dtype=jnp.bfloat16)[None, None].repeat(heads, 1)
    number, groups = jnp.array([count], jnp.int32), jnp.array([width], jnp.int32)

    @jax.jit
    def ends():
        nth = jnp.arange(count, dtype=jnp.int32) * 7 % width
        points = jax.nn.one_hot(nth, width, dtype=jnp.bfloat16)
        points = jnp.broadcast_to(points, (1, heads, count, width))
        got = nearest_centroid(points, centroid, number, groups, implementation="triton")
        return jnp.sum(got != nth, -1)

    assert not np.asarray(ends()).any()


def test_threshold_select():
    shape = (520, 8, 4, 131072)
    scores = jnp.zeros(shape, jnp.bfloat16).at[-1, -1, -1, 77777].set(1).at[-1, -1, 0, 5].set(1)
    got = jax.jit(lambda s: threshold_select(s, TopK(1), capacity=4, implementation="triton"))(
        scores
    )
    np.testing.assert_array_equal(got.ids[-1, -1], [0, 5, 77777, 0])
    np.testing.assert_array_equal(got.count[:2], 1)


def test_int4_scores():
    size, head_dim, used = 16, 128, 8
    rng = np.random.default_rng(0)
    last = Int4Keys(*quantise(jnp.asarray(rng.normal(size=(used, size, head_dim)), jnp.float32)))
    q = jnp.asarray(rng.normal(size=(1, 4, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(used)[None, None], jnp.int32)
    lengths = jnp.full((1, 1), used * size, jnp.int32)

    def run(q, last, table, front):
        keys = Int4Keys(
            *(jnp.zeros((front + used, *x.shape[1:]), x.dtype).at[front:].set(x) for x in last)
        )
        unread = jnp.zeros((front + used, size, head_dim), jnp.bfloat16)
        layer = LayerCache(unread, unread, lengths, block_table=table + front)
        return int4_scores(q, layer, keys, None, implementation="triton")

    run = jax.jit(run, static_argnums=3)
    np.testing.assert_array_equal(
        run(q, last, table, 2**32 // (size * head_dim // 2)), run(q, last, table, 0)
    )


@pytest.mark.parametrize("form", [PageBounds, PageBounds8])
def test_bounds_append(form):
    page_size, head_dim, used = 16, 128, 8
    rng = np.random.default_rng(0)
    last = jnp.asarray(rng.normal(size=(used, page_size, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(used)[None, None], jnp.int32)
    lengths = jnp.full((1, 1), used * page_size - 3, jnp.int32)

    def run(last, table, front):
        pool = jnp.zeros((front + used, page_size, head_dim), last.dtype).at[front:].set(last)
        layer = LayerCache(pool, pool, lengths, block_table=table + front)
        bounds = form.of(*(jnp.zeros((front + used, head_dim), last.dtype) for _ in "lh"))
        valid = jnp.full(1, page_size * used, jnp.int32)
        bounds = bounds_append(
            bounds,
            layer,
            valid,
            jnp.zeros_like(lengths),
            max_new=page_size * used,
            implementation="triton",
        )
        return form(*(kept[front:] for kept in bounds))

    run = jax.jit(run, static_argnums=2)
    far, near = run(last, table, 2**31 // (page_size * head_dim)), run(last, table, 0)
    for a, b in zip(far, near, strict=True):
        np.testing.assert_array_equal(a, b)
    assert bool((near.low != near.high).all())


@pytest.mark.parametrize("paged", [False, True], ids=["identity", "table"])
def test_compact_pages(paged):
    page_size, head_dim, num_pages = 64, 256, 2**16 + 64
    shape = (2 * num_pages, page_size, head_dim)
    assert np.prod(shape) > 2**31
    slot = num_pages * page_size - 1  # the very last row of the second head
    numbers = jnp.arange(1, head_dim + 1, dtype=jnp.bfloat16)
    pool = jax.jit(lambda: jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(numbers))()
    table = jnp.arange(2 * num_pages, dtype=jnp.int32).reshape(1, 2, num_pages) if paged else None
    layer = LayerCache(pool, -pool, jnp.full((1, 2), slot + 1, jnp.int32), table)
    keep = Selection(
        jnp.full((1, 2, 1), slot, jnp.int32), jnp.array([[0, 1]], jnp.int32), granularity="token"
    )
    del pool
    out = jax.jit(partial(compact_pages, implementation="triton"), donate_argnums=0)(layer, keep)
    np.testing.assert_array_equal(np.asarray(out.k[num_pages, 0]), np.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(out.v[num_pages, 0]), -np.asarray(numbers))
    assert int(jnp.count_nonzero(out.k)) == 2 * head_dim
    np.testing.assert_array_equal(out.lengths, [[0, 1]])
