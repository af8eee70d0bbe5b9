"""Says how many of its competing slots each KV head keeps.

Rules that count shares of the scores take negative ones, which some methods have, as 0.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.threshold_select import TopP, threshold_select
from jsparse.policy import whole_number
from jsparse.shapes import Lengths

MOST = 2**30  # slots: counts are of int32
LOG_TEMPERATURES, STEPS = (-12.0, 6.0), 40


class Bounds(NamedTuple):
    """Holds the least and the most competing slots of a head, and how many there are per head."""

    least: int
    most: int
    budget: int


class CountFn(Protocol):
    """Return the number of slots to keep and the temperatures that stay for the next time."""

    def __call__(
        self,
        scores: Float32[Array, "B K S"],
        competing: Bool[Array, "B K S"],
        temperatures: Float32[Array, "B K"] | None,
        /,
    ) -> tuple[Lengths, Float32[Array, "B K"] | None]: ...


def competing_room(budget: int, protected: int) -> int:
    """Return how many slots a budget leaves beside the protected ones.

    Raises:
        ValueError: it leaves none.
    """
    whole_number("budget", budget, 1)
    if not protected < budget <= MOST:
        raise ValueError(
            f"budget={budget}: must be above {protected}, the number of protected slots, and at "
            f"most {MOST}"
        )
    return budget - protected


def uniform(bounds: Bounds) -> CountFn:
    """Give every head `budget` slots."""

    def count(scores, competing, temperatures):
        return jnp.full(scores.shape[:2], bounds.budget, jnp.int32), temperatures

    return count


def joint(bounds: Bounds) -> CountFn:
    """Give a layer's heads K · budget slots together: its best, whichever head has them.

    Source: Ada-KV (Feng et al., arXiv:2407.11550).
    """

    def count(scores, competing, temperatures):
        heads, slots = scores.shape[1:]
        total = jnp.full(scores.shape[:1], heads * min(bounds.budget, slots), jnp.int32)
        ranked = jnp.where(competing, scores, -jnp.inf)
        counts = shared_counts(ranked, total, least=bounds.least, most=bounds.most)
        return counts, temperatures

    return count


def n_star(bounds: Bounds, p: float) -> CountFn:
    """Give a head the fewest slots that carry the share p of its scores."""

    def count(scores, competing, temperatures):
        weights = jnp.where(competing, jnp.maximum(scores, 0.0), 0.0)
        return jnp.clip(_fewest(weights, p), bounds.least, bounds.most), temperatures

    return count


def calibrated(bounds: Bounds, p: float) -> CountFn:
    """Give a head the fewest slots that carry p of a softmax of its scores, at its temperature.

    The temperature is found the first time that a score is above 0, as the one at which the n* best
    carry p, and kept: later counts follow how scores have moved. Source: HARD-KV (calibration).
    """

    def count(scores, competing, temperatures):
        assert temperatures is not None
        scores = jnp.where(competing, jnp.maximum(scores, 0.0), 0.0)
        positive = jnp.any(scores > 0, -1)
        new = (temperatures == 0) & positive

        def find() -> tuple[Array, Array]:
            needed = _fewest(scores, p)
            found = temperature(scores, competing, needed, p)
            return jnp.where(new, found, temperatures), needed

        temperatures, needed = jax.lax.cond(
            jnp.any(new), find, lambda: (temperatures, jnp.zeros(new.shape, jnp.int32))
        )
        weights = _softmax(scores, competing, jnp.where(temperatures == 0, 1.0, temperatures))
        # at a temperature just found the n* best carry p up to rounding, which must not add a slot
        counts = jnp.where(new, needed, _fewest(weights, p))
        counts = jnp.where(positive, counts, 0)
        return jnp.clip(counts, bounds.least, bounds.most), temperatures

    return count


def temperature(
    scores: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    count: Lengths,
    p: float,
) -> Float32[Array, "B K"]:
    """Return the T at which the `count` best of softmax(scores / largest score / T) carry p.

    The share falls from 1 to count / n as T grows. Where even count / n is p or more, T is the
    largest that is looked at.
    """
    best = jnp.sort(jnp.where(competing, scores, -jnp.inf), axis=-1, descending=True)
    listed = jnp.arange(best.shape[-1], dtype=jnp.int32) < count[..., None]

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        weights = _softmax(best, jnp.isfinite(best), jnp.exp(middle))
        enough = jnp.sum(jnp.where(listed, weights, 0.0), -1) >= p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    ends = tuple(jnp.full(scores.shape[:2], end, jnp.float32) for end in LOG_TEMPERATURES)
    return jnp.exp(jax.lax.fori_loop(0, STEPS, halve, ends)[0])


def _softmax(
    scores: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    temperatures: Float32[Array, "B K"],
) -> Float32[Array, "B K S"]:
    """Return softmax(scores / largest score / T) over the competing slots."""
    largest = jnp.max(jnp.where(competing, scores, 0.0), axis=-1, keepdims=True)
    logits = (scores / jnp.where(largest > 0, largest, 1.0) - 1) / temperatures[..., None]
    weights = jnp.where(competing, jnp.exp(logits), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)


def _fewest(weights: Float32[Array, "B K S"], p: float) -> Int32[Array, "B K"]:
    """Count the fewest slots, heaviest first, that carry the share p of each head's weights."""
    slots = weights.shape[-1]
    return threshold_select(weights[:, :, None], TopP(p), capacity=slots, weights="raw").count
