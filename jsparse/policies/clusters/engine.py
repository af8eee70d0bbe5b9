"""Runs every method that finds tokens by clusters of chunks: one engine, a few settings per method.

A row's tokens are its sinks, its chunks and its open tokens: the newest, which are in no chunk yet.
Sinks and open tokens are always attended to. The rest of the budget goes to chunks: each has the
score of its cluster's centroid for the query, and the best are taken, cluster by cluster, until the
next no longer fits. So a head never attends to more than the budget.

Chunks are cut and clustered when the prompt ends; every `period` tokens the oldest open ones are
cut into chunks, which join the clusters. Chunks are the same for all layers and heads.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from jsparse.cache import CacheSpec, KVCache, StepView, taking_part
from jsparse.hooks import PrefillView
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.threshold_select import Budget, threshold_select
from jsparse.policies.clusters.chunking import Chunks, boundaries, cut, cut_on, marks
from jsparse.policies.clusters.index import Clusters, Form, build, empty, num_clusters
from jsparse.policies.clusters.joining import join
from jsparse.policies.clusters.search import cluster_scores
from jsparse.policy import Policy, Services, at_layer
from jsparse.selection import Selection
from jsparse.shapes import Lengths, Queries, Rows, Tokens

Classes = Literal["boundary_classes", "boundary_classes_or_none"]
WIDER = 4  # units are chosen that hold this times the budget


class Settings(NamedTuple):
    """Holds the settings in which the methods differ.

    Attributes:
        budget: the most tokens that a head attends to; rows that are no longer are dense.
        shortest: the fewest tokens of a chunk.
        classes: the model's constant that marks boundaries; None cuts every chunk at its greatest
            length.
        form: how chunks are clustered.
        sink: the number of first tokens that are always attended to.
        recent: the number of newest tokens that are in no chunk.
        period: the new tokens of a row after which it cuts chunks.
        exact: whether units that were not chosen are looked into where their bounds require it, so
            that the chunks are the same as without units.
    """

    budget: int
    shortest: int
    classes: Classes | None
    form: Form
    sink: int
    recent: int
    period: int
    exact: bool = False

    @property
    def longest(self) -> int:
        """Returns the most tokens of a chunk."""
        return self.form.longest

    @property
    def lengths(self) -> dict[str, int]:
        """Returns the fewest and the most tokens of a chunk, as `cut` takes them."""
        return {"min_length": self.shortest, "max_length": self.longest}

    @property
    def max_open(self) -> int:
        """Returns the most tokens that are ever open."""
        return self.recent + self.longest - 1 + self.period

    @property
    def max_new(self) -> int:
        """Returns the most chunks that are cut at a time."""
        return (self.longest - 1 + self.period) // self.shortest

    def chunks_of(self, slots: int) -> int:
        """Returns the number of chunks that a row of `slots` slots has room for.

        Chunks of 8 to 16 tokens have room at 10 tokens each. A row that needs more room than that
        cuts the rest at the greatest length, for which there always is enough.
        """
        if self.classes is None:
            return -(-slots // self.longest)
        return min(-(-8 * slots // (5 * self.longest)), -(-slots // self.shortest))


def require_budget(settings: Settings) -> None:
    """Raises ValueError if a budget does not hold the tokens always attended to and one chunk."""
    minimum = settings.sink + settings.max_open + settings.longest
    if settings.budget < minimum:
        raise ValueError(
            f"budget={settings.budget}: must be at least {minimum}, for sink={settings.sink}, up "
            f"to {settings.max_open} of the newest tokens, which are in no chunk yet, and a chunk "
            f"of {settings.longest}"
        )


class Index(NamedTuple):
    """Holds the state; rows own all of it.

    Attributes:
        marks: each token's marks for the boundaries around it; None where chunks are of one
            length.
        chunks: the chunks of each row, whose last ends where the open tokens begin.
        layers: the clusters of each layer.
    """

    marks: UInt8[Array, "B S"] | None
    chunks: Chunks
    layers: tuple[Clusters, ...]


def cluster_policy(settings: Settings) -> Policy:
    """Builds the policy that these settings describe."""
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
    """Returns an index of no chunks."""
    chunks, slots = settings.chunks_of(spec.capacity), (spec.batch, spec.capacity)
    starts = jnp.full((spec.batch, chunks + 1), min(settings.sink, spec.capacity), jnp.int32)
    return Index(
        jnp.zeros(slots, jnp.uint8) if settings.classes else None,
        Chunks(starts, jnp.zeros(spec.batch, jnp.int32)),
        tuple(empty(spec, chunks, settings.form) for _ in range(spec.num_layers)),
    )


def prefill(settings: Settings, state: Index, layer: int, view: PrefillView) -> Index:
    """Notes boundaries; when the prompt ends, cut it into chunks and cluster each layer's keys."""
    held = view.step.layers[layer]
    if layer == 0:
        length = held.lengths[:, 0]
        first = length - view.valid
        state = marked(settings, state, view.tokens, first, view.valid, view.step)
        if view.last:
            max_chunks = state.chunks.starts.shape[1] - 1
            ends = length - settings.recent
            at = min(settings.sink, held.capacity)
            chunks = cut(classes(state), at, ends, capacity=max_chunks, **settings.lengths)
            state = state._replace(chunks=chunks)
    if not view.last:
        return state
    made = build(held, state.chunks, settings.form)
    return state._replace(layers=at_layer(state.layers, layer, made))


def append(
    settings: Settings, state: Index, layer: int, k, v, tokens, positions, view: StepView
) -> Index:
    """Notes boundaries."""
    if layer:
        return state
    valid = taking_part(view, tokens.shape[1])
    return marked(settings, state, tokens, positions[:, 0], valid, view)


def select(settings: Settings, state: Index, layer: int, q: Queries, view: StepView):
    """Lists sinks, open tokens and, as far as the budget reaches, chunks of the best clusters."""
    # all layers hold the same tokens: values that depend on these alone are computed once per step
    held, chunks, index = view.layers[0].lengths, state.chunks, state.layers[layer]
    budget, fine = min(settings.budget, view.layers[0].capacity), index.fine
    count = jnp.broadcast_to(chunks.count[:, None], held.shape)
    narrow = np.min_scalar_type(settings.longest)  # bytes, which choosing reads faster

    def best_chunks(scores: Array, budget: int) -> Selection:
        scores = jnp.take_along_axis(scores, fine.of_point, axis=-1, mode="clip")
        there = jnp.arange(scores.shape[-1]) < count[..., None]
        sizes = jnp.diff(chunks.starts)[:, None].astype(narrow)
        return threshold_select(
            jnp.where(there, scores, -jnp.inf)[:, :, None],
            Budget(budget - outside(chunks, held), sizes),
            capacity=max(min(budget // settings.shortest, scores.shape[-1]), 1),
            weights="raw",
        )

    def worst(scores: Array) -> Array:
        """Returns at most the score of the first chunk that the budget has no room for.

        There is one among the scores, since more tokens than the budget are looked at.
        """
        chosen = best_chunks(scores, budget + settings.longest)
        cluster = jnp.take_along_axis(fine.of_point, chosen.ids, axis=-1)
        scores = jnp.take_along_axis(scores, cluster, axis=-1)
        there = jnp.arange(scores.shape[-1]) < chosen.count[..., None]
        return jnp.min(jnp.where(there, scores, jnp.inf), axis=-1)

    number, looked = num_clusters(count, settings.form), worst if settings.exact else None
    scores = cluster_scores(index, q, number, WIDER * budget, looked)
    chosen = best_chunks(scores, budget)
    tokens = runs_to_tokens(chosen.ids, chosen.count, chunks.starts[:, None], held, capacity=budget)
    return replace(tokens, dense=held <= budget), None, state


def maintain(settings: Settings, state: Index, view: StepView) -> tuple[Index, KVCache]:
    """Cuts the oldest open tokens into chunks, which join the clusters of each layer."""
    before, ends = state.chunks.count, view.layers[0].lengths[:, 0] - settings.recent
    max_new = settings.max_new
    chunks = cut_on(classes(state), state.chunks, ends, max_new=max_new, **settings.lengths)
    layers = join(state.layers, view.layers, before, chunks, max_new, settings.form)
    return state._replace(chunks=chunks, layers=layers), view.cache


def marked(
    settings: Settings, state: Index, tokens: Tokens, first: Rows, valid: Rows, view: StepView
) -> Index:
    """Notes the marks of new tokens for the boundaries around them."""
    if state.marks is None or settings.classes is None:
        return state
    assert view.constants is not None
    new = marks(view.constants[settings.classes], tokens)
    nth = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    at = jnp.where(nth < valid[:, None], first[:, None] + nth, state.marks.shape[1])
    row = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return state._replace(marks=state.marks.at[row, at].set(new, mode="drop"))


def classes(state: Index) -> UInt8[Array, "B S"] | None:
    """Returns the class of the boundary behind each token; None where chunks are of one length."""
    return None if state.marks is None else boundaries(state.marks)


def outside(chunks: Chunks, lengths: Lengths) -> Lengths:
    """Returns how many of a head's tokens lie in no chunk: its sinks and its open tokens."""
    first, last = chunks.starts[:, :1], chunks.starts[:, -1:]
    return jnp.minimum(first, lengths) + jnp.maximum(lengths - last, 0)
