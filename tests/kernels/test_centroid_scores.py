"""Tests centroid_scores against a loop over each head's centroids."""

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.centroid_scores import centroid_scores
from tests.kernels.cases.centroid_scores import CASES, Case
from tests.support.marks import slow_except_named

compiled = jax.jit(centroid_scores, static_argnames="implementation")


@pytest.mark.parametrize(
    "case", slow_except_named(CASES, "any", "radii_bfloat16", "odd", "units"), ids=str
)
def test_scores_match_a_loop(case):
    inputs = case.build()
    got = compiled(*inputs)
    assert (got.dtype, got.shape) == (np.float32, inputs.centroids.shape[:3])
    got, inputs = jax.device_get((got, inputs))
    q, centroids = (np.asarray(x, np.float64) for x in (inputs.q, inputs.centroids))
    for b, k in np.ndindex(case.batch, case.kv_heads):
        heads, number = q[b, k * case.group : (k + 1) * case.group], int(inputs.number[b, k])
        for i, centroid in enumerate(centroids[b, k, :number]):
            if inputs.unit is not None and not inputs.chosen[b, k, inputs.unit[b, k, i]]:
                assert np.isneginf(got[b, k, i])
                continue
            reach = 0.0 if inputs.radius is None else float(inputs.radius[b, k, i])
            want = max(head @ centroid + reach * np.linalg.norm(head) for head in heads)
            assert float(got[b, k, i]) == pytest.approx(want, rel=1e-5, abs=1e-4)
        assert np.isneginf(got[b, k, number:]).all()


def test_no_vector_in_a_ball_exceeds_its_score():
    inputs = Case("", radii=True, number="all", head_dim=8).build()
    away = np.random.default_rng(0).normal(size=(20, *inputs.centroids.shape))
    away /= np.linalg.norm(away, axis=-1, keepdims=True)
    assert inputs.radius is not None
    inside = np.asarray(inputs.centroids) + away * np.asarray(inputs.radius)[..., None]
    q = np.asarray(inputs.q).reshape(2, 3, 4, 8)
    logits = np.einsum("bkgh,nbklh->nbkgl", q, inside).max((0, 3))
    scores = np.asarray(compiled(*inputs))
    assert (logits <= scores + 1e-5).all()
    assert (scores - logits).min() < 1.0  # a far looser bound would not be


def test_unit_and_chosen_must_be_given_together():
    inputs = Case("", units=3).build()
    with pytest.raises(ValueError, match="unit, chosen: must be given together"):
        centroid_scores(**inputs._replace(unit=None)._asdict())
