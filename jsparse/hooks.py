"""The signatures of a policy's hooks; jsparse.policy describes when each is called."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Int32

from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.selection import Selection
from jsparse.selection.partials import ListedLogits, Stats, StatsKind, Summary
from jsparse.shapes import ChunkKV, ChunkQueries, Queries, Rows, Tokens

State = Any


class PrefillView(NamedTuple):
    """A policy's view of one prompt chunk in one layer.

    Attributes:
        tokens, positions, k, v: the chunk, padded to T; only the first `valid[b]` of row b are
            real.
        step: the cache with the chunk appended; `step.layers[layer].lengths` is right for every
            row.
        q_window: the last W queries of each row so far, aligned to the row's own end (the newest
            last). They do not depend on chunking or on the rest of the batch; the first W -
            window_valid of a short row are 0.
        last: static; whether this is the last chunk of every row.
    """

    tokens: Tokens
    positions: Tokens
    k: ChunkKV
    v: ChunkKV
    valid: Rows
    step: StepView
    q_window: Float[Array, "B W N H"]
    window_valid: Rows
    last: bool


class RereadView(NamedTuple):
    """A policy's view, in one layer, of a chunk of each prompt that follows the whole prompt.

    Attributes:
        q, k: the chunk, padded to T; only the first `valid[b]` of row b are real.
        start: the position of the chunk's first token in the prompt.
        valid: the number of tokens of each row.
        step: the cache, which holds the prompts alone.
    """

    q: ChunkQueries
    k: ChunkKV
    start: Int32[Array, ""]
    valid: Rows
    step: StepView


class InitFn(Protocol):
    """Returns the initial state for a cache of these sizes."""

    def __call__(self, spec: CacheSpec, /) -> State: ...


class PrefillFn(Protocol):
    """Updates the state with one prompt chunk of a layer."""

    def __call__(self, state: State, layer: int, view: PrefillView, /) -> State: ...


class AppendFn(Protocol):
    """Updates the state with T ≥ 1 new tokens, which the cache already holds, before `select`."""

    def __call__(
        self,
        state: State,
        layer: int,
        k: ChunkKV,
        v: ChunkKV,
        tokens: Tokens,
        positions: Tokens,
        view: StepView,
        /,
    ) -> State: ...


class SelectFn(Protocol):
    """Chooses the tokens that each KV head attends to in one decode step.

    The second result is None or a Summary, which is merged into attention's result.
    """

    def __call__(
        self, state: State, layer: int, q: Queries, view: StepView, /
    ) -> tuple[Selection, Summary | None, State]: ...


class UpdateFn(Protocol):
    """Updates the state with attention's report, if `stats` asked for one in this layer."""

    def __call__(
        self, state: State, layer: int, stats: Stats | ListedLogits | None, view: StepView, /
    ) -> State: ...


class VerifiedFn(Protocol):
    """Updates the state with the report of each layer's attention in a verification round."""

    def __call__(self, state: State, stats: Sequence[Stats], view: StepView, /) -> State: ...


class MaintainFn(Protocol):
    """Reworks state and cache between steps, in a jitted call of its own.

    Both hold only the rows that are due. Rows are independent: the result of one must not depend on
    the others.
    """

    def __call__(self, state: State, view: StepView, /) -> tuple[State, KVCache]: ...


class RereadFn(Protocol):
    """Updates the state with a chunk of the prompts that the model is given a second time."""

    def __call__(self, state: State, layer: int, view: RereadView, /) -> State: ...


class AfterPromptFn(Protocol):
    """Reworks state and cache once, after the prompt and before the first step.

    It is a program of its own, so its results may have other capacities. It must leave room for
    `slots` slots per head, the maximum that `max_length` returns. In an engine the state must have
    the shapes that `init` gives for `slots` slots.
    """

    def __call__(self, state: State, view: StepView, slots: int, /) -> tuple[State, KVCache]: ...


class MaxLengthFn(Protocol):
    """Returns the maximum number of slots of a head after `after_prompt`."""

    def __call__(self, prompt_tokens: int, new_tokens: int, /) -> int: ...


class StatsFn(Protocol):
    """Names the report that attention must make in a layer, if any."""

    def __call__(self, layer: int, /) -> StatsKind | None: ...


class DenseHeadsFn(Protocol):
    """Names the KV heads of a layer that attend to everything in every step, ascending."""

    def __call__(self, layer: int, num_kv_heads: int, /) -> tuple[int, ...]: ...


class DenseBelowFn(Protocol):
    """Returns the number of tokens below which a row is dense in a layer of these shapes."""

    def __call__(self, kv: LayerCache, /) -> int: ...


class CheckFn(Protocol):
    """Raises ValueError unless a hyper-parameter of this name may have this value."""

    def __call__(self, name: str, value: Any, /) -> None: ...
