"""Wraps policies in what methods share: tokens always kept, layers and heads that stay dense.

These are wrappers rather than flags of every method. `with_state` is what a wrapper is made with
that keeps a state of its own.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jsparse.builder import builder, require_policy, require_stays
from jsparse.cache import CacheSpec, StepView
from jsparse.hyper_parameters import whole_number
from jsparse.partials import Summary
from jsparse.policies import head_gates
from jsparse.policy import (
    AppendFn,
    Eviction,
    InitFn,
    Policy,
    PrefillFn,
    PrefillView,
    SelectFn,
    Shares,
    State,
)
from jsparse.selection import everything, union, window
from jsparse.shapes import HeadFlags


class Paired(NamedTuple):
    """Holds the state of a wrapped policy and the wrapper's own."""

    base: State
    own: State


def with_state(
    base: Policy,
    init: InitFn,
    *,
    prefill: PrefillFn | None = None,
    append: AppendFn | None = None,
    select: SelectFn | None = None,
    shares: Shares | None = None,
    needs: tuple[str, ...] = (),
) -> Policy:
    """Give a policy a second state, the wrapper's own; its hooks still see theirs alone.

    The state becomes Paired(base, own). `prefill` and `append` get and return the own state, after
    the base's hooks have run. `select` gets and returns both, and calls `base.select` itself.
    `shares` says what of the own state other requests may use; the policy shares the lesser of that
    and what the base shares. `needs` is what the wrapper needs beside the base.
    """
    least = min(shares, base.shares, key=(None, "keys", "pages").index)

    def both(spec: CacheSpec) -> Paired:
        return Paired(base.init(spec), init(spec))

    def prefilled(state: Paired, layer: int, view: PrefillView) -> Paired:
        of_base = base.prefill(state.base, layer, view)
        return Paired(of_base, prefill(state.own, layer, view) if prefill else state.own)

    def appended(state: Paired, *arguments: Any) -> Paired:
        of_base = base.append(state.base, *arguments)
        return Paired(of_base, append(state.own, *arguments) if append else state.own)

    def selected(state: Paired, *arguments: Any):
        chosen, summary, of_base = base.select(state.base, *arguments)
        return chosen, summary, state._replace(base=of_base)

    def updated(state: Paired, *arguments: Any) -> Paired:
        return state._replace(base=base.update(state.base, *arguments))

    def reworked(hook):
        def rework(state: Paired, view: StepView, *arguments: Any):
            of_base, cache = hook(state.base, view, *arguments)
            return state._replace(base=of_base), cache

        return rework

    def evicted(eviction: Eviction) -> Eviction:
        rework = eviction.after_prompt
        return eviction._replace(after_prompt=rework and reworked(rework))

    return base._replace(
        init=both,
        prefill=prefilled,
        append=appended,
        select=select or selected,
        update=updated,
        services=base.services._replace(maintain=reworked(base.services.maintain)),
        foresees=base.foresees and select is None,
        eviction=base.eviction and evicted(base.eviction),
        shares=least,
        needs=(*base.needs, *(name for name in needs if name not in base.needs)),
    )


@builder
def keep(policy: Policy, sink: int = 4, recent: int = 64) -> Policy:
    """Attend to what `policy` selects and to each head's first `sink` and last `recent` tokens."""
    require_policy("policy", policy)
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 0)
    require_stays("policy", policy, "of which keep lists the first and the newest")

    def select(state: State, layer: int, q, view: StepView):
        chosen, summary, state = policy.select(state, layer, q, view)
        if summary is not None:
            raise ValueError(
                f"policy={policy}: keep cannot wrap it, since its summary may stand for tokens "
                "that are kept"
            )
        held = view.layers[layer]
        units = held.num_pages if chosen.granularity == "page" else held.capacity
        always = window(
            held.lengths,
            sink=sink,
            recent=recent,
            num_pages=held.num_pages,
            page_size=held.page_size,
            granularity=chosen.granularity,
        )
        return union(chosen, always, units), None, state

    return policy._replace(select=select)


@builder
def dense_layers(policy: Policy, n: int = 2) -> Policy:
    """Attend to everything in the first `n` layers and to what `policy` selects in the others.

    The first layers keep the policy's state up to date, but do not call its `select`.
    """
    require_policy("policy", policy)
    whole_number("n", n, 0)
    require_stays("policy", policy, "all of which the first layers attend to")

    def select(state: State, layer: int, q, view: StepView):
        if layer < n:
            return everything(view.layers[layer].lengths), None, state
        return policy.select(state, layer, q, view)

    def heads(layer: int, num_kv_heads: int) -> tuple[int, ...]:
        if layer < n:
            return tuple(range(num_kv_heads))
        return policy.dense_heads(layer, num_kv_heads)

    return policy._replace(select=select, dense_heads=heads)


@builder
def retrieval_heads(policy: Policy, gates) -> Policy:
    """Attend to everything in retrieval heads and, in the others, to what `policy` selects.

    `policy` keeps its state for all heads and selects for all; only what it selects for retrieval
    heads is not used.

    Args:
        policy: what the other heads do.
        gates: the retrieval heads, as a name that ships with jsparse, a file that
            `jsparse train-gates` wrote, which is not read again in the same process, or the mask
            [L, K] itself.
    """
    require_policy("policy", policy)
    require_stays("policy", policy, "all of which retrieval heads attend to")
    mask = head_gates.retrieval_heads(gates)

    def init(spec: CacheSpec) -> State:
        head_gates.require_fit(mask, gates, spec)
        return policy.init(spec)

    def select(state: State, layer: int, q, view: StepView):
        chosen, summary, state = policy.select(state, layer, q, view)
        here = head_gates.of_rows(mask[layer], len(q))
        if summary is not None:
            summary = _of_others(Summary(*summary), here)
        wide = here if chosen.dense is None else here | chosen.dense
        return replace(chosen, dense=wide), summary, state

    def heads(layer: int, num_kv_heads: int) -> tuple[int, ...]:
        own = {*np.flatnonzero(mask[layer]).tolist()}
        return tuple(sorted(own | {*policy.dense_heads(layer, num_kv_heads)}))

    return policy._replace(select=select, init=init, dense_heads=heads)


def _of_others(summary: Summary, heads: HeadFlags) -> Summary:
    """Drop the summaries of some KV heads, whose own attention leaves nothing out."""
    queries = jnp.repeat(heads, summary.lse.shape[1] // heads.shape[1], axis=1)
    return Summary(
        summary.o,
        jnp.where(queries, -jnp.inf, summary.lse),
        jnp.where(heads, 0, summary.attended),
        jnp.where(heads, 0, summary.read),
    )
