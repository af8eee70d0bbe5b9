"""Tests centroid_update against a loop over groups."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.centroid_update import centroid_update
from tests.kernels.cases.centroid_update import CASES, Case
from tests.support.marks import slow_except_named

update = jax.jit(centroid_update, static_argnames="normalise")


def check(case: Case, seed: int = 0, wider: float = 0.0) -> None:
    inputs = case.build(seed)
    if wider:
        of_groups = inputs.groups._replace(radius=inputs.groups.radius + wider)
        inputs = inputs._replace(groups=of_groups)
    groups, points, radius, group, nth = jax.tree.map(np.asarray, inputs)
    made = update(*inputs, normalise=case.normalise)
    assert made.centroid.dtype == groups.centroid.dtype
    made = jax.device_get(made)
    for b, k in np.ndindex(*group.shape[:2]):
        there = np.flatnonzero(nth[b] >= 0)
        of_point = groups.of_point[b, k].copy()
        of_point[nth[b, there]] = group[b, k, there]
        np.testing.assert_array_equal(made.of_point[b, k], of_point)
        for g in range(case.groups):
            members = [i for i in there if group[b, k, i] == g]
            old, had = groups.centroid[b, k, g].astype(np.float64), int(groups.size[b, k, g])
            got = made.centroid[b, k, g].astype(np.float64)
            assert made.size[b, k, g] == had + len(members)
            if not members:
                np.testing.assert_array_equal(got, old)
                if made.radius is not None:
                    assert made.radius[b, k, g] == groups.radius[b, k, g]
                continue
            new = points[b, k, members].astype(np.float64)
            mean = (had * old + new.sum(0)) / (had + len(members))
            if case.normalise:
                mean /= np.linalg.norm(mean)
            atol = 2e-2 if case.dtype == "bfloat16" else 1e-6
            np.testing.assert_allclose(got, mean, atol=atol)
            if made.radius is None:
                continue
            own = np.zeros(len(members)) if radius is None else radius[b, k, members]
            far = [*(np.linalg.norm(new - got, axis=-1) + own)]
            if had:
                far.append(groups.radius[b, k, g] + np.linalg.norm(got - old))
            assert max(far) <= made.radius[b, k, g] <= max(far) * (1 + 1e-4) + 2e-5


@pytest.mark.parametrize("case", slow_except_named(CASES, "any", "radii_of_points", "odd"), ids=str)
def test_centroids_match_a_loop(case):
    check(case)


def test_radius_covers_the_shift_of_the_centroid():
    """However close the new points are."""
    check(CASES[2], wider=10)


def test_points_have_radii_if_groups_do():
    inputs = CASES[2].build()
    inputs = inputs._replace(groups=inputs.groups._replace(radius=None))
    with pytest.raises(ValueError, match="radius: must be None for groups that have none"):
        centroid_update(**inputs._asdict(), normalise=True)
