"""Tests that nearest_centroid in triton finds what the reference finds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from tests.kernels.cases.nearest_centroid import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", batch=1, kv_heads=8, points=3277, groups=1639, head_dim=128),
    Case("large_few", kv_heads=8, points=23, groups=6554, head_dim=128),
    Case("large_long", batch=1, kv_heads=1, points=13108, groups=6554, head_dim=128, used="all"),
)


@partial(jax.jit, static_argnames="implementation")
def found(*arrays, implementation="triton"):
    return nearest_centroid(*arrays, implementation=implementation)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_finds_what_the_reference_finds(case, seed):
    inputs = case.build(seed)
    got, want = found(*inputs), found(*inputs, implementation="reference")
    if case.like == "whole":
        np.testing.assert_array_equal(got, want)
        return
    points, centroid = (np.asarray(x, np.float64) for x in inputs[:2])
    products = np.einsum("bkmh,bklh->bkml", points, centroid)
    for b in range(case.batch):
        there = np.s_[b, :, : int(inputs.number[b])]
        chosen = np.take_along_axis(products[there], np.asarray(got)[there][..., None], -1)
        wanted = np.take_along_axis(products[there], np.asarray(want)[there][..., None], -1)
        np.testing.assert_allclose(chosen, wanted, atol=1e-5)


def test_a_row_alone_finds_what_it_finds_in_a_batch():
    for points in (200, 23):
        case = Case("", points=points, like="directions")
        inputs = case.build()
        together = found(*inputs)
        for b in range(case.batch):
            alone = found(*jax.tree.map(lambda x, b=b: x[b : b + 1], inputs))
            np.testing.assert_array_equal(alone, together[b : b + 1])


def test_points_beyond_two_to_the_31_numbers_are_found():
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
