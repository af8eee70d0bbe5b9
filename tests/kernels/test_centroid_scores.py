"""Tests centroid_scores against a loop over each head's centroids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import every_other

from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.centroid_scores.cases import CASES, Case

compiled = jax.jit(centroid_scores, static_argnames="implementation")


@pytest.mark.parametrize("case", every_other(CASES), ids=lambda case: case.name)
def test_scores_what_a_loop_scores(case):
    inputs = case.build()
    got = compiled(*inputs)
    assert (got.dtype, got.shape) == (jnp.float32, inputs.centroids.shape[:3])
    q, centroids = (np.asarray(x, np.float64) for x in (inputs.q, inputs.centroids))
    for b, k in np.ndindex(case.batch, case.kv_heads):
        heads, number = q[b, k * case.group : (k + 1) * case.group], int(inputs.number[b, k])
        for i, centroid in enumerate(centroids[b, k, :number]):
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
    assert (scores - logits).min() < 1.0  # which a far looser bound would not be


INPUTS = CASES[0].build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"centroids": INPUTS.centroids[0]},
            r"centroids.shape=\(3, 40, 64\): must be \[B, K, L, H\], none of them 0",
        ),
        ({"centroids": INPUTS.centroids[:, :, :0]}, r"centroids.shape=\(2, 3, 0, 64\): must be"),
        ({"q": INPUTS.q[:1]}, r"q.shape=\(1, 12, 64\): must be \[2, N, 64\], N a multiple of 3"),
        ({"q": INPUTS.q[:, :11]}, r"q.shape=\(2, 11, 64\): must be .* N a multiple of 3"),
        ({"q": INPUTS.q.astype(jnp.int32)}, "q.dtype=int32: must be floating"),
        (
            {"centroids": INPUTS.centroids.astype(jnp.int8)},
            "centroids.dtype=int8: must be floating",
        ),
        ({"number": INPUTS.number[:1]}, r"number=int32\[1, 3\]: must be int32\[2, 3\]"),
        ({"number": INPUTS.number * 1.0}, r"number=float32\[2, 3\]: must be int32\[2, 3\]"),
        (
            {"radius": jnp.zeros((2, 3, 39))},
            r"radius=float32\[2, 3, 39\]: must be float32\[2, 3, 40\]",
        ),
        ({"implementation": "abacus"}, "implementation='abacus': centroid_scores has"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        centroid_scores(**{**INPUTS._asdict(), **change})
