"""Tests ArkVale against its formulas, page by page and query by query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from tests.support.one_layer import OneLayer


def cuboid(keys):
    """The lower and the upper corner of ArkVale's cuboid-mean."""
    center = (keys.min(axis=0) + keys.max(axis=0)) / 2
    half = np.abs(keys - center).mean(axis=0)
    return center - half, center + half


def in_cuboid(q, keys):
    """The largest q·k in the cuboid: the better corner of each channel."""
    return np.maximum(*(q * corner for corner in cuboid(keys))).sum()


def in_ball(q, keys):
    """The largest q·k in the ball around the mean key that reaches the farthest key."""
    center = keys.mean(axis=0)
    radius = np.linalg.norm(keys - center, axis=-1).max()
    return q @ (center + q * radius / np.linalg.norm(q))


GREATEST = {"cuboid": in_cuboid, "ball": in_ball}


def pages_of(layer: OneLayer, budget: int, volume: str) -> list[set[int]]:
    """The pages that ArkVale keeps, per row and head."""
    found, size = [], layer.page_size
    for b, head in np.ndindex(layer.k.shape[:2]):
        group = np.asarray(layer.q, np.float64)[b, head * layer.group : (head + 1) * layer.group]
        scores = [
            max(GREATEST[volume](q, layer.k[b, head, first : first + size]) for q in group)
            for first in range(0, layer.length, size)
        ]
        newest = len(scores) - 1
        best = sorted(range(newest), key=lambda page: -scores[page])
        found.append({newest, *best[: budget // size - 1]})
    return found


def listed(layer: OneLayer) -> list[set[int]]:
    """The pages that the policy lists, per row and head."""
    chosen = layer.select()
    return [
        set(ids[:n].tolist())
        for ids, n in zip(chosen.ids.reshape(4, -1), chosen.count.reshape(4), strict=True)
    ]


@pytest.mark.parametrize("volume", GREATEST)
def test_keeps_the_newest_page_and_those_of_the_largest_scores(volume):
    for seed in range(4):
        layer = OneLayer(jsparse.arkvale(budget=24, volume=volume), length=41, seed=seed)
        assert listed(layer) == pages_of(layer, 24, volume)


@pytest.mark.parametrize("volume", GREATEST)
def test_empty_page_is_not_kept(volume):
    """Only its summary remains, which would score above all others; five whole pages are held."""
    layer = OneLayer(jsparse.arkvale(budget=24, volume=volume), length=41)
    layer.length = 40
    held = layer.kv._replace(lengths=np.full_like(layer.kv.lengths, 40))
    layer.view = layer.view._replace(cache=kv_cache.replace_layer(layer.view.cache, 0, held))
    for pool in (pools := jax.tree.map(np.array, layer.state[0])):
        pool.reshape(4, held.num_pages, -1)[:, 5] = 1e3
    layer.state = (pools,)
    assert listed(layer) == pages_of(layer, 24, volume)


def test_page_is_summarised_by_its_tokens():
    length, layer = 45, OneLayer(jsparse.arkvale(), length=45)
    size = layer.page_size
    low, high = (np.asarray(x).reshape(2, 2, -1, 16) for x in layer.state[0])
    for b, head, page in np.ndindex(2, 2, -(-length // size)):
        wanted = cuboid(layer.k[b, head, page * size : (page + 1) * size])
        kept = low[b, head, page], high[b, head, page]
        np.testing.assert_allclose(kept, wanted, rtol=1e-5, atol=1e-6)


def test_rewritten_page_forgets_its_former_keys():
    """The last three of the five tokens of page 5 are written over a layer of other keys."""
    before, after = (OneLayer(jsparse.arkvale(), length=45, seed=seed) for seed in (0, 1))
    new, at = jnp.zeros((2, 3, 2, 16)), jnp.zeros((2, 3), jnp.int32)  # the cache has the keys
    append = jax.jit(after.policy.append, static_argnums=1)
    (kept,) = append(before.state, 0, new, new, at, at, after.view)
    for pool, old, fresh in zip(kept, before.state[0], after.state[0], strict=True):
        pages, old, fresh = (np.asarray(x).reshape(4, -1, 16) for x in (pool, old, fresh))
        np.testing.assert_allclose(pages[:, 5], fresh[:, 5], rtol=1e-6)
        np.testing.assert_array_equal(np.delete(pages, 5, 1), np.delete(old, 5, 1))


def test_volumes_have_names():
    with pytest.raises(ValueError, match="volume='box': must be one of"):
        jsparse.arkvale(volume="box")
