"""The engine of all methods that rank chunks, with an index and a few settings per method.

A row's tokens are its sinks, its chunks and its open tokens: the newest, which are in no chunk yet.
Sinks and open tokens are always attended to. The rest of the budget goes to chunks: the index
scores them for the query (with clusters, by the centroid of a chunk's cluster), and the best are
taken until the next no longer fits. So a head never attends to more than the budget.

Chunks are cut and indexed at the end of the prompt; every `period` tokens the oldest open ones are
cut into chunks, which join the index. Chunks are the same for all layers and heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView, taking_part
from jsparse.hooks import PrefillView
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.threshold_select import Budget, threshold_select
from jsparse.policies.clusters.chunking import Chunks, boundaries, cut, cut_on, marks
from jsparse.policies.clusters.index import Form, build, empty
from jsparse.policies.clusters.joining import join
from jsparse.policies.clusters.search import chunk_scores
from jsparse.policy import Policy, Services, at_layer
from jsparse.shapes import Lengths, Queries, Rows, Tokens

Chunking = Literal["structure", "fixed"]
Classes = Literal["boundary_classes", "boundary_classes_or_none"]
CLASSES: dict[str | None, Classes | None] = {
    None: "boundary_classes_or_none",
    "structure": "boundary_classes",
    "fixed": None,
}
WIDER = 4  # the chosen units hold this multiple of the budget


class ChunkIndex(NamedTuple):
    """The functions of an index of chunks; each layer has a separate index.

    Attributes:
        empty: (spec, chunks) -> an empty index, with room for `chunks` chunks per row.
        build: (the layer's cache, the chunks) -> an index of all chunks.
        join: (each layer's index, each layer's cache, the previous number of chunks, the chunks,
            max_new) -> each layer's index with at most max_new further chunks.
        scores: (index, q, count, tokens) -> the scores of chunks; undefined past the `count` of a
            head, -inf for chunks that the search skipped. The search covers at least `tokens`
            tokens.
    """

    empty: Callable[[CacheSpec, int], Any]
    build: Callable[[LayerCache, Chunks], Any]
    join: Callable[[Sequence[Any], Sequence[LayerCache], Rows, Chunks, int], tuple[Any, ...]]
    scores: Callable[[Any, Queries, Lengths, int], Float32[Array, "B K C"]]


def cluster_index(form: Form) -> ChunkIndex:
    """Returns the index by clusters of chunks."""
    return ChunkIndex(
        partial(empty, form=form),
        partial(build, form=form),
        partial(join, form=form),
        partial(chunk_scores, form),
    )


class Settings(NamedTuple):
    """The settings in which the methods differ.

    Attributes:
        budget: the maximum number of tokens that a head attends to; rows up to this length are
            dense.
        shortest: the minimum number of tokens of a chunk.
        longest: the maximum number of tokens of a chunk.
        classes: the model's constant that marks boundaries; None: every chunk has the maximum
            length.
        chunk_index: the functions of the index that ranks chunks.
        sink: the number of first tokens that are always attended to.
        recent: the number of newest tokens that are in no chunk.
        period: the new tokens of a row after which it cuts chunks.
    """

    budget: int
    shortest: int
    longest: int
    classes: Classes | None
    chunk_index: ChunkIndex
    sink: int
    recent: int
    period: int

    @property
    def lengths(self) -> dict[str, int]:
        """The minimum and maximum tokens of a chunk, as arguments of `cut`."""
        return {"min_length": self.shortest, "max_length": self.longest}

    @property
    def max_open(self) -> int:
        """The maximum number of open tokens."""
        return self.recent + self.longest - 1 + self.period

    @property
    def max_new(self) -> int:
        """The maximum number of chunks that are cut at a time."""
        return (self.longest - 1 + self.period) // self.shortest

    def chunks_of(self, slots: int) -> int:
        """Returns the number of chunks that a row of `slots` slots has room for.

        For chunks of 8 to 16 tokens, this is one per 10 slots. A row that needs more chunks cuts
        the rest at the maximum length, for which there is always room.
        """
        if self.classes is None:
            return -(-slots // self.longest)
        return min(-(-8 * slots // (5 * self.longest)), -(-slots // self.shortest))


def require_chunks(
    chunks: Chunking | None, lengths: tuple[int, int], recent: int
) -> tuple[int, int]:
    """Returns the minimum and maximum tokens of a chunk.

    Raises:
        ValueError: an argument is not one that LycheeCluster's docstring allows.
    """
    one_of("chunks", chunks, CLASSES)
    if not isinstance(lengths, tuple) or len(lengths) != 2:
        raise ValueError(f"lengths={lengths!r}: must be the minimum and maximum tokens of a chunk")
    shortest, longest = lengths
    whole_number("lengths[0]", shortest, 1)
    whole_number("lengths[1]", longest, shortest)
    if chunks == "fixed":
        shortest = longest
    # these tokens determine the end of a chunk
    whole_number("recent", recent, longest - shortest + 1)
    return shortest, longest


def require_budget(settings: Settings) -> None:
    """Raises ValueError unless a budget fits the always attended tokens and one chunk."""
    minimum = settings.sink + settings.max_open + settings.longest
    if settings.budget < minimum:
        raise ValueError(
            f"budget={settings.budget}: must be at least {minimum}, for sink={settings.sink}, up "
            f"to {settings.max_open} of the newest tokens, which are in no chunk yet, and a chunk "
            f"of {settings.longest}"
        )


class Index(NamedTuple):
    """The state; rows own all of it.

    Attributes:
        marks: each token's marks for the boundaries around it; None if chunks have one length.
        chunks: the chunks of each row; the open tokens follow the last.
        layers: the index of each layer.
    """

    marks: UInt8[Array, "B S"] | None
    chunks: Chunks
    layers: tuple[Any, ...]


def chunk_policy(settings: Settings) -> Policy:
    """Builds the policy for these settings."""
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        append=partial(append, settings),
        services=Services(partial(maintain, settings), settings.period),
        needs=() if settings.classes is None else (settings.classes,),
        shares="keys",
        reads=settings.max_open + 1,
    )


def init(settings: Settings, spec: CacheSpec) -> Index:
    """Returns an index without chunks."""
    chunks, slots = settings.chunks_of(spec.capacity), (spec.batch, spec.capacity)
    starts = jnp.full((spec.batch, chunks + 1), min(settings.sink, spec.capacity), jnp.int32)
    return Index(
        jnp.zeros(slots, jnp.uint8) if settings.classes else None,
        Chunks(starts, jnp.zeros(spec.batch, jnp.int32)),
        tuple(settings.chunk_index.empty(spec, chunks) for _ in range(spec.num_layers)),
    )


def prefill(settings: Settings, state: Index, layer: int, view: PrefillView) -> Index:
    """Records boundaries; at the end of the prompt, cuts chunks and indexes each layer's keys."""
    kv = view.step.layers[layer]
    if layer == 0:
        length = kv.lengths[:, 0]
        first = length - view.valid
        state = marked(settings, state, view.tokens, first, view.valid, view.step)
        if view.last:
            max_chunks = state.chunks.starts.shape[1] - 1
            ends = length - settings.recent
            at = min(settings.sink, kv.capacity)
            chunks = cut(classes(state), at, ends, capacity=max_chunks, **settings.lengths)
            state = state._replace(chunks=chunks)
    if not view.last:
        return state
    made = settings.chunk_index.build(kv, state.chunks)
    return state._replace(layers=at_layer(state.layers, layer, made))


def append(
    settings: Settings, state: Index, layer: int, k, v, tokens, positions, view: StepView
) -> Index:
    """Records boundaries."""
    if layer:
        return state
    valid = taking_part(view, tokens.shape[1])
    return marked(settings, state, tokens, positions[:, 0], valid, view)


def select(settings: Settings, state: Index, layer: int, q: Queries, view: StepView):
    """Lists sinks, open tokens and, within the budget, the best chunks."""
    # all layers hold the same tokens: values that depend only on these are computed once per step
    kv, chunks = view.layers[0].lengths, state.chunks
    budget = min(settings.budget, view.layers[0].capacity)
    count = jnp.broadcast_to(chunks.count[:, None], kv.shape)
    narrow = np.min_scalar_type(settings.longest)  # bytes, which selection reads faster
    scores = settings.chunk_index.scores(state.layers[layer], q, count, WIDER * budget)
    there = jnp.arange(scores.shape[-1]) < count[..., None]
    sizes = jnp.diff(chunks.starts)[:, None].astype(narrow)
    chosen = threshold_select(
        jnp.where(there, scores, -jnp.inf)[:, :, None],
        Budget(budget - outside(chunks, kv), sizes),
        capacity=max(min(budget // settings.shortest, scores.shape[-1]), 1),
        weights="raw",
    )
    tokens = runs_to_tokens(chosen.ids, chosen.count, chunks.starts[:, None], kv, capacity=budget)
    return replace(tokens, dense=kv <= budget), None, state


def maintain(settings: Settings, state: Index, view: StepView) -> tuple[Index, KVCache]:
    """Cuts the oldest open tokens into chunks, which join the index of each layer."""
    before, ends = state.chunks.count, view.layers[0].lengths[:, 0] - settings.recent
    max_new = settings.max_new
    chunks = cut_on(classes(state), state.chunks, ends, max_new=max_new, **settings.lengths)
    layers = settings.chunk_index.join(state.layers, view.layers, before, chunks, max_new)
    return state._replace(chunks=chunks, layers=layers), view.cache


def marked(
    settings: Settings, state: Index, tokens: Tokens, first: Rows, valid: Rows, view: StepView
) -> Index:
    """Records the marks of new tokens for the boundaries around them."""
    if state.marks is None or settings.classes is None:
        return state
    assert view.constants is not None
    new = marks(view.constants[settings.classes], tokens)
    nth = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    at = jnp.where(nth < valid[:, None], first[:, None] + nth, state.marks.shape[1])
    row = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return state._replace(marks=state.marks.at[row, at].set(new, mode="drop"))


def classes(state: Index) -> UInt8[Array, "B S"] | None:
    """Returns the class of the boundary after each token; None if chunks have one length."""
    return None if state.marks is None else boundaries(state.marks)


def outside(chunks: Chunks, lengths: Lengths) -> Lengths:
    """Returns the number of a head's tokens in no chunk: its sinks and its open tokens."""
    first, last = chunks.starts[:, :1], chunks.starts[:, -1:]
    return jnp.minimum(first, lengths) + jnp.maximum(lengths - last, 0)
