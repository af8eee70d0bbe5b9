"""Tests the merged slot against the exact logsumexp of the slots that it replaces, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jsparse import cache as kv_cache
from jsparse.cache import LayerCache, read_heads
from jsparse.policies.eviction.merging import merged_slot, put_slot
from jsparse.policies.eviction.window import mean_query

HEADS, DIM, PAGE, PAGES = 2, 16, 8, 8
SLOTS = PAGE * PAGES


merge, put, of_window = (
    jax.jit(f, static_argnums=n) for f, n in ((merged_slot, ()), (put_slot, 1), (mean_query, 2))
)


def layer(rng, paged):
    """A layer with a token in every slot, over an identity table or a scrambled one."""
    pages = HEADS * PAGES
    table = rng.permutation(pages).reshape(1, HEADS, PAGES).astype(np.int32) if paged else None
    k, v = (2 * rng.standard_normal((pages, PAGE, DIM)) for _ in "kv")
    return LayerCache(
        jnp.asarray(k, jnp.float32),
        jnp.asarray(v, jnp.float32),
        jnp.full((1, HEADS), SLOTS, jnp.int32),
        None if table is None else jnp.asarray(table),
        bias=jnp.zeros((pages, PAGE), jnp.float32),
    )


def exact(pool, held):
    return np.asarray(read_heads(pool, held), np.float64)[0]


def logits(queries, keys, bias):
    """[K, n, H], [K, S, H], [K, S] -> [K, n, S]."""
    return np.einsum("knh,ksh->kns", queries, keys) / DIM**0.5 + bias[:, None]


def logsumexp(x):
    top = x.max(-1)
    return top + np.log(np.exp(x - top[..., None]).sum(-1))


def test_merged_slot_is_a_lower_bound_that_is_tight_at_its_query():
    """For 1000 queries, also after five more merges with other queries.

    The bound is against all the tokens that were ever dropped. If every merge has the same query,
    the slot's logit stays exact there.
    """
    rng = np.random.default_rng(0)
    for same in (True, False):
        held, sink = layer(rng, True), 3
        keys, values = exact(held.k, held), exact(held.v, held)
        dropped = np.zeros((HEADS, SLOTS), bool)
        dropped[:, sink] = True
        queries = 1.5 * rng.standard_normal((HEADS, 1000, DIM))
        query = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
        for period in range(5):
            if not same:
                query = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
            new = rng.random((HEADS, SLOTS)) < 0.2
            new &= ~dropped & (np.arange(SLOTS) > sink)
            before = held.bias
            marked = jnp.asarray(new | (np.arange(SLOTS) == sink))[None]
            merged = merge(held, marked, jnp.asarray(query))
            held = put(held, sink, merged, jnp.ones((1, HEADS), bool))
            dropped |= new
            assert (np.asarray(held.bias) != np.asarray(before)).sum() == HEADS
            slot = [exact(pool, held)[:, sink : sink + 1] for pool in (held.k, held.bias)]
            gone = np.where(dropped, 0.0, -np.inf)
            truth = logsumexp(logits(queries, keys, gone))
            found = logits(queries, *slot)[..., 0]
            assert (found <= truth + 1e-4).all(), period
            assert (found < truth - 0.1).mean() > 0.5
            at_query = np.asarray(query, np.float64)[0][:, None]
            bounded, tight = (
                logsumexp(logits(at_query, keys, gone)),
                logits(at_query, *slot)[..., 0],
            )
            if same or period == 0:
                np.testing.assert_allclose(tight, bounded, atol=2e-5)
                # there its value is the softmax mean of all values
                weights = np.exp(logits(at_query, keys, gone) - bounded[..., None])
                expected = np.einsum("kns,ksh->kh", weights, values)
                np.testing.assert_allclose(exact(held.v, held)[:, sink], expected, atol=1e-4)
            else:
                assert (tight <= bounded + 1e-4).all()


def test_logit_at_the_query_stays_exact_in_low_precision():
    """The bias compensates the rounding of K to bfloat16 there."""
    rng = np.random.default_rng(1)
    held = layer(rng, False)
    held = held._replace(k=held.k.astype(jnp.bfloat16), v=held.v.astype(jnp.bfloat16))
    query = jnp.asarray(rng.standard_normal((1, HEADS, DIM)), jnp.float32)
    merged = merge(held, jnp.ones((1, HEADS, SLOTS), bool), query)
    assert merged.k.dtype == merged.v.dtype == jnp.bfloat16
    at_query = np.asarray(query, np.float64)[0][:, None]
    slot = np.asarray(merged.k, np.float64)[0][:, None], np.asarray(merged.bias).T
    truth = logsumexp(logits(at_query, exact(held.k, held), np.zeros((HEADS, SLOTS))))
    np.testing.assert_allclose(logits(at_query, *slot)[..., 0], truth, atol=1e-5)


def test_single_slot_merges_into_itself():
    """The first slot after the sinks may thus be merged repeatedly."""
    held, sink = layer(np.random.default_rng(2), True), 4
    only = jnp.broadcast_to(jnp.arange(SLOTS) == sink, (1, HEADS, SLOTS))
    merged = merge(held, only, jnp.ones((1, HEADS, DIM)))
    for got, pool in zip(merged, (held.k, held.v, held.bias), strict=True):
        np.testing.assert_allclose(got[0], exact(pool, held)[:, sink], atol=1e-5)


def test_only_marked_heads_are_written():
    held = layer(np.random.default_rng(3), True)
    merged = merge(held, jnp.ones((1, HEADS, SLOTS), bool), jnp.ones((1, HEADS, DIM)))
    after = put(held, 9, merged, jnp.array([[False, True]]))
    for name in ("k", "v", "bias"):
        was, now = (np.asarray(kv_cache.read_heads(getattr(x, name), x))[0] for x in (held, after))
        np.testing.assert_array_equal(was[0], now[0])
        np.testing.assert_array_equal(np.delete(was[1], 9, 0), np.delete(now[1], 9, 0))
        assert (was[1, 9] != now[1, 9]).any()


def test_mean_query_is_over_the_window_and_the_group():
    """For a row shorter than the window, over the queries that exist."""
    ring = jnp.asarray(np.random.default_rng(4).standard_normal((2, 4, 6, DIM)), jnp.float32)
    found = of_window(ring, jnp.array([50, 3]), 2)
    for row, asked in ((0, 4), (1, 3)):
        for head in range(2):
            expected = np.asarray(ring)[row, :asked, 3 * head : 3 * head + 3].mean((0, 1))
            np.testing.assert_allclose(found[row, head], expected, atol=1e-6)
