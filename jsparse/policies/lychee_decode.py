"""LycheeDecode makes a few KV heads dense; they pick the tokens for the other heads.

A retrieval head attends to all tokens and passes the heaviest to the head of the same index in the
next layer. A sparse head attends to the set that it receives, and passes it on. The type of each
head is learned (`jsparse.train`).

Paper: "LycheeDecode: Accelerating Long-Context LLM Inference via Hybrid-Head Sparse Decoding" (Lin
et al.), arXiv:2602.04541. As in its appendix F, the weights of a group's mean query are used for
its query heads. Attention reports them from its normal pass, so picking reads no K.

Where we differ: sets consist of pages of 16 tokens by default, since those are read at the full
memory bandwidth (`granularity="token"` is the paper's). Sinks and recent tokens are always picked,
since the layers after a retrieval head need them even if it gives them little weight (`sink=0,
recent=0` is the paper's). The projections' weights are not reordered by head type, since one pool
of work units over all heads of the batch needs no contiguous heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache, StepView
from jsparse.hooks import State
from jsparse.hyper_parameters import below_one, fraction, one_of, whole_number
from jsparse.pallas_kernels.threshold_select import Threshold, TopK, TopP
from jsparse.policies import head_gates
from jsparse.policies.picks import pick
from jsparse.policy import Policy, Services, knob
from jsparse.selection import Granularity, Selection
from jsparse.selection.partials import StatsKind

PickRule = Literal["top_k", "top_p", "threshold", "ratio"]
# the default value of each rule, and the check of its values
RULES: dict[PickRule, tuple[int | float, Callable[[str, Any], None]]] = {
    "top_k": (4096, partial(whole_number, minimum=1)),
    "top_p": (0.99, fraction),
    "threshold": (1e-3, below_one),
    "ratio": (0.5, below_one),
}


class Settings(NamedTuple):
    """The hyper-parameters.

    Attributes:
        retrieval: the mask of retrieval heads.
        gates, value, rule, granularity, sink, recent: those of `lychee_decode`.
    """

    retrieval: Bool[np.ndarray, "L K"]
    gates: Any
    value: int | float
    rule: PickRule
    granularity: Granularity
    sink: int
    recent: int

    def unit(self, page_size: int) -> int:
        """Returns the number of tokens of a picked unit."""
        return page_size if self.granularity == "page" else 1


@builder
def lychee_decode(
    gates,
    value: int | float | None = None,
    rule: PickRule = "top_k",
    granularity: Granularity = "page",
    correct_every: int = 0,
    sink: int = 4,
    recent: int = 64,
) -> Policy:
    """Attends to everything in retrieval heads, and to their picks in the others.

    A sparse head attends to the picks of the last retrieval head of the same index.

    Args:
        gates: the retrieval heads: a name that ships with jsparse, a file written by `jsparse
            train-gates` (read once per process), or the mask [L, K] itself. In layer 0 all must be
            retrieval heads.
        value: the number that `rule` takes; None: the rule's default.
        rule: the rule that picks tokens by the weights of a group's mean query. "top_k" picks the
            `value` tokens with the highest weights (default 4096). "top_p" picks the fewest tokens
            with a total weight of `value` (default 0.99). "threshold" picks the tokens with a
            weight above `value`; for a page the sum counts (default 1e-3). "ratio" picks all but a
            share `value` of the context, so the number of tokens grows with it (default 0.5).
        granularity: the picked unit: "page" for whole pages by the sum of their tokens' weights,
            "token" for single tokens.
        correct_every: the number of new tokens after which K and V of the newest tokens are
            recomputed densely; 0: never. The paper uses 32.
        sink: the number of first tokens that are always picked, or whose pages are.
        recent: the same for the last tokens. For "top_k" and "ratio" both count among the picks, so
            the number of attended tokens does not change; if they exceed it, the heaviest of them
            are picked. For "top_p" and "threshold" both are added to the picks. The paper uses 0
            and 0.
    """
    one_of("rule", rule, get_args(PickRule))
    one_of("granularity", granularity, get_args(Granularity))
    number = RULES[rule][0] if value is None else value
    check_value(rule, "value", number)
    for name, count in (("correct_every", correct_every), ("sink", sink), ("recent", recent)):
        whole_number(name, count, 0)
    retrieval = head_gates.retrieval_heads(gates)
    if not retrieval[0].all():
        raise ValueError(
            f"gates={gates!r}: all heads of layer 0 must be retrieval heads, since no earlier "
            "layer picks"
        )
    settings = Settings(retrieval, gates, number, rule, granularity, sink, recent)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        update=partial(update, settings),
        stats=partial(stats, settings),
        services=Services(correct_every=correct_every),
        shares="pages",
        per_row={"value": partial(check_value, rule)} if rule in ("top_p", "threshold") else {},
    )


def check_value(rule: PickRule, name: str, value: Any) -> None:
    """Raises ValueError unless a rule allows this value."""
    try:
        RULES[rule][1](name, value)
    except ValueError as error:
        raise ValueError(f"{error} with rule={rule!r}") from None


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns empty sets S: ids [B, K, C], count [B, K]; C is the maximum of picked units."""
    head_gates.require_fit(settings.retrieval, settings.gates, spec)
    heads, unit = (spec.batch, spec.num_kv_heads), settings.unit(spec.page_size)
    units, value = spec.capacity // unit, settings.value
    numbers = {"top_k": int(value) // unit, "ratio": -int(-(1 - value) * units // 1)}
    maximum = min(max(numbers.get(settings.rule, units), 1), units)
    return jnp.zeros((*heads, maximum), jnp.int32), jnp.zeros(heads, jnp.int32)


def select(settings: Settings, state: State, layer: int, q: Array, view: StepView):
    """Attends to everything in retrieval heads, and to S(l, h) in the others."""
    ids, count = state
    here = settings.retrieval[layer]
    dense = head_gates.of_rows(here, len(count)) if here.any() else None
    return Selection(ids, count, dense=dense, granularity=settings.granularity), None, state


def stats(settings: Settings, layer: int) -> StatsKind | None:
    """Requests the mean query's weights if the next layer uses a set picked in this one."""
    here, later = settings.retrieval[layer], settings.retrieval[layer + 1 :]
    if len(later) == 0 or not (here & ~later[0]).any():
        return None
    return "page_mass" if settings.granularity == "page" else "token_logits"


def update(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Sets S(l+1, h) to a retrieval head's heaviest tokens, or to S(l, h) for a sparse head."""
    if stats is None:
        return state
    (ids, count), kv = state, view.layers[layer]
    picked = pick(
        stats.scores,
        rule_of(settings, kv, knob(view, "value", settings.value)),
        kv.lengths,
        sink=settings.sink,
        recent=settings.recent,
        capacity=ids.shape[-1],
        granularity=settings.granularity,
        unit=settings.unit(kv.page_size),
    )
    here = head_gates.of_rows(settings.retrieval[layer], len(count))
    return jnp.where(here[..., None], picked.ids, ids), jnp.where(here, picked.count, count)


def rule_of(settings: Settings, kv: LayerCache, value: Any) -> TopK | TopP | Threshold:
    """Returns the rule that picks a layer's units; `value` is a number, or one per row and head."""
    unit = settings.unit(kv.page_size)
    match settings.rule:
        case "top_k":
            return TopK(max(int(value) // unit, 1))
        case "top_p":
            return TopP(value)
        case "threshold":
            return Threshold(value)
    # rounding may put an integer slightly above itself; ceil must not round it up
    return TopK(jnp.ceil((1 - value) * (1 - 1e-6) * kv.lengths / unit).astype(jnp.int32))
