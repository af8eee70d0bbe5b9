"""Tests new_token_attention against a float64 softmax over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.new_token_attention import new_token_attention
from tests.kernels.cases.new_token_attention import CASES, Case
from tests.support.marks import slow_except_named

attend = jax.jit(new_token_attention, static_argnames="implementation")


def expected(q, k, v, past_o, past_lse):
    """Returns o in float64: earlier tokens count as one token of weight exp(lse) and value o."""
    q, k, v, past_o, past_lse = (np.asarray(x, np.float64) for x in (q, k, v, past_o, past_lse))
    o, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        head, row = n // group, t * group + n % group
        logits = k[b, : t + 1, head] @ q[b, t, n] / np.sqrt(q.shape[3])
        weights = np.exp([*logits, past_lse[b, head, row]])
        values = [*v[b, : t + 1, head], past_o[b, head, row]]
        o[b, t, n] = weights @ np.array(values) / weights.sum()
    return o


@pytest.mark.parametrize("case", slow_except_named(CASES, "few", "many_queries"), ids=str)
def test_new_tokens_join_earlier_ones(case):
    given = case.build()
    got, rounding = attend(*given), float(jnp.finfo(case.dtype).eps)
    assert got.dtype == given[0].dtype
    want = expected(*given)
    # a logit sums head_dim products, in an order that differs from CPU to CPU
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=8 * rounding)


def test_partial_must_have_a_row_per_query():
    q, k, v, o, lse = Case("few").build()
    with pytest.raises(ValueError, match=r"past_o.shape=.*: must have 15 rows per KV head"):
        new_token_attention(q, k, v, o[:, :, 1:], lse[:, :, 1:])
