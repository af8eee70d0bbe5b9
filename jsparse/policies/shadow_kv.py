"""ShadowKV selects chunks by their mean keys, and restores their keys from a low-rank copy.

Keys before RoPE have low rank over all heads of a layer. With an orthonormal basis B of the
directions in which the prompt's keys are largest, a token's keys are about B (Bᵀ k): its r
coefficients Bᵀ k serve all KV heads, so that the values alone are fetched. A chunk of adjacent
tokens is ranked by its landmark, the mean of its keys after RoPE. Outliers, the chunks with a key
least similar to their landmark, are attended to exactly, as are the newest tokens.

Paper: "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference" (Sun et al.),
arXiv:2410.21465.

Where we differ:
- The basis is made of eigenvectors of the keys' Gram matrix, which span the same space as the
  paper's singular vectors.
- K stays in the cache next to its low-rank copy, because exact attention and later turns need it:
  by itself the policy saves no memory, but only takes more. `offloaded(shadow_kv(…))` moves K and V
  to host memory. The device then keeps coefficients and landmarks, and a step fetches the values of
  selected chunks, and keys and values of outliers and of the newest tokens past its tail.
- Rows of at most `budget` tokens are dense.
- New tokens are attended to exactly as in the paper, in any number: they join no chunk before the
  next turn, so long outputs make steps slower.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache, StepView, read_heads
from jsparse.cache.key_constants import angles_at, rotated
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import weighted_sum
from jsparse.policy import Policy, at_layer
from jsparse.ranks import gathered, own_part
from jsparse.selection import Selection
from jsparse.selection.partials import Summary, softmax_partial
from jsparse.shapes import Lengths, Queries, Rows

ROPE = "rope_frequencies"


class Settings(NamedTuple):
    """The hyper-parameters of `shadow_kv`."""

    budget: int
    rank: int
    chunk: int
    outliers: int
    recent: int


class Shadow(NamedTuple):
    """One layer's low-rank keys, landmarks and outliers; rows own all of it.

    Attributes:
        chunks: the number of chunks of the prompt; exact tokens follow the last.
        coefficients: each token's keys of all heads before RoPE, in the basis.
        basis: the part of the basis that restores each head.
        landmarks: the mean key of each chunk, after RoPE.
        outliers, count: the chunks that are attended to exactly, ascending, and their number.
    """

    chunks: Rows
    coefficients: Float[Array, "B S r"]
    basis: Float[Array, "B K H r"]
    landmarks: Float[Array, "B K C H"]
    outliers: Int32[Array, "B K outliers"]
    count: Lengths  # pyright: ignore[reportIncompatibleMethodOverride]


@builder
def shadow_kv(
    budget: int = 2048, rank: int = 160, chunk: int = 8, outliers: int = 48, recent: int = 32
) -> Policy:
    """Attends to the best chunks with restored keys, and to outliers and new tokens exactly.

    Args:
        budget: the number of tokens in selected chunks, in addition to the exact ones.
        rank: r, the coefficients per token, for all KV heads of a layer together.
        chunk: the number of tokens per chunk.
        outliers: the number of chunks per KV head that are attended to exactly.
        recent: the minimum number of the prompt's last tokens that are attended to exactly, as are
            all later tokens.
    """
    for name, value in (("rank", rank), ("chunk", chunk), ("outliers", outliers)):
        whole_number(name, value, 1)
    whole_number("budget", budget, chunk)
    whole_number("recent", recent, 1)
    settings = Settings(budget, rank, chunk, outliers, recent)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        needs=(ROPE,),
        shares="keys",
        reads=0,
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns arrays without chunks."""
    batch, heads, head_dim = spec.batch, spec.num_kv_heads, spec.head_dim
    rank = min(settings.rank, spec.model_kv_heads * head_dim)
    chunks = -(-spec.capacity // settings.chunk)
    return tuple(
        Shadow(
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, spec.capacity, rank), spec.dtype),
            jnp.zeros((batch, heads, head_dim, rank), spec.dtype),
            jnp.zeros((batch, heads, chunks, head_dim), spec.dtype),
            jnp.zeros((batch, heads, min(settings.outliers, chunks)), jnp.int32),
            jnp.zeros((batch, heads), jnp.int32),
        )
        for _ in range(spec.num_layers)
    )


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Factors the prompt's keys at its end, and finds landmarks and outliers."""
    if not view.last:
        return state
    kv, old = view.step.layers[layer], state[layer]
    frequencies = (view.step.constants or {})[ROPE]
    k, length = read_heads(kv.k, kv), kv.lengths[:, 0]
    chunks = jnp.maximum(length - settings.recent, 0) // settings.chunk
    landmarks, likeness = landmarks_of(k, settings.chunk)
    there = jnp.arange(landmarks.shape[2], dtype=jnp.int32) < chunks[:, None, None]
    found = threshold_select(
        jnp.where(there, -likeness, -jnp.inf)[:, :, None],
        TopK(old.outliers.shape[2]),
        capacity=old.outliers.shape[2],
        weights="raw",
    )
    coefficients, basis = low_rank(k, length, frequencies, old.coefficients.shape[-1])
    coefficients, basis, landmarks = (
        x.astype(old.basis.dtype) for x in (coefficients, basis, landmarks)
    )
    shadow = Shadow(chunks, coefficients, basis, landmarks, found.ids, found.count)
    return at_layer(state, layer, shadow)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists outliers and the tokens after the chunks; the summary has the selected chunks."""
    kv, shadow = view.layers[layer], state[layer]
    frequencies = (view.constants or {})[ROPE]
    number = shadow.landmarks.shape[2]
    edges = jnp.minimum(jnp.arange(number + 1, dtype=jnp.int32), shadow.chunks[:, None])
    exact = runs_to_tokens(
        shadow.outliers,
        shadow.count,
        edges[:, None] * settings.chunk,
        kv.lengths,
        capacity=kv.capacity,
    )
    picked = best_chunks(settings, q, kv, shadow)
    short = kv.lengths <= settings.budget
    picked = replace(picked, count=jnp.where(short, 0, picked.count))
    summary = restored(settings, picked, q, kv, shadow, frequencies)
    return replace(exact, dense=short), summary, state


def landmarks_of(
    k: Float[Array, "B K S H"], chunk: int
) -> tuple[Float32[Array, "B K C H"], Float32[Array, "B K C"]]:
    """Returns each chunk's mean key, and its least cosine with a key of the chunk."""
    batch, heads, slots, head_dim = k.shape
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -slots % chunk), (0, 0))).astype(jnp.float32)
    k = k.reshape(batch, heads, -1, chunk, head_dim)
    mean = jnp.mean(k, axis=3)
    sizes = jnp.linalg.norm(mean, axis=-1)[..., None] * jnp.linalg.norm(k, axis=-1)
    cosines = jnp.sum(mean[:, :, :, None] * k, axis=-1) / jnp.where(sizes > 0, sizes, 1.0)
    return mean, jnp.min(cosines, axis=-1)


def low_rank(
    k: Float[Array, "B K S H"], length: Rows, frequencies: Float32[Array, "half"], rank: int
) -> tuple[Float32[Array, "B S r"], Float32[Array, "B K H r"]]:
    """Returns the coefficients and the basis of the keys before RoPE, of all heads together."""
    slots, exact = jnp.arange(k.shape[2], dtype=jnp.int32), jax.lax.Precision.HIGHEST
    back = angles_at(-slots, frequencies)

    def of_row(row: tuple[Array, Array]) -> tuple[Array, Array]:
        k, length = row
        before_rope = jnp.where((slots < length)[:, None], rotated(k, back), 0.0)
        every = gathered(before_rope, 0)
        heads, _, head_dim = every.shape
        flat = every.swapaxes(0, 1).reshape(slots.size, -1)
        gram = jnp.einsum("si,sj->ij", flat, flat, precision=exact)
        basis = jnp.linalg.eigh(gram)[1][:, -rank:]  # eigenvalues ascend
        coefficients = jnp.einsum("si,ir->sr", flat, basis, precision=exact)
        return coefficients, own_part(basis.reshape(heads, head_dim, -1), 0)

    # one row at a time: each takes as much memory as its keys in float32, several times
    return jax.lax.map(of_row, (k, length))


def best_chunks(settings: Settings, q: Queries, kv: LayerCache, shadow: Shadow) -> Selection:
    """Lists the chunks with the highest weight in any query head, without outliers."""
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1])
    logits = jnp.einsum(
        "bkgh,bkch->bkgc", grouped, shadow.landmarks, preferred_element_type=jnp.float32
    )
    chunks = jnp.arange(shadow.landmarks.shape[2], dtype=jnp.int32)
    nth = jnp.arange(shadow.outliers.shape[2], dtype=jnp.int32)
    outliers = jnp.where(nth < shadow.count[..., None], shadow.outliers, chunks.size)
    row, head = (at[..., None] for at in jnp.indices(kv.lengths.shape))
    there = jnp.broadcast_to(
        chunks < shadow.chunks[:, None, None], (*kv.lengths.shape, chunks.size)
    )
    there = there.at[row, head, outliers].set(False, mode="drop")
    number = max(min(settings.budget // settings.chunk, chunks.size), 1)
    return threshold_select(
        jnp.where(there[:, :, None], logits * q.shape[-1] ** -0.5, -jnp.inf),
        TopK(number),
        capacity=number,
        group="max",
    )


def restored(
    settings: Settings,
    picked: Selection,
    q: Queries,
    kv: LayerCache,
    shadow: Shadow,
    frequencies: Float32[Array, "half"],
) -> Summary:
    """Returns attention to the tokens of these chunks, with keys restored from coefficients."""
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1])
    within = jnp.arange(settings.chunk, dtype=jnp.int32)
    slots = (picked.ids[..., None] * settings.chunk + within).reshape(*kv.lengths.shape, -1)
    slots = jnp.minimum(slots, kv.capacity - 1)
    number = picked.count * settings.chunk
    valid = jnp.arange(slots.shape[-1], dtype=jnp.int32) < number[..., None]
    coefficients = jax.vmap(lambda of_row, slots: of_row[slots])(shadow.coefficients, slots)
    k = jnp.einsum(
        "bknr,bkhr->bknh", coefficients, shadow.basis, preferred_element_type=jnp.float32
    )
    k = rotated(k, angles_at(slots, frequencies))
    logits = jnp.einsum("bkgh,bknh->bkgn", grouped.astype(jnp.float32), k) * q.shape[-1] ** -0.5
    weights, total, lse = softmax_partial(jnp.where(valid[:, :, None], logits, -jnp.inf))
    o = weighted_sum(weights.astype(kv.v.dtype), kv.v, kv, slots)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    read = -(-number // 2)  # the values alone, half of K and V
    return Summary(o.reshape(q.shape), lse.reshape(q.shape[:2]), number, read)
