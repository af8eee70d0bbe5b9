"""HARD-KV compresses while decoding, gives each head the slots it needs, and merges dropped tokens.

Right after the prompt, and then every `period` tokens of a row, each KV head keeps its sinks, its
newest tokens and the best of the others. Dropped tokens are not lost: one slot represents all of
them, with a logit that never exceeds their joint logit (jsparse.policies.eviction.merging).

Paper: "HARD-KV: Head-Adaptive Regularization for Decoding-time KV Compression".

Where we differ: by default a layer's heads share its slots ("joint", as in Ada-KV), while the paper
counts slots by top-p of each head's metric, calibrated to real attention. That is the option
"calibrated"; "n_star" counts by attention itself, the target of the calibration, and "union" counts
as the paper's published code does. The paper's tier of masked pages is `patience`. We had only the
abstract, the captions and parts of the text (docs/papers/hard_kv.md).
"""

import functools
import logging
from typing import Literal, get_args

import jax.numpy as jnp

from jsparse.builder import builder
from jsparse.hyper_parameters import flag, fraction, one_of, whole_number
from jsparse.policies.eviction import budgets as rules
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import ScoreFn, Settings
from jsparse.policies.eviction.top_p import or_in_top_p
from jsparse.policies.h2o import SUMS, accumulated
from jsparse.policies.r_kv import IMPORTANCE, important_and_rare
from jsparse.policies.snapkv import POOL, POOLING, pooled_attention
from jsparse.policy import Policy

Metric = Literal["attention", "snapkv", "r_kv", "h2o"]
Budgets = Literal["joint", "uniform", "n_star", "calibrated", "union"]
# the number of last queries that are within a question; in a longer window, most belong to the text
# before it
QUESTION = 8

logger = logging.getLogger("jsparse.hard_kv")


@builder
def hard_kv(
    budget: int = 1024,
    floor: int | None = None,
    cap: int | None = None,
    p: float = 0.9,
    period: int = 128,
    window: int = 32,
    sink: int = 4,
    metric: Metric = "attention",
    budgets: Budgets = "joint",
    merge: bool = True,
    patience: int = 0,
    recent: int | None = None,
) -> Policy:
    """Keeps the slots that each KV head needs, and one slot that merges all dropped tokens.

    Sinks, the merged slot and the newest tokens count in `budget`, `floor` and `cap`.

    Args:
        budget: the slots per KV head: the average over a layer's heads for budgets="joint", the
            number of each head for "uniform".
        floor: the minimum slots of a head, if heads differ; None: half the budget.
        cap: the maximum slots of a head, if heads differ; None: twice the budget.
        p: for "n_star" and "calibrated" the share of the window's attention that a head keeps, over
            all tokens that it holds or ever dropped; for "union" the share that each query of the
            window keeps of its attention to all tokens that the head holds.
        period: the number of new tokens of a row between compressions.
        window: the number of newest tokens whose queries score the others.
        sink: the number of first tokens that are kept.
        metric: the scores of slots: the window's "attention" among the competing slots, or as in
            "snapkv", "r_kv" or "h2o".
        budgets: how slots are shared out. "joint": a layer's best slots over all heads. "uniform":
            the same number for all heads. "n_star": for each head the fewest with the share p of
            attention. "calibrated": a number by the metric's softmax, at a temperature found at the
            first compression so that it equals that of "n_star". "union": all slots that any query
            of the window has in its own top-p.
        merge: whether dropped tokens are merged into one slot; "n_star" and "calibrated" need it,
            because its share of attention is that of all dropped tokens.
        patience: the number of compressions for which the `period` best slots to be dropped wait,
            unread.
        recent: the number of newest tokens that are kept, at least the window; None: the window.

    A head holds at most cap + period slots, and `period` more with patience.
    """
    whole_number("sink", sink, 0)
    whole_number("period", period, 1)
    whole_number("patience", patience, 0)
    if patience > 254:
        raise ValueError(f"patience={patience}: must be at most 254")
    fraction("p", p)
    one_of("metric", metric, get_args(Metric))
    one_of("budgets", budgets, get_args(Budgets))
    flag("merge", merge)
    if budgets in ("n_star", "calibrated") and not merge:
        raise ValueError(
            f"merge={merge}: must be True with budgets={budgets!r}, which counts the merged slot's "
            "share of attention as dropped"
        )
    if budgets == "union" and metric != "attention":
        raise ValueError(f"metric={metric!r}: must be 'attention' with budgets='union'")
    whole_number("window", window, 1)
    newest = window if recent is None else recent
    whole_number("recent", newest, 1)
    if newest < window:
        raise ValueError(f"recent={recent}: must be at least window={window}")
    if metric == "attention" and window > QUESTION:
        _log(window)
    whole_number("budget", budget, 1)
    floor = max(budget // 2, 1) if floor is None else floor
    cap = 2 * budget if cap is None else cap
    room = _rooms(budget, floor, cap, newest, sink, merge, budgets)
    score: dict[str, ScoreFn] = {
        "attention": pooled_attention(1, POOLING, "competing"),
        "snapkv": pooled_attention(POOL, POOLING),
        "r_kv": important_and_rare(IMPORTANCE),
        "h2o": accumulated,
    }
    # R-KV's scores, a weighted difference that may be negative, are used as logits directly
    logits = (lambda scores: scores) if metric == "r_kv" else jnp.log
    counts = {
        "joint": rules.joint(room),
        "uniform": rules.uniform(room),
        "n_star": rules.n_star(room, p),
        "calibrated": rules.calibrated(room, p, logits),
        "union": rules.union(room),
    }
    largest = (budget if budgets == "uniform" else cap) + period * (2 if patience else 1)
    settings = Settings(
        or_in_top_p(score[metric], p) if budgets == "union" else score[metric],
        counts[budgets],
        kept=room.budget if budgets == "uniform" else room.max_count,
        max_length=lambda prompt_tokens, new_tokens: min(prompt_tokens + new_tokens, largest),
        window=window,
        recent=newest,
        sink=sink,
        period=period,
        merge=merge,
        patience=patience,
        tracking=SUMS if metric == "h2o" else None,
        calibrates=budgets == "calibrated",
    )
    return evicting(settings)


@functools.cache
def _log(window: int) -> None:
    """Warns, once, of the default's loss."""
    logger.warning(
        "hard_kv with metric='attention' and window=%d drops single facts in the middle of a "
        "prompt, such as pass keys; metric='snapkv' with window=%d keeps most of them",
        window,
        QUESTION,
    )


def _rooms(
    budget: int, floor: int, cap: int, newest: int, sink: int, merge: bool, budgets: Budgets
) -> rules.CountBounds:
    """Returns the room for competing slots within floor, cap and budget.

    Raises:
        ValueError: one of them leaves negative room, or they are not in order.
    """
    for name, value in (("budget", budget), ("floor", floor), ("cap", cap), ("recent", newest)):
        whole_number(name, value, 1)
        if value > rules.MAX_SLOTS:
            raise ValueError(f"{name}={value}: must be at most {rules.MAX_SLOTS}")
    minimum = newest + sink + 1
    used = {"uniform": ("budget",), "joint": ("budget", "cap")}.get(budgets, ("cap",))
    for name, value in (("budget", budget), ("cap", cap)):
        if name in used and value < minimum:
            raise ValueError(
                f"{name}={value}: must be at least {minimum}: newest tokens + sink + 1"
            )
    if budgets != "uniform" and floor > cap:
        raise ValueError(f"floor={floor}: must be at most cap={cap}")
    if budgets == "joint" and not floor <= budget <= cap:
        raise ValueError(f"budget={budget}: must be from floor={floor} to cap={cap}")
    protected = newest + sink + merge
    return rules.CountBounds(*(max(value - protected, 0) for value in (floor, cap, budget)))
