"""Tests that centroid_update in triton moves centroids as the reference does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.centroid_update import centroid_update
from jsparse.pallas_kernels.point_groups import centroids_of
from tests.kernels.cases.centroid_update import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", batch=8, kv_heads=8, new=3, groups=6554, points=13108, head_dim=128),
    Case("large_radii", kv_heads=8, new=16, groups=6554, points=13108, head_dim=128, radii=True),
    Case("most", batch=1, new=128, joined=50, groups=90, points=300, head_dim=256, radii=True),
)


@partial(jax.jit, static_argnames=("normalise", "implementation"))
def updated(*arrays, normalise, implementation="triton"):
    return centroid_update(*arrays, normalise=normalise, implementation=implementation)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_moves_centroids_as_the_reference_does(case, seed):
    inputs = case.build(seed)
    got = updated(*inputs, normalise=case.normalise)
    want = updated(*inputs, normalise=case.normalise, implementation="reference")
    np.testing.assert_array_equal(got.size, want.size)
    np.testing.assert_array_equal(got.of_point, want.of_point)
    one, other = (np.asarray(centroids_of(x)) for x in (got, want))
    # a sum in another order may round to the neighbour
    rtol, atol = (2**-7, 1e-6) if case.dtype == "bfloat16" else (1e-5, 1e-6)
    np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    if want.radius is not None:
        # radii differ by no more than the centroids from which they reach out
        apart = np.linalg.norm(one - other, axis=-1)
        assert (np.abs(got.radius - want.radius) <= apart * (1 + 1e-4) + 1e-4).all()


def test_a_row_alone_gets_what_it_gets_in_a_batch():
    case = Case("", new=16, radii=True, own=True)
    inputs = case.build()
    together = updated(*inputs, normalise=True)
    for b in range(case.batch):
        alone = updated(*jax.tree.map(lambda x, b=b: x[b : b + 1], inputs), normalise=True)
        for one, all_rows in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], all_rows[b])


def test_donated_groups_are_changed_in_place_time_and_again():
    case = Case("", new=16, joined=3, head_dim=128)
    groups, points, _, group, nth = case.build()
    step = jax.jit(
        lambda groups: centroid_update(
            groups, points, None, group, nth, normalise=True, implementation="triton"
        ),
        donate_argnums=0,
    )
    want = groups
    for _ in range(5):
        want = centroid_update(
            want, points, None, group, nth, normalise=True, implementation="reference"
        )
    made = jax.tree.map(jnp.copy, groups)
    for _ in range(5):
        made = step(made)
    np.testing.assert_array_equal(made.size, want.size)
    np.testing.assert_allclose(
        np.asarray(made.centroid, np.float32), np.asarray(want.centroid, np.float32), atol=2e-2
    )
