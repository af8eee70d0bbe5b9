"""Turns scores into a Selection: a rule per row, a union per group, at most C ids per KV head."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.threshold_select.rules import (
    Always,
    Budget,
    Rule,
    Threshold,
    TopK,
    TopP,
)
from jsparse.selection import Selection
from jsparse.shapes import Lengths

OutputGranularity = Literal["token", "page", "page_mass"]
WeightKind = Literal["softmax", "raw"]
GroupMerge = Literal["union", "max"]


@checked(nonempty="B K G n m")
def threshold_select(
    scores: Float[Array, "B K G n"],
    rule: Rule,
    *,
    capacity: int,
    granularity: OutputGranularity = "token",
    page_size: int | None = None,
    weights: WeightKind = "softmax",
    group: GroupMerge = "union",
    lengths: Lengths | None = None,
    names: Int32[Array, "B K m"] | None = None,
    always: Always | None = None,
    implementation: str | None = None,
) -> Selection:
    """Selects the units that each KV head attends to, from the scores of its query heads.

    Every row that has a score (under TopP, a positive weight) selects at least one unit. Ties go to
    the lowest index. Sums are float32 and depend on their order: a TopP set has at least the weight
    p of its row to within 1e-5, and less without its lightest unit. TopK is exact, and so is Budget
    if a row's sizes add up to at most 2^24. If the union exceeds `capacity`, the units with the
    lowest scores are dropped. A unit's score is then its maximum over the rows, and logits of
    several rows are compared as logarithms of their normalised weights.

    Args:
        scores: the rows, one per query head; -inf and NaN are never selected.
        rule: TopK, TopP, Threshold or, if ids are of the scored units, Budget.
        capacity: C.
        granularity: the units of scores and ids. With "token" and "page", ids are of the scored
            units. With "page_mass", scores are of tokens and ids of pages: the rule applies to the
            pages' weights, each the sum of its tokens'.
        page_size: P under "page_mass", otherwise None.
        weights: the quantity that TopP and Threshold compare. "softmax": scores are logits, and the
            quantity is their softmax over the row; "raw": the scores themselves, at least 0 under
            TopP.
        group: how a group selects. "union": each row selects for itself. "max": the group selects
            once, by a unit's largest weight in any row (TopP: as a share of these), or by its
            largest score if weights are raw.
        lengths: the number of valid scores in each head's rows; None: all.
        names: the ids under which units are listed, ascending; None: their indices. Each name
            covers S = units / m adjacent units: unit i is listed as names[…, i // S]·S + i % S, so
            that the names of pages serve for their tokens.
        always: the units that precede all others, if TopK selects once per KV head among the scored
            units; None: none.
        implementation: "triton", "reference", or None to choose.

    Returns:
        ids ascending, 0 past the count. The granularity is "token" for "token", otherwise "page".

    Raises:
        ValueError: an argument is none of the above, or shapes do not match.
    """
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity={capacity!r}: must be an integer of at least 1")
    _check_units(scores, granularity, page_size, names)
    _check_rule(rule, granularity)
    if always is not None:
        _check_always(always, rule, scores, granularity, group)
    return run(
        "threshold_select",
        implementation,
        BACKENDS,
        scores,
        rule,
        capacity=capacity,
        granularity=granularity,
        page_size=page_size or 1,
        weights=weights,
        group=group,
        lengths=lengths,
        names=names,
        always=always,
    )


def _triton():
    from jsparse.pallas_kernels.threshold_select.triton_gpu import threshold_select

    return threshold_select


def _reference():
    from jsparse.pallas_kernels.threshold_select.reference import threshold_select

    return threshold_select


def _triton_refuses(scores: Array, *_, page_size: int, names: Array | None, **__) -> str | None:
    if page_size & (page_size - 1):
        return f"needs page_size to be a power of two, not {page_size}"
    span = 1 if names is None else scores.shape[-1] // page_size // names.shape[-1]
    if span & (span - 1):
        return f"needs the number of units per name to be a power of two, not {span}"
    return no_triton()


BACKENDS = (
    Backend("triton", _triton, _triton_refuses),
    Backend("reference", _reference),
)


def _check_units(
    scores: Array, granularity: str, page_size: int | None, names: Array | None
) -> None:
    if granularity in ("token", "page"):
        if page_size is not None:
            raise ValueError(
                f"page_size={page_size}: must be None for granularity={granularity!r}, whose ids "
                "are of what is scored"
            )
    elif page_size is None or page_size < 1 or scores.shape[-1] % page_size:
        raise ValueError(
            f"page_size={page_size}: must divide n={scores.shape[-1]} for "
            f"granularity={granularity!r}"
        )
    units = scores.shape[-1] // (page_size or 1)
    if names is not None and units % names.shape[-1]:
        raise ValueError(f"names.shape={names.shape}: the last axis must divide {units} units")


def _check_rule(rule: Rule, granularity: str) -> None:
    if not isinstance(rule, TopK | TopP | Threshold | Budget):
        raise ValueError(f"rule={rule!r}: must be a TopK, a TopP, a Threshold or a Budget")
    name, value = rule._fields[0], rule[0]
    if isinstance(value, int | float):
        fits = {
            "k": lambda k: isinstance(k, int) and k >= 1,
            "tokens": lambda tokens: isinstance(tokens, int) and tokens >= 1,
            "p": lambda p: 0 < p <= 1,
            "theta": lambda t: t == t,
        }
        must = {"p": "above 0 and at most 1", "theta": "a number"}
        must |= dict.fromkeys(("k", "tokens"), "an integer of at least 1")
        if isinstance(value, bool) or not fits[name](value):
            raise ValueError(f"{name}={value!r}: must be {must[name]}")
    if isinstance(rule, Budget) and granularity == "page_mass":
        raise ValueError(
            f"granularity={granularity!r}: must be 'token' or 'page' under Budget, whose sizes are "
            "of the units scored"
        )


def _check_always(always: Always, rule: Rule, scores: Array, granularity: str, group: str) -> None:
    once = scores.shape[2] == 1 or group == "max"
    if not isinstance(rule, TopK) or granularity not in ("token", "page") or not once:
        raise ValueError(
            "always: must be None unless a TopK chooses once per KV head among the units "
            f"scored, not {type(rule).__name__} with granularity={granularity!r}, "
            f"group={group!r} and G={scores.shape[2]}"
        )
    for name, least in (("sink", 0), ("recent", 0), ("unit", 1)):
        value = getattr(always, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"always.{name}={value!r}: must be an integer of at least {least}")
