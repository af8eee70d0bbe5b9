"""The Policy contract: a policy selects tokens for each KV head; one engine runs all policies.

A policy is a NamedTuple of pure functions and static fields, built by a function of
hyper-parameters (`@builder` of jsparse.builder). Only `select` must be written; `dense` there has
nothing else. The functions are called while tracing: they may branch on static things (layer,
shapes, hyper-parameters) and never on values.

The state is any pytree of arrays that `init` returns, of fixed shapes and dtypes; by convention a
tuple with one entry per layer, so that updating a layer touches its own arrays alone. It never
holds the cache's arrays (both are donated). It is threaded through the layers in order, so the
decisions of one layer reach the next. Every array belongs either to the rows of the batch, and has
an axis of `spec.batch`, or to the pages of the cache, and has one of `spec.pages`
(jsparse.runtime.state_axes).

The engine calls, for every prompt chunk and layer, `prefill`; after the prompt `after_prompt`; for
every decode step and layer, `append`, `select` and, after attention, `update`. While a token is
taken in, `view.positions` is still its own position (of several, the first's), and a layer's
lengths count it from `append` on; those of later layers may do so already. Every `period` tokens of
its own a row goes through `maintain`, and every `correct_every` tokens the newest are computed
again as one dense chunk, their K and V are overwritten, and `append` is called for them once more:
writing a position again replaces it. A further turn of a conversation cuts rows back to the end of
the last prompt, or of an answer that dense attention checked, and calls `prefill` for the new
tokens, so anything that `prefill` builds at the
last chunk must be built from scratch.

In a decode step some rows may be inactive (`view.active`). The engine puts their row arrays back
as they were; a method that writes page arrays of its own skips such rows itself, as sidecars do.

jsparse.hooks has the signatures; docs/contract.md shows how five methods fit.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jsparse.cache import OPTIONAL_FIELDS, CacheSpec, KVCache, LayerCache, StepView
from jsparse.hooks import (
    AfterPromptFn,
    AppendFn,
    CheckFn,
    DenseBelowFn,
    DenseHeadsFn,
    InitFn,
    MaintainFn,
    MaxLengthFn,
    PrefillFn,
    SelectFn,
    State,
    StatsFn,
    UpdateFn,
)
from jsparse.selection import Selection
from jsparse.selection.partials import StatsKind, Summary

Shares = Literal["pages", "keys"]


ServiceKind = Literal["correct", "maintain"]


def _no_maintenance(state: State, view: StepView) -> tuple[State, KVCache]:
    return state, view.cache


class Services(NamedTuple):
    """Lists the services of a row between steps, and after how many new tokens each is due.

    Attributes:
        maintain: reworks state and cache; by default it changes nothing.
        period: new tokens of a row between its calls of maintain; 0 is never.
        correct_every: new tokens of a row between its corrections, which compute K and V of as many
            newest tokens again, densely; 0 is never. Not for methods that evict: a correction
            requires all heads of a row to hold the same tokens.
        checked: brings a layer's state up to date with what the check of a method's drafts saw, by
            dense attention (`exact=True`): the "page_mass" of the mean of the checked tokens'
            queries, over all that lies before these tokens. None is that it wants no report.
    """

    maintain: MaintainFn = _no_maintenance
    period: int = 0
    correct_every: int = 0
    checked: UpdateFn | None = None

    @property
    def every(self) -> dict[ServiceKind, int]:
        """The tokens between two runs of each service that there is, in the order of running."""
        both: dict[ServiceKind, int] = {"correct": self.correct_every, "maintain": self.period}
        return {name: tokens for name, tokens in both.items() if tokens}


class Eviction(NamedTuple):
    """Marks a method whose heads lose tokens, so that slots no longer give positions.

    Attributes:
        after_prompt: reworks state and cache once, before the first step; None changes nothing.
        max_length: the slots that a head can come to hold after `after_prompt`; None is the sum of
            the row's prompt and new tokens.
    """

    after_prompt: AfterPromptFn | None = None
    max_length: MaxLengthFn | None = None


def _no_state(spec: CacheSpec) -> State:
    return ()


def _keep_state(state: State, layer: int, *_: Any) -> State:
    return state


def never_dense(kv: LayerCache) -> int:
    """Returns 0: no row is so short that it is dense."""
    return 0


def _no_stats(layer: int) -> StatsKind | None:
    return None


def _no_heads(layer: int, num_kv_heads: int) -> tuple[int, ...]:
    return ()


class Offload(NamedTuple):
    """Describes how K and V lie in host memory while a policy decodes.

    Attributes:
        tail: the least number of newest tokens of a row that stay on the device.
        reads: "in_place" lets attention read host memory, "gather" fetches the selection to the
            device first; None is the better one that the op supports.
    """

    tail: int
    reads: Literal["in_place", "gather"] | None = None


class Policy(NamedTuple):
    """A method, as the engine sees it; the hooks come first."""

    select: SelectFn
    """Chooses what is attended to."""
    init: InitFn = _no_state
    """Makes the state; by default there is none."""
    prefill: PrefillFn = _keep_state
    """Brings the state up to date with a chunk of the prompt; by default changes nothing."""
    append: AppendFn = _keep_state
    """Brings the state up to date with new tokens; by default changes nothing."""
    update: UpdateFn = _keep_state
    """Brings the state up to date with what attention reported; by default changes nothing."""
    services: Services = Services()
    """What is done for a row between steps; by default nothing."""
    stats: StatsFn = _no_stats
    """Names the report that attention makes, as StatsKind says; by default none."""
    dense_below: DenseBelowFn = never_dense
    """The number of tokens below which a row attends to everything, whatever `select` says; by
    default 0. Where all rows are so short `select` is not called: what it leaves in a short row's
    state must not outlast the step.
    """
    window: int = 0
    """W, the number of last prompt queries that `prefill` wants."""
    needs: tuple[str, ...] = ()
    """Optional fields of the cache that the method uses (jsparse.cache.OPTIONAL_FIELDS), and
    constants of the model, which hooks find in `view.constants`.
    """
    eviction: Eviction | None = None
    """How heads lose tokens; None is that they keep them. Wrappers that rely on slots refuse a
    method whose heads lose some, and a further dense chunk cannot follow.
    """
    shares: Shares | None = None
    """What other requests with the same prefix may use. "pages": K, V and the page arrays of the
    state, which depend on nothing but the tokens up to them. "keys": K and V, from which the state
    is built anew. None: nothing.
    """
    per_row: Mapping[str, CheckFn] = MappingProxyType({})
    """Hyper-parameters that may differ by row, each with a function of its name and a value that
    raises ValueError where a row may not have that. `knob` reads them.
    """
    reads: int | None = None
    """The newest tokens whose K and V hooks other than `select` read while decoding, beside the
    last page; `select` reads a few rows at most. None is that hooks read any number: such a policy
    cannot be `offloaded`.
    """
    dense_heads: DenseHeadsFn = _no_heads
    """Names the KV heads of a layer that always attend to everything."""
    offload: Offload | None = None
    """Where K and V lie in host memory, and how they are read; None is on the device."""
    name: str = ""
    """The expression that builds it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The optional fields of the cache among the method's needs."""
        return tuple(name for name in self.needs if name in OPTIONAL_FIELDS)

    @property
    def constants(self) -> tuple[str, ...]:
        """The constants of the model among the method's needs."""
        return tuple(name for name in self.needs if name not in OPTIONAL_FIELDS)

    @property
    def uses_last_chunk(self) -> bool:
        """Whether a `prefill` hook receives `view.last`."""
        return self.prefill is not _keep_state

    @property
    def evicts(self) -> bool:
        """Whether heads lose tokens."""
        return self.eviction is not None

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return self.name


class StandIn(NamedTuple):
    """Stands for other policies: which of them runs is decided when the cache's sizes are known.

    Attributes:
        for_spec: returns the policy that runs with a cache of these sizes on the default device.
        to_draft: the same where dense attention checks what the policy drafts; None is `for_spec`.
        name: the expression that builds it.
    """

    for_spec: Callable[[CacheSpec], Policy]
    to_draft: Callable[[CacheSpec], Policy] | None = None
    name: str = ""

    def __repr__(self) -> str:
        return self.name


AnyPolicy = Policy | StandIn


def resolved(policy: AnyPolicy, spec: CacheSpec, *, drafts: bool = False) -> Policy:
    """Returns the policy that runs with a cache of these sizes on the default device.

    `drafts` is whether dense attention checks what it drafts.
    """
    if not isinstance(policy, StandIn):
        return policy
    return policy.to_draft(spec) if drafts and policy.to_draft else policy.for_spec(spec)


def is_dense(policy: Policy, spec: CacheSpec) -> bool:
    """Returns whether all heads always attend to everything."""
    heads, layers = spec.model_kv_heads, range(spec.num_layers)
    return all(len(policy.dense_heads(layer, heads)) == heads for layer in layers)


def at_layer(state: State, layer: int, entry: Any) -> State:
    """Returns a state of one entry per layer with the entry of `layer` replaced."""
    return (*state[:layer], entry, *state[layer + 1 :])


def knob(view: StepView, name: str, value: Any) -> Any:
    """Returns a hyper-parameter per row and head [B, K] where rows have their own, else `value`."""
    if view.knobs is None or name not in view.knobs:
        return value
    rows = view.knobs[name]
    rows = jnp.where(jnp.isnan(rows), value, rows)
    return jnp.broadcast_to(rows[:, None], view.layers[0].lengths.shape)


def without_knob(view: StepView, name: str) -> StepView:
    """Returns the view for a wrapped policy that has a hyper-parameter of the same name."""
    others = {key: rows for key, rows in (view.knobs or {}).items() if key != name}
    return view._replace(knobs=others or None)


def selected(policy: Policy, before: State, made: Any) -> tuple[Selection, Summary | None, State]:
    """Checks and returns the result of `select`, given the state `before`.

    Raises:
        ValueError: it violates the contract.
    """
    match made:
        case (Selection() as choice, None | (_, _, *_) as summary, state):
            summary = None if summary is None else Summary(*summary)
            return choice, summary, kept(policy, "select", before, state)
    raise ValueError(
        f"select of {policy} must return (Selection, Summary or None, state), not {_sketch(made)}"
    )


def maintained(policy: Policy, made: Any) -> tuple[State, KVCache]:
    """Checks and returns the result of `maintain`.

    Raises:
        ValueError: it violates the contract.
    """
    if type(made) is not tuple or len(made) != 2 or not isinstance(made[1], KVCache):
        raise ValueError(f"maintain of {policy} must return (state, cache), not {_sketch(made)}")
    return made


def kept(policy: Policy, hook: str, before: State, made: Any) -> State:
    """Returns the state that a hook returned, given the one `before`.

    Raises:
        ValueError: its arrays are not those of the state before, by structure, shapes and dtypes.
    """
    if _sketch(made) != _sketch(before):
        raise ValueError(
            f"{hook} of {policy} must return a state like the one it got, {_sketch(before)}, not "
            f"{_sketch(made)}"
        )
    return made


def _sketch(tree: Any) -> str:
    """Describes the result of a hook: arrays by dtype and shape, the rest by type."""
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"an array {tree.dtype}{list(tree.shape)}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_sketch, tree))})"
    return "None" if tree is None else f"a {type(tree).__name__}"
