"""LycheeDecode lets a few KV heads attend to everything and pick tokens for the other heads.

A retrieval head attends to all its tokens and hands the heaviest to the head of the same index in
the next layer. A sparse head attends to the set that it was handed, and hands that on. The type of
each head is learned (`jsparse.train`).

Paper: "LycheeDecode: Accelerating Long-Context LLM Inference via Hybrid-Head Sparse Decoding" (Lin
et al.), arXiv:2602.04541. As in its appendix F, the weights of a group's mean query stand for its
query heads. Attention reports them from the pass that it makes anyway, so picking reads no K.

Where we differ: sets consist of pages of 16 tokens by default, since those are read at the full
speed of memory (`granularity="token"` is the paper's). Sinks and recent text are always picked,
since the layers behind a retrieval head need them even where it passes them over (`sink=0,
recent=0` is the paper's). The weights of the projections are not reordered by head type, since one
pool of work units over all heads of the batch needs no contiguous heads.
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
# the default value of each rule, and the check that a value must pass
RULES: dict[PickRule, tuple[int | float, Callable[[str, Any], None]]] = {
    "top_k": (4096, partial(whole_number, minimum=1)),
    "top_p": (0.99, fraction),
    "threshold": (1e-3, below_one),
    "ratio": (0.5, below_one),
}


class Settings(NamedTuple):
    """Holds the hyper-parameters.

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
        """Returns the tokens of a unit that is picked."""
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
    """Attends to everything in retrieval heads and, in the others, to the picks of these.

    A sparse head takes what the last retrieval head of the same index picked.

    Args:
        gates: the retrieval heads, as a name that ships with jsparse, a file that
            `jsparse train-gates` wrote, which is not read again in the same process, or the mask
            [L, K] itself. In layer 0 all must be retrieval heads.
        value: the number that `rule` takes; None is the rule's default.
        rule: the rule that picks tokens by the weights of a group's mean query. "top_k" picks the
            `value` tokens of largest weight (default 4096). "top_p" picks the fewest tokens that
            weigh `value` (default 0.99). "threshold" picks the tokens that weigh more than `value`;
            for a page the sum counts (default 1e-3). "ratio" picks all but a share `value` of the
            context, so that the number of tokens grows with it (default 0.5).
        granularity: the unit that is picked: "page" for whole pages by the sum of their tokens'
            weights, "token" for single tokens.
        correct_every: the number of new tokens after which K and V of the newest tokens are
            recomputed densely; 0 is never. The paper uses 32.
        sink: the number of first tokens that are picked, or whose pages are, whatever their weight.
        recent: the same of the last tokens. "top_k" and "ratio" count both among their picks, so
            a head attends to no more than without them; where they are more than that, it picks
            the heaviest of them. "top_p" and "threshold" pick by their rule, and both are added.
            0 and 0 are the paper's.
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
            f"gates={gates!r}: all heads of layer 0 must be retrieval heads, nothing is picked "
            "before them"
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
    """Raises ValueError unless a rule can take this value."""
    try:
        RULES[rule][1](name, value)
    except ValueError as error:
        raise ValueError(f"{error} where rule={rule!r}") from None


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns empty sets S, ids [B, K, C] and count [B, K]; C is the most units that are picked."""
    head_gates.require_fit(settings.retrieval, settings.gates, spec)
    heads, unit = (spec.batch, spec.num_kv_heads), settings.unit(spec.page_size)
    units, value = spec.capacity // unit, settings.value
    numbers = {"top_k": int(value) // unit, "ratio": -int(-(1 - value) * units // 1)}
    maximum = min(max(numbers.get(settings.rule, units), 1), units)
    return jnp.zeros((*heads, maximum), jnp.int32), jnp.zeros(heads, jnp.int32)


def select(settings: Settings, state: State, layer: int, q: Array, view: StepView):
    """Attends to everything in retrieval heads, to S(l, h) in the others."""
    ids, count = state
    here = settings.retrieval[layer]
    dense = head_gates.of_rows(here, len(count)) if here.any() else None
    return Selection(ids, count, dense=dense, granularity=settings.granularity), None, state


def stats(settings: Settings, layer: int) -> StatsKind | None:
    """Asks for the mean query's weights where a set that is picked is used in the next layer."""
    here, behind = settings.retrieval[layer], settings.retrieval[layer + 1 :]
    if len(behind) == 0 or not (here & ~behind[0]).any():
        return None
    return "page_mass" if settings.granularity == "page" else "token_logits"


def update(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Sets S(l+1, h) to a retrieval head's heaviest tokens, and to S(l, h) in the others."""
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
    # rounding may put a whole number of units a little above itself; ceil must not round it up
    return TopK(jnp.ceil((1 - value) * (1 - 1e-6) * kv.lengths / unit).astype(jnp.int32))
