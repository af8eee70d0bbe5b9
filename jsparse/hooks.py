"""The signatures of a policy's hooks; jsparse.policy describes when each is called."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.pallas_kernels.block_sparse_prefill import BLOCK
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


class ChunkView(NamedTuple):
    """A prefill method's view of one prompt chunk in one layer, in blocks of 128 tokens.

    Query block i has the chunk's tokens 128·i … 128·i + 127; key block j has the positions 128·j …
    128·j + 127 of the row.

    Attributes:
        q: the chunk's queries, after RoPE, padded to T; only the first `valid[b]` are real.
        kv: the layer with the chunk appended. Slots past a row's length hold any finite number.
        valid: the number of the chunk's tokens, which the lengths include.
    """

    q: ChunkQueries
    kv: LayerCache
    valid: Rows

    @property
    def first(self) -> Rows:
        """The position of the chunk's first token."""
        return self.kv.lengths[:, 0] - self.valid

    @property
    def num_blocks(self) -> tuple[int, int]:
        """QB and KB, the numbers of query blocks and of key blocks."""
        return -(-self.q.shape[1] // BLOCK), -(-self.kv.capacity // BLOCK)

    @property
    def starts(self) -> Int32[Array, "B QB"]:
        """The position of each query block's first token."""
        return self.first[:, None] + BLOCK * jnp.arange(self.num_blocks[0], dtype=jnp.int32)

    def holding(
        self, first: Int32[Array, "B QB"], last: Int32[Array, "B QB"]
    ) -> Bool[Array, "B 1 QB KB"]:
        """Marks the key blocks with a position from `first` to `last`."""
        block = jnp.arange(self.num_blocks[1], dtype=jnp.int32)
        marks = (block >= first[..., None] // BLOCK) & (block <= last[..., None] // BLOCK)
        return marks[:, None]

    @property
    def own(self) -> Bool[Array, "B 1 QB KB"]:
        """Marks the key blocks that hold a query block's own tokens."""
        return self.holding(self.starts, self.starts + BLOCK - 1)


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


class ScoreBlocksFn(Protocol):
    """Scores the key blocks of each query block; returns any tree of arrays.

    The scores of a query block must depend on its own queries and on keys at or before its newest
    token alone, so that they do not depend on how a prompt is cut into chunks.
    """

    def __call__(self, view: ChunkView, /) -> Any: ...


class ChooseBlocksFn(Protocol):
    """Chooses the key blocks that each query block attends to in each query head.

    Blocks with its own tokens are always attended, and keys after a query never.
    """

    def __call__(self, scores: Any, view: ChunkView, /) -> Bool[Array, "B N QB KB"]: ...
