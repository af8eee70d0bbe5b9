"""Counts the competing slots that each KV head keeps.

The scores rank the slots; `n_star` and `calibrated` count them by attention itself.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.hooks import MaxLengthFn
from jsparse.hyper_parameters import fraction, number_in, whole_number
from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.threshold_select import TopP, threshold_select
from jsparse.ranks import gathered, own_part
from jsparse.shapes import Lengths

MAX_SLOTS = 2**30  # counts of slots are int32
MARKED = 1.0  # the minimum score of the slots that `union` keeps
LOG_TEMPERATURES, STEPS = (-24.0, 12.0), 40


class CountBounds(NamedTuple):
    """The minimum and maximum competing slots of a head, and the budget per head."""

    min_count: int
    max_count: int
    budget: int

    def clip(self, counts: Lengths) -> Lengths:
        """Returns counts of competing slots within these bounds."""
        return jnp.clip(counts, self.min_count, self.max_count)


class Attended(NamedTuple):
    """The window's attention to a layer's slots, as shares of its attention to all of them.

    Attributes:
        competing: the share of each competing slot, 0 for all others.
        merged: the share of the merged slot, which represents all tokens dropped before.
    """

    competing: Float32[Array, "B K S"]
    merged: Float32[Array, "B K"]

    def share_needed(self, p: float) -> Float32[Array, "B K"]:
        """Returns the share of the competing slots' attention needed for a total share of p.

        Sinks and newest tokens are kept, and dropped tokens cannot come back. So the competing
        slots may lose only 1 - p minus the share of the dropped tokens.
        """
        whole = jnp.sum(self.competing, -1)
        may_lose = jnp.maximum(1.0 - p - self.merged, 0.0)
        return jnp.maximum(1.0 - may_lose / jnp.maximum(whole, 1e-30), 0.0)


class CountFn(Protocol):
    """Returns the number of slots to keep and the temperatures for the next compression.

    `attended` computes the window's attention, only if it is called.
    """

    def __call__(
        self,
        scores: Float32[Array, "B K S"],
        competing: Bool[Array, "B K S"],
        temperatures: Float32[Array, "B K"] | None,
        attended: Callable[[], Attended],
        /,
    ) -> tuple[Lengths, Float32[Array, "B K"] | None]: ...


def competing_room(budget: int, protected: int) -> int:
    """Returns the number of slots in a budget besides the protected ones.

    Raises:
        ValueError: there are none.
    """
    whole_number("budget", budget, 1)
    if not protected < budget <= MAX_SLOTS:
        raise ValueError(
            f"budget={budget}: must be above {protected}, the number of protected slots, and at "
            f"most {MAX_SLOTS}"
        )
    return budget - protected


def uniform(bounds: CountBounds) -> CountFn:
    """Gives every head `budget` slots."""

    def count(scores, competing, temperatures, attended):
        return jnp.full(scores.shape[:2], bounds.budget, jnp.int32), temperatures

    return count


def joint(bounds: CountBounds, floor: float = 0.0) -> CountFn:
    """Gives a layer's heads K · budget slots together: its best, whichever head they belong to.

    A head with c of the best gets (1 - floor) · c + floor · budget slots, rounded so that the heads
    still have K · budget together.

    Source: Ada-KV (Feng et al., arXiv:2407.11550); its published code blends counts in this way and
    rounds each separately.

    Args:
        bounds: the minimum and maximum slots of a head, and their mean.
        floor: the part of the budget that heads do not compete for, from 0 to 1.
    """
    least, most = (_without_floor(limit, bounds.budget, floor) for limit in bounds[:2])

    def count(scores, competing, temperatures, attended):
        ranked = gathered(jnp.where(competing, scores, -jnp.inf), 1)
        heads, slots = ranked.shape[1:]
        total = jnp.full(scores.shape[:1], heads * min(bounds.budget, slots), jnp.int32)
        counts = shared_counts(ranked, total, min_count=least, max_count=most)
        return own_part(_towards_mean(counts, floor) if floor else counts, 1), temperatures

    return count


def _without_floor(limit: int, budget: int, floor: float) -> int:
    """Returns the c with (1 - floor) · c + floor · budget = limit, rounded towards the budget."""
    away = (limit - budget) / max(1 - floor, 1 / MAX_SLOTS)
    return budget + int(min(max(away, -budget), MAX_SLOTS - budget))


def _towards_mean(counts: Lengths, part: float) -> Lengths:
    """Moves counts a part of the way to their mean, in whole slots, and keeps their sum.

    The largest remainders are rounded up; ties go to the first heads.
    """
    heads = counts.shape[1]
    shift = part * (jnp.sum(counts, -1, keepdims=True) - heads * counts) / heads
    whole = jnp.floor(shift)
    remainder = jnp.round(1024 * (shift - whole))  # otherwise float32 errors would break ties
    rank = jnp.argsort(jnp.argsort(-remainder))
    return counts + whole.astype(jnp.int32) + (rank < -jnp.sum(whole, -1, keepdims=True))


def n_star(bounds: CountBounds, p: float) -> CountFn:
    """Gives a head n* slots: the fewest that keep the share p of the attention.

    Attention is that of the window to all slots, including sinks, newest tokens and the merged
    slot: as long as it does not change, only the first compression drops slots. The scores only
    rank slots and do not count them, so p means the same with any scores.
    """

    def count(scores, competing, temperatures, attended):
        found = attended()
        return bounds.clip(_num_needed(found.competing, found.share_needed(p))), temperatures

    return count


class LayerBudget(NamedTuple):
    """The settings of a method whose KV heads compete for the slots of their layer.

    Attributes:
        rule, kept, max_length: as in `settings.Settings`, for a compression after the prompt only.
    """

    rule: CountFn
    kept: int
    max_length: MaxLengthFn


def layer_budget(budget: int, protected: int, floor: float, cap: float) -> LayerBudget:
    """Returns the settings of Ada-KV's budgets; see `ada_kv` for the arguments.

    Raises:
        ValueError: an argument is out of range.
    """
    room = competing_room(budget, protected)
    fraction("floor", floor)
    number_in("cap", cap, "[1, inf)")
    largest = min(int(cap * budget), MAX_SLOTS)
    bounds = CountBounds(0, largest - protected, room)

    def max_length(prompt_tokens: int, new_tokens: int) -> int:
        return min(prompt_tokens, largest) + new_tokens

    return LayerBudget(joint(bounds, floor), bounds.max_count, max_length)


def union(bounds: CountBounds) -> CountFn:
    """Gives a head all competing slots with a score of at least MARKED."""

    def count(scores, competing, temperatures, attended):
        marked = competing & (scores >= MARKED)
        return bounds.clip(jnp.sum(marked, -1, dtype=jnp.int32)), temperatures

    return count


def calibrated(
    bounds: CountBounds,
    p: float,
    logits: Callable[[Float32[Array, "B K S"]], Float32[Array, "B K S"]],
) -> CountFn:
    """Gives a head its top-p slots of Ŝ, the softmax of its metric's logits over T.

    T is found at the first compression at which `n_star` gives the head any slots: with T, the two
    numbers are equal. T is then kept, so later counts follow the scores. Ŝ is over the competing
    slots; the share of it to keep is the one that `n_star` requires of their attention.

    Source: HARD-KV, which has Ŝ = S(g(z/T)) for logits z, a metric g and the softmax S. Here
    `logits` computes g(z) from scores, and T divides the result. For metrics with g(z/T) = g(z)/T,
    such as attention itself and maxima over neighbours, this is the same; for all metrics T
    preserves the order of slots, as the paper requires.

    Args:
        bounds: the minimum and maximum slots of a head.
        p: the share.
        logits: the logarithm if scores are shares of attention; T is then 1.
    """

    def count(scores, competing, temperatures, attended):
        assert temperatures is not None
        found, attention = logits(scores), attended()
        some, p_competing = jnp.any(competing, -1), attention.share_needed(p)
        new = (temperatures == 0) & some

        def find() -> tuple[Array, Array]:
            needed = _num_needed(attention.competing, p_competing)
            at = temperature(found, competing, needed, p_competing)
            return jnp.where(new & (needed > 0), at, temperatures), needed

        temperatures, needed = jax.lax.cond(
            jnp.any(new), find, lambda: (temperatures, jnp.zeros(new.shape, jnp.int32))
        )
        weights = _softmax(found, competing, jnp.where(temperatures == 0, 1.0, temperatures))
        # at a new temperature, rounding or ties could add to n*
        counts = jnp.where(new, needed, _num_needed(weights, p_competing))
        return bounds.clip(jnp.where(some, counts, 0)), temperatures

    return count


def temperature(
    logits: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    count: Lengths,
    p: Float32[Array, "B K"],
) -> Float32[Array, "B K"]:
    """Returns the T nearest 1 at which `count` slots are the fewest with share p of S(logits / T).

    Their number grows with T. HARD-KV has two solvers (Appendix D); the text that we have names
    one, gradient descent on T by Adam. This bisection of log T is ours, and gives the T that a
    descent from T = 1 would reach first. If there is no such T, for example if more than `count`
    slots tie for first place, it is a bound of LOG_TEMPERATURES.
    """
    now = _num_needed(_softmax(logits, competing, jnp.ones_like(logits[..., 0])), p)
    best = jnp.sort(jnp.where(competing, logits, -jnp.inf), axis=-1, descending=True)
    colder = now > count
    # colder until `count` slots have share p, or warmer until one slot fewer no longer does
    listed = jnp.arange(best.shape[-1], dtype=jnp.int32) < (count - ~colder)[..., None]

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        weights = _softmax(best, jnp.isfinite(best), jnp.exp(middle))
        enough = jnp.sum(jnp.where(listed, weights, 0.0), -1) >= p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    ends = tuple(jnp.full(count.shape, end, jnp.float32) for end in LOG_TEMPERATURES)
    low, high = jax.lax.fori_loop(0, STEPS, halve, ends)
    return jnp.where(now == count, 1.0, jnp.exp(jnp.where(colder, low, high)))


def _softmax(
    logits: Float32[Array, "B K S"],
    competing: Bool[Array, "B K S"],
    temperatures: Float32[Array, "B K"],
) -> Float32[Array, "B K S"]:
    """Returns softmax(logits / T) over the competing slots; all 0 if every logit is -inf."""
    largest = jnp.max(jnp.where(competing, logits, -jnp.inf), axis=-1, keepdims=True)
    below = logits - jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(competing, jnp.exp(below / temperatures[..., None]), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)


def _num_needed(weights: Float32[Array, "B K S"], p: Float32[Array, "B K"]) -> Int32[Array, "B K"]:
    """Counts the fewest slots, heaviest first, with a share p of each head's weights."""
    slots = weights.shape[-1]
    found = threshold_select(weights[:, :, None], TopP(p), capacity=slots, weights="raw")
    return jnp.where(p > 0, found.count, 0)
