"""The window's attention against float64 numpy, whole and in blocks of slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec
from jsparse.policies.eviction import window
from jsparse.policies.eviction.window import as_ring, pooled, window_attention

BATCH, HEADS, GROUP, DIM, PAGE, PAGES, SIZE = 2, 2, 3, 16, 8, 7, 5
LENGTHS, POSITIONS = np.array([[50, 31], [9, 4]]), np.array([70, 3])


def inputs(paged, *, seed=0):
    """A layer with biases, the newest queries in order, and the slots that compete."""
    rng = np.random.default_rng(seed)
    pool = BATCH * HEADS * PAGES + 1 if paged else None
    spec = CacheSpec(1, BATCH, HEADS * GROUP, HEADS, DIM, PAGE, PAGES, jnp.float32, pool)
    held = kv_cache.init(spec, fields=("bias",)).layers[0]
    assert held.bias is not None
    held = held._replace(
        k=jnp.asarray(rng.standard_normal(held.k.shape), jnp.float32),
        bias=jnp.asarray(rng.standard_normal(held.bias.shape), jnp.float32),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
    )
    if paged:
        table = rng.permutation(pool - 1).reshape(BATCH, HEADS, PAGES)
        held = held._replace(block_table=jnp.asarray(table, jnp.int32))
    queries = 2 * rng.standard_normal((BATCH, SIZE, HEADS * GROUP, DIM))
    queries[1, : SIZE - POSITIONS[1]] = 0  # a row shorter than the window
    slots = np.arange(PAGE * PAGES)
    return held, queries.astype(np.float32), (slots >= 2) & (slots < LENGTHS[..., None] - 1)


def expected(held, queries, competing, group):
    keys, bias = (np.asarray(kv_cache.read_heads(x, held), np.float64) for x in (held.k, held.bias))
    out = np.zeros(competing.shape)
    for b, k in np.ndindex(BATCH, HEADS):
        here = np.flatnonzero(competing[b, k])
        asked = min(POSITIONS[b], SIZE)
        shares = []
        for q in queries[b, SIZE - asked :, k * GROUP : (k + 1) * GROUP].astype(np.float64):
            logits = q @ keys[b, k, here].T / DIM**0.5 + bias[b, k, here]
            logits = logits if group == "mean" else logits.max(0, keepdims=True)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            shares.append((weights / weights.sum(-1, keepdims=True)).mean(0))
        out[b, k, here] = np.mean(shares, axis=0)
    return out


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("pages", [None, 1, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_window_attention_equals_numpy(paged, pages, group, monkeypatch):
    """In one block, and in blocks of 1 and of 3 pages, the last of which are 7 pages' rest."""
    held, queries, competing = inputs(paged)
    if pages is not None:
        page_bytes = 4 * BATCH * HEADS * GROUP * SIZE * PAGE
        monkeypatch.setattr(window, "BLOCK_BYTES", pages * page_bytes)
    positions = jnp.asarray(POSITIONS, jnp.int32)
    ring = as_ring(jnp.asarray(queries), positions)
    attend = jax.jit(partial(window_attention, group=group))
    found = np.asarray(attend(ring, positions, held, jnp.asarray(competing)))
    np.testing.assert_allclose(found, expected(held, queries, competing, group), atol=1e-6)
    sums = found.sum(-1)
    np.testing.assert_allclose(sums, competing.any(-1), atol=1e-5)
    assert (found[~competing] == 0).all()


def test_blocks_bound_the_logits(monkeypatch):
    """No array, K and the queries aside, is larger than a block or than the result."""
    held, queries, competing = inputs(False)
    page_bytes = 4 * BATCH * HEADS * GROUP * SIZE * PAGE
    positions = jnp.asarray(POSITIONS, jnp.int32)

    def largest():
        made = jax.make_jaxpr(lambda *x: window_attention(*x))(
            jnp.asarray(queries), positions, held, jnp.asarray(competing)
        )
        shapes = [v.aval.shape for v in equations(made.jaxpr) if hasattr(v.aval, "shape")]
        return max(int(np.prod(shape)) for shape in shapes if DIM not in shape)

    whole = largest()
    monkeypatch.setattr(window, "BLOCK_BYTES", page_bytes)
    assert largest() <= max(page_bytes // 4, competing.size)
    assert whole == PAGES * page_bytes // 4


def equations(jaxpr):
    """All that the equations of a program give, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_a_ring_holds_position_p_at_p_modulo_its_size():
    """As the engine's writes of later queries have it."""
    newest = np.arange(2 * 4).reshape(2, 4, 1, 1).astype(np.float32)  # of each row, oldest first
    positions = np.array([10, 2])
    ring = np.asarray(as_ring(jnp.asarray(newest), jnp.asarray(positions, jnp.int32)))
    for row, count in enumerate(positions):
        for age in range(min(4, count)):
            assert ring[row, (count - 1 - age) % 4] == newest[row, 3 - age]


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_pooling_takes_neighbours_and_zeros_beyond_the_ends(width, pooling):
    scores = np.random.default_rng(0).random((1, 1, 20)).astype(np.float32)
    competing = np.ones(scores.shape, bool)
    competing[..., :4] = competing[..., 17:] = False
    found = np.asarray(pooled(jnp.asarray(scores), jnp.asarray(competing), width, pooling))[0, 0]
    inside, side = np.where(competing, scores, 0.0)[0, 0], width // 2
    padded = np.pad(inside, side)
    how = np.mean if pooling == "mean" else np.max
    for slot in range(4, 17):
        assert found[slot] == pytest.approx(how(padded[slot : slot + width]), rel=1e-5)
