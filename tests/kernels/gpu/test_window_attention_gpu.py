"""Tests window_attention in triton against the float32 reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.window_attention import window_attention
from tests.kernels.cases.window_attention import CASES, Case

pytestmark = pytest.mark.gpu
LONG = Case("long", batch=1, kv_heads=1, group=4, window=32, num_pages=600, dtype="bfloat16")


def shares(inputs, group, implementation, over="competing"):
    run = jax.jit(window_attention, static_argnames=("group", "over", "implementation"))
    return np.asarray(run(*inputs, group=group, over=over, implementation=implementation))


@pytest.mark.parametrize("over", ["competing", "held"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
def test_matches_the_reference(case, group, over):
    inputs = case.build()
    exact = inputs._replace(
        queries=inputs.queries.astype(jnp.float32),
        layer=inputs.layer._replace(k=inputs.layer.k.astype(jnp.float32)),
    )
    want = shares(exact, group, "reference", over)
    np.testing.assert_allclose(shares(inputs, group, "triton", over), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_the_batch_changes_no_bit(group):
    inputs = replace(LONG, batch=3, kv_heads=2, table="identity").build()
    one = replace(LONG, kv_heads=2).build()
    pages, (k, v) = one.layer.k.shape[0], inputs.layer.arrays
    one = inputs._replace(
        queries=inputs.queries[:1],
        positions=inputs.positions[:1],
        layer=inputs.layer._replace(k=k[:pages], v=v[:pages], lengths=inputs.layer.lengths[:1]),
        competing=inputs.competing[:1],
    )
    together = shares(inputs, group, "triton")
    np.testing.assert_array_equal(shares(one, group, "triton")[0], together[0])
