"""Tests that centroid_scores in triton scores as the reference does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.centroid_scores import centroid_scores
from tests.kernels.cases.centroid_scores import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", 1, 8, clusters=6554, head_dim=128, number=4915, dtype="bfloat16"),
    Case("large_batch", 8, 8, clusters=6554, head_dim=128, dtype="bfloat16", radii=True),
    Case("large_float32", 2, 4, clusters=3000, head_dim=128, radii=True),
    Case("large_units", 8, 8, clusters=6554, head_dim=128, units=64, dtype="bfloat16"),
)
scored = jax.jit(centroid_scores, static_argnames="implementation")


def assert_close(inputs, got):
    # products of float32 in the reference must not be rounded to TF32
    with jax.default_matmul_precision("highest"):
        want = np.asarray(scored(*inputs, implementation="reference"))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_scores_as_the_reference_does(case, seed):
    inputs = case.build(seed)
    assert_close(inputs, scored(*inputs, implementation="triton"))


@pytest.mark.parametrize("size", [4096, 65536])
def test_blocks_of_any_size(size, monkeypatch):
    from jsparse.pallas_kernels.centroid_scores import triton_gpu

    monkeypatch.setattr(triton_gpu, "BLOCK_BYTES", size)
    monkeypatch.setattr(triton_gpu, "NUM_WARPS", 8)
    for case in (*LARGE[:2], CASES[0]):
        inputs = case.build(4)
        assert_close(inputs, jax.jit(triton_gpu.centroid_scores)(*inputs))


@pytest.mark.parametrize("case", [LARGE[1], LARGE[-1]], ids=str)
def test_a_row_alone_gets_the_bits_that_it_gets_in_a_batch(case):
    inputs = case.build()
    together = scored(*inputs, implementation="triton")
    alone = scored(*jax.tree.map(lambda x: x[5:6], inputs), implementation="triton")
    np.testing.assert_array_equal(alone, together[5:6])


def test_types_that_differ_meet_in_float32():
    inputs = CASES[0].build()
    inputs = inputs._replace(q=inputs.q.astype(jnp.bfloat16))
    assert_close(inputs, scored(*inputs, implementation="triton"))


def test_centroids_of_chosen_units_get_the_bits_that_they_get_without_units():
    inputs = LARGE[-1].build()
    inputs = inputs._replace(centroids=jnp.nan_to_num(inputs.centroids))
    flat = scored(*inputs[:3], implementation="triton")
    got = np.asarray(scored(*inputs, implementation="triton"))
    assert 0.1 < np.isfinite(got).mean() < 0.4
    np.testing.assert_array_equal(got, np.where(np.isfinite(got), flat, -np.inf))


def test_wide_heads_are_refused():
    inputs = Case("", head_dim=260, clusters=5).build()
    with pytest.raises(ValueError, match="takes a head dimension of at most 256, not 260"):
        scored(*inputs, implementation="triton")


def test_more_than_two_to_the_31_numbers():
    pairs, clusters, width = 17, 1 << 20, 128

    @partial(jax.jit, static_argnames="implementation")
    def last(implementation):
        made = jnp.zeros((1, pairs, clusters, width), jnp.bfloat16).at[:, :, -1].set(1)
        number = jnp.full((1, pairs), clusters, jnp.int32)
        q = jnp.arange(pairs, dtype=jnp.bfloat16)[None, :, None] * jnp.ones(width, jnp.bfloat16)
        return centroid_scores(q, made, number, implementation=implementation)[0, :, -2:]

    want = np.stack([np.zeros(pairs), np.arange(pairs) * width], -1)
    np.testing.assert_array_equal(last("triton"), want)
