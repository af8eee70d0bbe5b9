"""Wrappers with common options: tokens always kept, layers and heads that stay dense.

These are wrappers rather than options of every method. `with_state` builds wrappers that have their
own state.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jsparse.builder import builder, require_policy, require_stays
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import AppendFn, InitFn, PrefillFn, SelectFn, State
from jsparse.hyper_parameters import whole_number
from jsparse.policies import head_gates
from jsparse.policy import Policy, Shares
from jsparse.selection import everything, union, window
from jsparse.selection.partials import Summary
from jsparse.shapes import HeadFlags

Hook = Callable[..., Any]  # a policy's hook that takes a state first


class WrappedState(NamedTuple):
    """The state of a wrapped policy and the wrapper's own."""

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
    """Gives a policy a second state, the wrapper's own; its hooks still see only theirs.

    The state becomes WrappedState(base, own). `prefill` and `append` receive and return the own
    state, after the base's hooks have run. `select` receives and returns both, and calls
    `base.select` itself. `shares` names the part of the own state that other requests may use; the
    policy shares the lesser of that and the base's. `needs` are the wrapper's needs in addition to
    the base's.
    """
    minimum = min(shares, base.shares, key=(None, "keys", "pages").index)

    services = base.services._replace(maintain=partial(_reworked, base.services.maintain))
    if services.checked:
        services = services._replace(checked=partial(_taken_in, services.checked, None))
    eviction = base.eviction
    if eviction and eviction.after_prompt:
        eviction = eviction._replace(after_prompt=partial(_reworked, eviction.after_prompt))
    if eviction and eviction.reread:
        score = partial(_taken_in, eviction.reread.score, None)
        eviction = eviction._replace(reread=eviction.reread._replace(score=score))
    return base._replace(
        init=partial(_both, base.init, init),
        prefill=partial(_taken_in, base.prefill, prefill),
        append=partial(_taken_in, base.append, append),
        select=select or partial(_selected, base.select),
        update=partial(_taken_in, base.update, None),
        services=services,
        eviction=eviction,
        shares=minimum,
        needs=(*base.needs, *(name for name in needs if name not in base.needs)),
    )


def _both(of_base: InitFn, own: InitFn, spec: CacheSpec) -> WrappedState:
    return WrappedState(of_base(spec), own(spec))


def _taken_in(
    of_base: Hook, own: Hook | None, state: WrappedState, *arguments: Any
) -> WrappedState:
    base = of_base(state.base, *arguments)
    return WrappedState(base, own(state.own, *arguments) if own else state.own)


def _selected(of_base: SelectFn, state: WrappedState, *arguments: Any):
    chosen, summary, base = of_base(state.base, *arguments)
    return chosen, summary, state._replace(base=base)


def _reworked(of_base: Hook, state: WrappedState, *arguments: Any):
    base, cache = of_base(state.base, *arguments)
    return state._replace(base=base), cache


@builder
def keep(policy: Policy, sink: int = 4, recent: int = 64) -> Policy:
    """Attends to `policy`'s selection and to each head's first `sink` and last `recent` tokens."""
    require_policy("policy", policy)
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 0)
    require_stays("policy", policy, "of which keep lists the first and the newest")

    def select(state: State, layer: int, q, view: StepView):
        chosen, summary, state = policy.select(state, layer, q, view)
        if summary is not None:
            raise ValueError(
                f"policy={policy}: keep cannot wrap it, since its summary may represent tokens "
                "that are kept"
            )
        kv = view.layers[layer]
        units = kv.num_pages if chosen.granularity == "page" else kv.capacity
        always = window(
            kv.lengths,
            sink=sink,
            recent=recent,
            num_pages=kv.num_pages,
            page_size=kv.page_size,
            granularity=chosen.granularity,
        )
        return union(chosen, always, units), None, state

    return policy._replace(select=select)


@builder
def dense_layers(policy: Policy, n: int = 2) -> Policy:
    """Attends to everything in the first `n` layers, and to `policy`'s selection in the others.

    The first layers update the policy's state, but do not call its `select`.
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
    """Attends to everything in retrieval heads, and to the selection of `policy` in the others.

    `policy` updates its state and selects for all heads; its selection for retrieval heads is
    unused.

    Args:
        policy: the policy of the other heads.
        gates: the retrieval heads: a name that ships with jsparse, a file written by `jsparse
            train-gates` (read once per process), or the mask [L, K] itself.
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
    """Drops the summaries of KV heads that attend to everything themselves."""
    queries = jnp.repeat(heads, summary.lse.shape[1] // heads.shape[1], axis=1)
    return Summary(
        summary.o,
        jnp.where(queries, -jnp.inf, summary.lse),
        jnp.where(heads, 0, summary.attended),
        jnp.where(heads, 0, summary.read),
    )
