"""SeerAttention-R attends to the blocks of tokens that a small trained gate scores highest.

Paper: "SeerAttention-R: Sparse Attention Adaptation for Long Reasoning" (Gao et al.),
arXiv:2506.08889. Names and layout of the weights are those of the authors' published gates.

Each KV head has a gate. With q the queries of its group and k the keys of a block, both before
RoPE (after the query and key norms of models that have them), of H channels each,

    Q = RoPE(norm(W_q · [q_1, …, q_G]))                 at the position of q
    K = RoPE(norm(W_k · [max(k), min(k), mean(k)]))     at the position of the block's first token
    S = softmax(Q·K / √D)                               over the complete blocks before q's own

Attended are the blocks with the highest scores, up to a token budget, or those with a score above a
threshold; and always the newest block. Only the gates are trained, to the dense model's weights
(jsparse.train.indexer).

Where we differ: the newest block counts towards the budget. K always has the position of its
block's first token, as in the authors' training; while decoding, their code rotates it to the last
token's. Their softmax also counts the newest, incomplete block, with a logit of 0. q and k are
rotated back from their values after RoPE; YaRN's factor of cos and sin is not applied to the gates.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import (
    CacheSpec,
    LayerCache,
    StepView,
    physical_pages,
    read_pages,
    taking_part,
)
from jsparse.cache.key_constants import angles_at, rotated
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import below_one, whole_number
from jsparse.models.indexer import (
    BLOCK,
    INDEXER,
    IndexerFile,
    constants_at,
    load_indexer,
    require_fit,
)
from jsparse.pallas_kernels.threshold_select import Threshold, TopK, threshold_select
from jsparse.policy import Policy, at_layer, knob
from jsparse.ranks import own_part
from jsparse.selection import Selection, valid_ids
from jsparse.shapes import ChunkKV, Queries, Rows, Tokens

LARGE = 1e37  # the score of the newest block
EPSILON = 1e-6  # of the RMS norms, as in the authors' code
EXACT = jax.lax.Precision.HIGHEST


class Gates(NamedTuple):
    """The gates of one layer; see jsparse.models.indexer."""

    q: Float[Array, "K G H D"]
    k: Float[Array, "K 3*H D"]
    norms: Float[Array, "2 D"]


class Settings(NamedTuple):
    """The hyper-parameters.

    Attributes:
        gates, budget, threshold: those of `seer_attention`.
        block: the number of tokens of a block.
        file: the content of the file; None: the gates are those of the model.
        constants: the names of the gates' arrays in `view.constants`.
    """

    gates: str | None
    budget: int
    threshold: float | None
    block: int
    file: IndexerFile | None
    constants: tuple[str, ...]


@builder
def seer_attention(
    gates: str | None = None,
    budget: int = 2048,
    threshold: float | None = None,
    block: int | None = None,
) -> Policy:
    """Attends to the blocks that trained gates score highest, and to the newest block.

    Args:
        gates: a file that `jsparse train-indexer` wrote, or the published gates of a model (read
            once per process); None: the gates in the model's own checkpoint.
        budget: the number of tokens that a KV head attends to, in budget // block blocks, at least
            one.
        threshold: the score above which a block is attended, instead of a budget; scores add up to
            1. None: the budget counts.
        block: the number of tokens of a block, a multiple of the page size. None: as the file
            states, or 64, as in the published gates.
    """
    whole_number("budget", budget, 1)
    if threshold is not None:
        below_one("threshold", threshold)
    if block is not None:
        whole_number("block", block, 1)
    if gates is not None and not isinstance(gates, str):
        raise ValueError(f"gates={gates!r}: must be the path of a file, or None")
    file = None if gates is None else load_indexer(gates)
    if file is not None and block not in (None, file.block):
        raise ValueError(f"block={block}: must be {file.block}, as gates={gates!r} were trained")
    size = file.block if file is not None else block or BLOCK
    constants = INDEXER if gates is None else constants_at(gates)
    settings = Settings(gates, budget, threshold, size, file, constants)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        append=partial(append, settings),
        needs=(*constants, "rope_frequencies"),
        shares="pages",
        per_row={"budget": partial(whole_number, minimum=1)}
        if threshold is None
        else {"threshold": below_one},
        reads=size,
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns a gate key per page and layer; that of a block belongs to the block's last page.

    A page then depends only on the tokens up to it, so that other rows may share it.
    """
    if settings.block % spec.page_size:
        raise ValueError(
            f"page_size={spec.page_size}: must divide block={settings.block} under seer_attention"
        )
    if settings.file is not None:
        heads = spec.num_heads * spec.ranks, spec.model_kv_heads
        where = f"gates={settings.gates!r}"
        require_fit(settings.file.indexer, where, spec.num_layers, *heads, spec.head_dim)
    empty = jnp.zeros((spec.pages, spec.head_dim), spec.dtype)
    return (empty,) * spec.num_layers


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Computes the gate keys of blocks that a chunk completes."""
    return taken_in(settings, state, layer, view.k.shape[1], view.valid, view.step)


def append(
    settings: Settings,
    state: State,
    layer: int,
    k: ChunkKV,
    v: ChunkKV,
    tokens: Tokens,
    positions: Tokens,
    view: StepView,
) -> State:
    """Computes the gate keys of blocks that new tokens complete."""
    count = k.shape[1]
    return taken_in(settings, state, layer, count, taking_part(view, count), view)


def taken_in(
    settings: Settings, state: State, layer: int, count: int, valid: Rows, view: StepView
) -> State:
    """Computes the gate keys of the complete blocks among those of the `count` newest tokens."""
    kv, size = view.layers[layer], settings.block
    per_block = size // kv.page_size
    # tokens that do not start at a block's first one touch one more block
    touched = min((count + size - 2) // size + 1, -(-kv.num_pages // per_block))
    first = (kv.lengths - valid[:, None])[..., None] // size
    blocks = first + jnp.arange(touched, dtype=jnp.int32)
    pages = blocks[..., None] * per_block + jnp.arange(per_block, dtype=jnp.int32)
    pages = jnp.minimum(pages, kv.num_pages - 1).reshape(*kv.lengths.shape, -1)
    keys = read_pages(kv.k, kv, pages).reshape(*blocks.shape, size, -1)
    gates, frequencies = gates_at(settings, view, layer)
    made = gate_keys(gates, keys, blocks * size, frequencies)
    complete = ((blocks + 1) * size <= kv.lengths[..., None]) & (valid > 0)[:, None, None]
    pool = state[layer]
    # other blocks get an out-of-range index, so their updates are dropped
    last = physical_pages(kv, pages[..., per_block - 1 :: per_block])
    at = jnp.where(complete, last, len(pool))
    return at_layer(state, layer, pool.at[at].set(made.astype(pool.dtype), mode="drop"))


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the pages of the blocks with the highest scores, or above the threshold."""
    kv, size = view.layers[layer], settings.block
    logits = block_logits(settings, state[layer], layer, q, view)
    newest = jnp.arange(logits.shape[-1]) == (kv.lengths[..., None] - 1) // size
    if settings.threshold is None:
        capacity = min(max(settings.budget // size, 1), logits.shape[-1])
        wanted: Any = knob(view, "budget", capacity * size)
        rule = TopK(capacity if isinstance(wanted, int) else wanted.astype(jnp.int32) // size)
        scores = jnp.where(newest, LARGE, logits)
    else:
        capacity, rule = logits.shape[-1], Threshold(knob(view, "threshold", settings.threshold))
        # without complete blocks, the softmax is NaN
        weights = jnp.nan_to_num(jax.nn.softmax(logits, axis=-1), nan=0.0)
        scores = jnp.where(newest, LARGE, weights)
    chosen = threshold_select(
        scores[:, :, None], rule, capacity=capacity, granularity="page", weights="raw"
    )
    return pages_of(chosen, kv, size), None, state


def block_logits(
    settings: Settings, pool: Array, layer: int, q: Queries, view: StepView
) -> Float32[Array, "B K n"]:
    """Returns Q·K / √D of the complete blocks before the newest; -inf for all others."""
    kv, size = view.layers[layer], settings.block
    per_block = size // kv.page_size
    nth = jnp.arange(-(-kv.num_pages // per_block), dtype=jnp.int32)
    last = jnp.minimum(nth * per_block + per_block - 1, kv.num_pages - 1)
    keys = pool[physical_pages(kv, jnp.broadcast_to(last, (*kv.lengths.shape, len(nth))))]
    gates, frequencies = gates_at(settings, view, layer)
    query = gate_queries(gates, q[:, None], view.positions[:, None], frequencies)[:, 0]
    logits = jnp.einsum(
        "bkd,bknd->bkn", query, keys, precision=EXACT, preferred_element_type=jnp.float32
    )
    past = nth < (kv.lengths[..., None] - 1) // size
    return jnp.where(past, logits * q.shape[-1] ** -0.5, -jnp.inf)


def pages_of(blocks: Selection, kv: LayerCache, size: int) -> Selection:
    """Returns the pages of listed blocks, of which the last is the newest one."""
    per_block = size // kv.page_size
    ids = blocks.ids[..., None] * per_block + jnp.arange(per_block, dtype=jnp.int32)
    unused = -kv.lengths % size // kv.page_size  # pages of the newest block
    count = jnp.maximum(blocks.count * per_block - unused, 0)
    pages = Selection(ids.reshape(*count.shape, -1)[..., : kv.num_pages], count)
    return Selection(jnp.where(valid_ids(pages), pages.ids, 0), count)


def gates_at(
    settings: Settings, view: StepView, layer: int
) -> tuple[Gates, Float32[Array, "half"]]:
    """Returns the gates of one layer and this rank's heads, and RoPE's frequencies."""
    there = view.constants or {}
    q, k, norms = (there[name][layer] for name in settings.constants)
    return Gates(own_part(q, 0), own_part(k, 0), norms), there["rope_frequencies"]


def gate_queries(
    gates: Gates,
    q: Float[Array, "B T N H"],
    positions: Int32[Array, "B T"],
    frequencies: Float32[Array, "half"],
) -> Float32[Array, "B T K D"]:
    """Returns Q, from queries after RoPE."""
    before = rotated(q, angles_at(-positions, frequencies)[:, :, None])
    grouped = before.reshape(*q.shape[:2], len(gates.q), -1, q.shape[-1])
    made = _product("btkgh,kghd->btkd", grouped, gates.q)
    return rotated(_normed(made, gates.norms[0]), angles_at(positions, frequencies)[:, :, None])


def gate_keys(
    gates: Gates,
    k: Float[Array, "B K n S H"],
    first: Int32[Array, "B #K n"],
    frequencies: Float32[Array, "half"],
) -> Float32[Array, "B K n D"]:
    """Returns K of n blocks of S keys each, after RoPE, that start at the positions `first`."""
    at = first[..., None] + jnp.arange(k.shape[3], dtype=jnp.int32)
    before = rotated(k, angles_at(-at, frequencies))
    pools = jnp.max(before, axis=3), jnp.min(before, axis=3), jnp.mean(before, axis=3)
    made = _product("bknh,khd->bknd", jnp.concatenate(pools, axis=-1), gates.k)
    return rotated(_normed(made, gates.norms[1]), angles_at(first, frequencies))


def _product(axes: str, x: Float32[Array, "..."], weights: Float[Array, "..."]) -> Array:
    """Multiplies in float32: XLA lacks products of bfloat16 with float32 sums on a CPU."""
    return jnp.einsum(axes, x, weights.astype(jnp.float32), precision=EXACT)


def _normed(x: Float32[Array, "*n D"], scale: Float[Array, "D"]) -> Float32[Array, "*n D"]:
    """Divides by the root mean square and multiplies by a scale, unless the scale is 0."""
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return jnp.where(jnp.any(scale), x * jax.lax.rsqrt(mean + EPSILON) * scale, x)
