"""Tests block_sparse_prefill against a float64 softmax over the chosen keys of each query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import read_heads
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from tests.kernels.cases.block_sparse_prefill import BLOCK, CASES, Case
from tests.support.marks import slow_except_named

attend = jax.jit(block_sparse_prefill, static_argnames="implementation")


def expected(q, kv, valid, chosen):
    """Returns o in float64, and NaN for padding."""
    k, v = (np.asarray(read_heads(pool, kv), np.float64) for pool in (kv.k, kv.v))
    q, o = np.asarray(q, np.float64), np.full(q.shape, np.nan)
    lengths, valid, chosen = np.asarray(kv.lengths)[:, 0], np.asarray(valid), np.asarray(chosen)
    for b, t, n in np.ndindex(q.shape[:3]):
        if t >= valid[b]:
            continue
        position, head = lengths[b] - valid[b] + t, n // (q.shape[2] // k.shape[1])
        slots = np.arange(position + 1)
        slots = slots[chosen[b, n, t // BLOCK, slots // BLOCK]]
        logits = k[b, head, slots] @ q[b, t, n] / np.sqrt(q.shape[3])
        weights = np.exp(logits - logits.max(initial=-np.inf))
        o[b, t, n] = weights @ v[b, head, slots] / max(weights.sum(), 1e-300)
    return o


@pytest.mark.parametrize("case", slow_except_named(CASES, "ragged", "nothing"), ids=str)
def test_queries_attend_to_chosen_blocks(case):
    given = case.build()
    got, want = np.asarray(attend(*given), np.float64), expected(*given)
    assert attend(*given).dtype == given.q.dtype
    assert np.isfinite(got).all()
    real, rounding = ~np.isnan(want), float(jnp.finfo(case.dtype).eps)
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=16 * rounding)
    if case.density == 0:
        assert not got.any()


def test_no_choice_is_every_block():
    q, kv, valid, chosen = Case("ragged").build()
    every = attend(q, kv, valid, jnp.ones_like(chosen))
    np.testing.assert_array_equal(attend(q, kv, valid), every)


def test_chosen_must_have_the_blocks_of_chunk_and_cache():
    q, kv, valid, chosen = Case("ragged").build()
    with pytest.raises(ValueError, match=r"chosen.shape=\(4, 6, 2, 2\): must end in \(2, 3\)"):
        block_sparse_prefill(q, kv, valid, chosen[..., 1:])
