"""The Policy contract: a policy selects tokens for each KV head; one engine runs all policies.

A policy is a NamedTuple of pure functions and static fields, built by a function of
hyper-parameters (`@builder` of jsparse.builder). Only `select` is required; `dense` defines nothing
else. The functions are called while tracing: they may branch on static values (layer, shapes,
hyper-parameters) but never on array values.

The state is any pytree of arrays that `init` returns, with fixed shapes and dtypes; by convention a
tuple with one entry per layer, so that updating a layer touches only its own arrays. It never holds
the cache's arrays (both are donated). It is threaded through the layers in order, so the decisions
of one layer reach the next. Every array belongs either to the rows of the batch and has an axis of
`spec.batch`, or to the pages of the cache and has an axis of `spec.pages`
(jsparse.runtime.state_axes).

The engine calls `prefill` for every prompt chunk and layer; `after_prompt` once after the prompt;
and `append`, `select` and, after attention, `update` for every decode step and layer. While a token
is processed, `view.positions` is its own position (for several tokens, the first one's). A layer's
lengths count the token from `append` on; those of later layers may already count it. A row goes
through `maintain` every `period` tokens. Every `correct_every` tokens its newest tokens are
recomputed as one dense chunk: their K and V are overwritten, and `append` is called for them again,
so writing a position again must replace it. A further turn of a conversation truncates rows to the
end of the last prompt, or of an output that dense attention verified, and calls `prefill` for the
new tokens. Anything that `prefill` builds at the last chunk must therefore be built from scratch.

In a decode step some rows may be inactive (`view.active`). The engine restores their row arrays; a
method that writes its own page arrays must skip such rows itself, as sidecars do.

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
    ChooseBlocksFn,
    DenseBelowFn,
    DenseHeadsFn,
    InitFn,
    MaintainFn,
    MaxLengthFn,
    PrefillFn,
    RereadFn,
    ScoreBlocksFn,
    SelectFn,
    State,
    StatsFn,
    UpdateFn,
    VerifiedFn,
)
from jsparse.selection import Selection
from jsparse.selection.partials import StatsKind, Summary

Shares = Literal["pages", "keys"]


ServiceKind = Literal["correct", "maintain"]


def _no_maintenance(state: State, view: StepView) -> tuple[State, KVCache]:
    return state, view.cache


class Services(NamedTuple):
    """The services of a row between steps, and after how many new tokens each is due.

    Attributes:
        maintain: reworks state and cache; changes nothing by default.
        period: new tokens of a row between calls of `maintain`; 0: never.
        correct_every: new tokens of a row between corrections; 0: never. A correction recomputes K
            and V of this many newest tokens densely. Not for methods that evict: a correction
            requires all heads of a row to hold the same tokens.
        checked: updates the state after a verification round (`exact=True`). It receives each
            layer's "page_mass" of the mean of the verified tokens' queries over all tokens before
            them. In a program of rounds without drafts, only the first round reports; its queries
            also attend to the token itself. None: no report.
    """

    maintain: MaintainFn = _no_maintenance
    period: int = 0
    correct_every: int = 0
    checked: VerifiedFn | None = None

    @property
    def every(self) -> dict[ServiceKind, int]:
        """The tokens between two runs of each service that the method has, in running order."""
        both: dict[ServiceKind, int] = {"correct": self.correct_every, "maintain": self.period}
        return {name: tokens for name, tokens in both.items() if tokens}


class Reread(NamedTuple):
    """The scoring of prompt tokens by the queries of the same tokens after the whole prompt.

    Attributes:
        chunk: the number of tokens of a row that follow the prompt at a time.
        score: updates the state with one such chunk of a layer.
    """

    chunk: int
    score: RereadFn


class Eviction(NamedTuple):
    """The hooks of a method whose heads lose tokens, so that slots no longer give positions.

    Attributes:
        after_prompt: reworks state and cache once, before the first step; None: changes nothing.
        max_length: the maximum slots of a head after `after_prompt`; None: the sum of the row's
            prompt and new tokens.
        reread: runs before `after_prompt`; None: prompts are prefilled once.
    """

    after_prompt: AfterPromptFn | None = None
    max_length: MaxLengthFn | None = None
    reread: Reread | None = None


def _no_state(spec: CacheSpec) -> State:
    return ()


def _keep_state(state: State, layer: int, *_: Any) -> State:
    return state


def never_dense(kv: LayerCache) -> int:
    """Returns 0: rows of any length use `select`."""
    return 0


def _no_stats(layer: int) -> StatsKind | None:
    return None


def _no_heads(layer: int, num_kv_heads: int) -> tuple[int, ...]:
    return ()


class Offload(NamedTuple):
    """The placement of K and V in host memory while a policy decodes.

    Attributes:
        tail: the minimum number of a row's newest tokens that stay on the device.
        reads: "in_place" lets attention read host memory; "gather" fetches the selection to the
            device first; None: the better one of those that the op supports.
    """

    tail: int
    reads: Literal["in_place", "gather"] | None = None


class PrefillMethod(NamedTuple):
    """A method of sparse prefill: the blocks of earlier keys that a prompt chunk attends to.

    Attributes:
        score: scores blocks of 128 keys for each block of 128 queries.
        choose: chooses the blocks by their scores.
        name: the expression that builds it; empty: the name of `choose`.
    """

    score: ScoreBlocksFn
    choose: ChooseBlocksFn
    name: str = ""

    def __repr__(self) -> str:
        return self.name or getattr(self.choose, "__name__", type(self).__name__)


class Policy(NamedTuple):
    """A method, as the engine sees it; the hooks come first."""

    select: SelectFn
    """Chooses the tokens to attend to."""
    init: InitFn = _no_state
    """Creates the state; by default there is none."""
    prefill: PrefillFn = _keep_state
    """Updates the state with a prompt chunk; changes nothing by default."""
    append: AppendFn = _keep_state
    """Updates the state with new tokens; changes nothing by default."""
    update: UpdateFn = _keep_state
    """Updates the state with attention's report; changes nothing by default."""
    services: Services = Services()
    """The services of a row between steps; none by default."""
    stats: StatsFn = _no_stats
    """Names the report that attention makes (a StatsKind); none by default."""
    dense_below: DenseBelowFn = never_dense
    """The number of tokens below which a row attends to everything, whatever `select` returns; 0 by
    default. If all rows are that short, `select` is not called, so its changes to a short row's
    state must not outlast the step.
    """
    window: int = 0
    """W, the number of last prompt queries that `prefill` receives."""
    needs: tuple[str, ...] = ()
    """Optional fields of the cache that the method uses (jsparse.cache.OPTIONAL_FIELDS), and
    constants of the model, which hooks find in `view.constants`.
    """
    eviction: Eviction | None = None
    """How heads lose tokens; None: they keep all. Wrappers that rely on slots refuse methods that
    evict, and no further dense chunk can follow.
    """
    shares: Shares | None = None
    """The data that other requests with the same prefix may use. "pages": K, V and the page arrays
    of the state, which depend only on the tokens up to them. "keys": K and V, from which the state
    is rebuilt. None: nothing.
    """
    per_row: Mapping[str, CheckFn] = MappingProxyType({})
    """Hyper-parameters that may differ by row. Each has a function of its name and a value that
    raises ValueError if a row may not have that value. `knob` reads them.
    """
    reads: int | None = None
    """The number of newest tokens whose K and V hooks other than `select` read while decoding, in
    addition to the last page; `select` reads a few rows at most. None: hooks read any number, so
    the policy cannot be `offloaded`.
    """
    dense_heads: DenseHeadsFn = _no_heads
    """Names the KV heads of a layer that always attend to everything."""
    offload: Offload | None = None
    """The placement of K and V in host memory, and how they are read; None: on the device."""
    prefill_method: PrefillMethod | None = None
    """How prompts attend to themselves; None: densely."""
    name: str = ""
    """The expression that builds it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The optional cache fields among the method's needs."""
        return tuple(name for name in self.needs if name in OPTIONAL_FIELDS)

    @property
    def constants(self) -> tuple[str, ...]:
        """The model constants among the method's needs."""
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
    """A placeholder for other policies, resolved when the cache's sizes are known.

    Attributes:
        for_spec: returns the policy that runs with a cache of these sizes on the default device.
        to_draft: the same, if the policy drafts for dense attention to verify; None: `for_spec`.
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

    `drafts`: whether the policy drafts for dense attention to verify.
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
    """Returns a hyper-parameter: [B, K] if rows set their own values, else `value`."""
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
    """Checks and returns the result of `select`, given the previous state.

    Raises:
        ValueError: the result violates the contract.
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
        ValueError: the result violates the contract.
    """
    if type(made) is not tuple or len(made) != 2 or not isinstance(made[1], KVCache):
        raise ValueError(f"maintain of {policy} must return (state, cache), not {_sketch(made)}")
    return made


def kept(policy: Policy, hook: str, before: State, made: Any) -> State:
    """Checks and returns the state that a hook returned, given the previous one.

    Raises:
        ValueError: its arrays differ from the previous state's in structure, shape or dtype.
    """
    if _sketch(made) != _sketch(before):
        raise ValueError(
            f"{hook} of {policy} must return a state like the one it got, {_sketch(before)}, not "
            f"{_sketch(made)}"
        )
    return made


def _sketch(tree: Any) -> str:
    """Describes the result of a hook: arrays by dtype and shape, other values by type."""
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"an array {tree.dtype}{list(tree.shape)}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_sketch, tree))})"
    return "None" if tree is None else f"a {type(tree).__name__}"
