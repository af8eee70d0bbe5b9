"""Tests centroid_update against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.centroid_update import centroid_update
from tests.kernels.cases.centroid_update import CASES, JUNK, Case
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
def test_moves_centroids_as_a_loop_does(case):
    check(case)


@pytest.mark.parametrize("seed", [1, 2])
def test_radii_reach_old_points_and_new_ones(seed):
    check(CASES[1], seed)


def test_old_points_are_reached_from_where_their_centroid_moves():
    """However near the new ones are."""
    check(CASES[3], wider=10)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        groups, points, _, group, nth = case.build(3)
        assert points.shape == (case.batch, case.kv_heads, case.new, case.head_dim)
        there = np.asarray(nth) >= 0
        assert there[0].all()
        assert there.all() == (case.batch == 1)
        assert (np.asarray(group) == JUNK).any() == (not there.all())
        assert case.groups < 2 or not np.asarray(groups.size).all()


INPUTS = CASES[2].build()
POINTS, GROUP = np.asarray(INPUTS.points), np.asarray(INPUTS.group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"points": jax.device_put(POINTS[..., :8])},
            r"points=float32\[3, 2, 7, 8\]: must be float32\[",
        ),
        (
            {"points": jax.device_put(POINTS[:, :, :0])},
            r"points=float32\[3, 2, 0, 32\]: must be float32\[",
        ),
        (
            {"points": jax.device_put(POINTS.astype(jnp.bfloat16))},
            r"points=bfloat16\[3, 2, 7, 32\]: must be float32\[",
        ),
        (
            {"radius": jax.device_put(GROUP[..., :2] * 1.0)},
            r"radius=float32\[3, 2, 2\]: must be float32\[",
        ),
        (
            {"groups": INPUTS.groups._replace(radius=None)},
            "radius: must be None for groups that have none",
        ),
        (
            {"group": jax.device_put(GROUP[..., :3])},
            r"group=int32\[3, 2, 3\]: must be int32\[",
        ),
        (
            {"nth": jax.device_put(np.asarray(INPUTS.nth) * 1.0)},
            r"nth=float32\[3, 7\]: must be int32\[",
        ),
        ({"implementation": "abacus"}, "implementation='abacus': centroid_update has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        centroid_update(**{**INPUTS._asdict(), "normalise": True, **change})
