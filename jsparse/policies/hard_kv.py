"""HARD-KV compresses while it decodes, gives each head what it needs, and merges what it drops.

Right after the prompt, and then every `period` tokens of a row, each KV head keeps its sinks, its
newest tokens and the best of the others. What it drops is not lost: one slot stands for all of it,
with a logit that is never above theirs together (jsparse.policies.eviction.merging).

Paper: "HARD-KV: Head-Adaptive Regularization for Decoding-time KV Compression".

Where we differ: by default a layer's heads share its slots ("joint", as in Ada-KV), where the paper
counts by top-p of each head's metric, calibrated towards real attention. That is an option,
"calibrated"; "n_star" counts by attention itself, towards which it calibrates, and "union" as the
paper's published code does. The paper's tier of masked pages is `patience`. We built from the
paper's abstract, the captions of its figures and pieces of its text (docs/papers/hard_kv.md).
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
# as many last queries as lie within a question; of more, most belong to the text before it
QUESTION = 8

logger = logging.getLogger("jsparse.hard_kv")


@builder
def hard_kv(
    budget: int = 1024,
    floor: int = 512,
    cap: int = 2048,
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
    """Keeps as many slots per KV head as it needs, and one that stands for all it dropped.

    Sinks, the merged slot and the newest tokens count in `budget`, `floor` and `cap`.

    Args:
        budget: the slots per KV head, on average over a layer's heads with budgets="joint", of each
            with "uniform"; the others do not use it.
        floor: the least slots of a head, where heads differ.
        cap: the most slots of a head, where heads differ.
        p: the share of the window's attention that a head keeps with "n_star" and "calibrated",
            counted over all that it holds or ever dropped; with "union" the share that each query
            of the window keeps of its attention to all that the head holds.
        period: new tokens of a row between compressions.
        window: the number of newest tokens whose queries score the others.
        sink: the number of first tokens that are kept.
        metric: the way slots are scored: by the window's "attention" among those that compete, or
            as in "snapkv", "r_kv" or "h2o".
        budgets: the way slots are shared out: "joint" gives a layer's heads their best together,
            "uniform" all heads the same, "n_star" each the fewest that keep the share p of
            attention, "calibrated" as many by the metric's softmax, whose temperature is found at
            the first compression, so that they are as many as those, and "union" all slots that
            some query of the window has in its own top-p.
        merge: whether what is dropped is merged into one slot; "n_star" and "calibrated" need it,
            since its share of attention is that of all they dropped.
        patience: the compressions for which the `period` best that a head would drop wait unread.
        recent: the number of newest tokens that are kept, at least the window; None is the window.

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
    room = _rooms(budget, floor, cap, newest, sink, merge, budgets)
    score: dict[str, ScoreFn] = {
        "attention": pooled_attention(1, POOLING, "competing"),
        "snapkv": pooled_attention(POOL, POOLING),
        "r_kv": important_and_rare(IMPORTANCE),
        "h2o": accumulated,
    }
    # R-KV's scores, a weighted difference that may be negative, are logits as they are
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
    """Returns the room that floor, cap and budget leave for the slots that compete.

    Raises:
        ValueError: one of them leaves less than nothing, or they are not in order.
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
