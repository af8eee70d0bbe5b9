"""Tests products with listed rows, including lists of several blocks, against numpy."""

import itertools

import jax
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import BLOCK, products, weighted_sum
from tests.support.marks import slow_except

BATCH, HEADS, GROUP, DIM, PAGE, PAGES = 2, 2, 3, 8, 4, 400


LISTS = [*itertools.product([5, BLOCK, 2 * BLOCK, 2 * BLOCK + 300], [False, True])]
SOME = (BLOCK, False), (2 * BLOCK + 300, True)


@pytest.mark.parametrize("lists", slow_except(LISTS, *SOME), ids=str)
def test_products_equal_those_of_gathered_rows(lists):
    number, paged = lists
    rng = np.random.default_rng(number)
    pool = rng.normal(size=(BATCH * HEADS * PAGES, PAGE, DIM)).astype(np.float32)
    table = np.arange(len(pool), dtype=np.int32)
    table = (rng.permutation(table) if paged else table).reshape(BATCH, HEADS, PAGES)
    lengths = np.full((BATCH, HEADS), PAGES * PAGE, np.int32)
    layer = LayerCache(pool, pool, lengths, table if paged else None)
    slots = rng.integers(PAGES * PAGE, size=(BATCH, HEADS, number)).astype(np.int32)
    rows = np.zeros((BATCH, HEADS, number, DIM))
    for b, h, n in np.ndindex(slots.shape):
        rows[b, h, n] = pool[table[b, h, slots[b, h, n] // PAGE], slots[b, h, n] % PAGE]
    q = rng.normal(size=(BATCH, HEADS, GROUP, DIM)).astype(np.float32)
    weights = rng.normal(size=(BATCH, HEADS, GROUP, number)).astype(np.float32)
    logits = jax.jit(products)(q, layer.k, layer, slots)
    sums = jax.jit(weighted_sum)(weights, layer.v, layer, slots)
    close = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(logits, np.einsum("bkgh,bknh->bkgn", q, rows), **close)
    np.testing.assert_allclose(sums, np.einsum("bkgn,bknh->bkgh", weights, rows), **close)
