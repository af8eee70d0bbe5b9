"""Reads prompts in chunks, densely and exactly, filling the cache and the policy's state.

A chunk attends to itself causally and to the cache before it, block by block; the parts are merged
by their logsumexps. No more than one chunk × one block of scores ever exists, and one compilation
serves every chunk of one size.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jsparse.cache import (
    NOTHING,
    KVCache,
    LayerCache,
    ReadOnly,
    append,
    read_pages,
    read_slots,
    replace_layer,
    step_view,
    without_host,
)
from jsparse.host_memory.pool import whole
from jsparse.host_memory.store import KVStore
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.partials import merge
from jsparse.policy import Policy, PrefillView, State, kept
from jsparse.runtime.compilation import inlined, program
from jsparse.shapes import ChunkKV, ChunkQueries, Rows, Tokens

# Tokens per chunk, and per block of the cache that it attends to. Flash attention stores nothing of
# that size squared; without it the scores are stored.
FLASH_CHUNK, PLAIN_CHUNK = 8192, 512
OnChunk = Callable[[str, int, int], Any]


class PrefillCarry(NamedTuple):
    """Holds what one chunk passes to the next.

    Attributes:
        cache, state: the cache and the policy's state so far.
        last_hidden: the hidden state of each row's newest token.
        windows: the last W queries of each row, per layer; empty if the policy wants none.
    """

    cache: KVCache
    state: State
    last_hidden: Float[Array, "B D"]
    windows: tuple[Float[Array, "B W N H"], ...]


def start(decoder: Decoder, policy: Policy, cache: KVCache, state: State) -> PrefillCarry:
    """Returns the carry before the first chunk."""
    config, batch = decoder.config, cache.positions.shape[0]
    shape = (batch, policy.window, config.num_heads, config.head_dim)
    windows = tuple(
        jnp.zeros(shape, decoder.dtype) for _ in range(config.num_layers if policy.window else 0)
    )
    return PrefillCarry(
        cache, state, jnp.zeros((batch, config.hidden_size), decoder.dtype), windows
    )


def read_prompts(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens | np.ndarray,
    lengths: Rows | np.ndarray,
    carry: PrefillCarry,
    *,
    beside: ReadOnly = NOTHING,
    store: KVStore | None = None,
    report: OnChunk = lambda *_: None,
    within: bool = False,
) -> PrefillCarry:
    """Reads the first `lengths[b]` tokens of each row, chunk by chunk, all rows side by side.

    A store, if K and V have one, hears of each chunk. Chunks follow what `carry`, which is donated,
    has read already. `report` gets ("prefill", tokens done, tokens) after each
    chunk. `within` says that another program reads them, of which this becomes a part.
    """
    read_chunk = inlined(prefill_chunk) if within else prefill_chunk
    batch, longest = tokens.shape
    sizes = chunk_sizes(longest, chunk_tokens(decoder, batch))
    array = np if isinstance(tokens, np.ndarray) else jnp
    tokens = array.pad(tokens, ((0, 0), (0, sum(sizes) - longest)))
    done = 0
    try:
        for size in sizes:
            valid = jnp.asarray(array.clip(lengths - done, 0, size), jnp.int32)
            carry = read_chunk(
                decoder,
                policy,
                weights,
                jnp.asarray(tokens[:, done : done + size], jnp.int32),
                valid,
                carry,
                beside if store is None else beside._replace(host=store.pages),
                last=done + size >= longest,
            )
            if store is not None:
                store.after_chunk(carry.cache, valid, size)
            done += size
            report("prefill", min(done, longest), longest)
    except BaseException:
        settle(carry, store and store.pages)
        raise
    return carry


def settle(*running: Any) -> None:
    """Waits for running programs: a process that exits during one is aborted."""
    for array in jax.tree.leaves(running):
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.block_until_ready()


@program(static_argnames=("decoder", "policy", "last"), donate_argnames=("carry",))
def prefill_chunk(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    beside: ReadOnly = NOTHING,
    *,
    last: bool,
) -> PrefillCarry:
    """Reads the first `valid[b]` of T tokens of each row; `last` says that no chunk follows.

    Rows whose prompt has ended take part with valid = 0 and do not change.
    """
    view, state = step_view(carry.cache, beside), carry.state
    cache = view.cache
    before = cache.positions
    positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    windows = list(carry.windows)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal cache, state
        cache = append(cache, layer, k, v, positions, valid)
        held, q = whole(cache.layers[layer], q, (k, v), positions, valid)
        o = attend_chunk(q, k, v, held, valid)
        if windows:
            windows[layer] = _shift_in(windows[layer], q, valid)
        window = windows[layer] if windows else q[:, :0]
        asked = jnp.minimum(before + valid, policy.window)
        now = view._replace(cache=replace_layer(cache, layer, held))
        part = PrefillView(tokens, positions, k, v, valid, now, window, asked, last)
        state = kept(policy, "prefill", state, policy.prefill(state, layer, part))
        if held is not cache.layers[layer]:
            # or XLA may put off what hooks make of a layer until all layers have come
            o, state = jax.lax.optimization_barrier((o, state))
        return o

    hidden = hidden_states(decoder, weights, tokens, positions, attend)
    newest = jnp.take_along_axis(hidden, jnp.maximum(valid - 1, 0)[:, None, None], axis=1)[:, 0]
    return PrefillCarry(
        without_host(cache)._replace(positions=before + valid),
        state,
        jnp.where((valid > 0)[:, None], newest, carry.last_hidden),
        tuple(windows),
    )


def replay_chunk(
    decoder: Decoder,
    policy: Policy,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    beside: ReadOnly,
) -> PrefillCarry:
    """Shows the policy a chunk whose K and V the cache holds already, as its newest tokens.

    `valid` is as in `prefill_chunk`, of whose program this is otherwise a part left out: queries
    are not known, so that those of the window must come with the chunks behind.
    """
    config, after = decoder.config, carry.cache.positions
    first = after - valid
    positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    view = step_view(carry.cache._replace(positions=first), beside)
    by_head = (len(valid), config.num_kv_heads, tokens.shape[1])
    slots = jnp.broadcast_to(positions[:, None], by_head)
    none = jnp.zeros((len(valid), 0, config.num_heads, config.head_dim), decoder.dtype)
    state = carry.state
    for layer, held in enumerate(view.layers):
        k, v = (read_slots(pool, held, slots).swapaxes(1, 2) for pool in (held.k, held.v))
        window = carry.windows[layer] if carry.windows else none
        seen = jnp.minimum(after, policy.window)
        part = PrefillView(tokens, positions, k, v, valid, view, window, seen, False)
        state = kept(policy, "prefill", state, policy.prefill(state, layer, part))
    return carry._replace(state=state)


def attend_chunk(
    q: ChunkQueries, k: ChunkKV, v: ChunkKV, held: LayerCache, valid: Rows
) -> ChunkQueries:
    """Attends causally from a chunk to itself and to everything its row's heads held before it.

    The chunk's own k and v are the last `valid[b]` tokens that the cache holds. All heads of a row
    must hold the same number of tokens, as they do unless a policy has compacted them.
    """
    lengths = held.lengths[:, 0] - valid
    pages = min(
        max(q.shape[1], _flash_tokens(q.shape[-1], q.dtype) // q.shape[0]) // held.page_size,
        held.num_pages,
    )
    pages = max(pages, 1)
    block = pages * held.page_size

    def step(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        # the last block may extend past the last page: what it reads again there lies beyond every
        # length
        logical = jnp.minimum(i * pages + jnp.arange(pages, dtype=jnp.int32), held.num_pages - 1)
        logical = jnp.broadcast_to(logical, (*held.lengths.shape, pages))
        keys, values = (_by_token(read_pages(pool, held, logical)) for pool in (held.k, held.v))
        seen = jnp.clip(lengths - i * block, 0, block)
        return merge(*so_far, *flash(q, keys, values, kv_lengths=seen))

    blocks = (jnp.max(lengths) + block - 1) // block
    o, _ = jax.lax.fori_loop(0, blocks, step, flash(q, k, v, causal=True))
    return o.astype(q.dtype)


def flash(
    q: ChunkQueries,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    kv_lengths: Rows | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    """Returns (o, lse) of one block.

    It uses cuDNN's flash attention where the GPU and dtype allow, plain XLA elsewhere.
    """
    o, lse = jax.nn.dot_product_attention(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        is_causal=causal,
        key_value_seq_lengths=kv_lengths,
        implementation="cudnn" if has_flash(q.shape[-1], q.dtype) else "xla",
        return_residual=True,
    )
    o, lse = o.astype(jnp.float32), lse.astype(jnp.float32)
    if kv_lengths is None:
        return o, lse
    some = (kv_lengths > 0)[:, None, None]
    return jnp.where(some[..., None], o, 0.0), jnp.where(some, lse, -jnp.inf)


def has_flash(head_dim: int, dtype: Any) -> bool:
    """Returns whether cuDNN's flash attention takes head_dim and dtype on the default device."""
    fits = head_dim % 8 == 0 and head_dim <= 128 and dtype in (jnp.bfloat16, jnp.float16)
    return fits and jax.default_backend() == "gpu"


def _flash_tokens(head_dim: int, dtype: Any) -> int:
    return FLASH_CHUNK if has_flash(head_dim, dtype) else PLAIN_CHUNK


def _by_token(pages: Float[Array, "B K n P H"]) -> ChunkKV:
    batch, heads, n, size, head_dim = pages.shape
    return pages.reshape(batch, heads, n * size, head_dim).swapaxes(1, 2)


def _shift_in(
    window: Float[Array, "B W N H"], q: ChunkQueries, valid: Rows
) -> Float[Array, "B W N H"]:
    """Returns the last W of the old window followed by each row's valid queries."""
    newest = valid[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)
    joined = jnp.concatenate([window, q.astype(window.dtype)], axis=1)
    return jnp.take_along_axis(joined, newest[:, :, None, None], axis=1)


def chunk_tokens(decoder: Decoder, batch: int) -> int:
    """Returns the number of tokens per prompt chunk.

    It is large enough to fill the device, and small enough to keep activations and scores small.
    """
    return tokens_per_chunk(decoder.config.head_dim, decoder.dtype, batch)


def tokens_per_chunk(head_dim: int, dtype: Any, batch: int) -> int:
    """Returns `chunk_tokens` of a decoder with this head dimension and dtype."""
    maximum = _flash_tokens(head_dim, dtype)
    return max(64, 2 ** int(math.log2(max(maximum // batch, 1))))


def chunk_sizes(length: int, chunk: int, *, smallest: int = 16) -> list[int]:
    """Cuts a prompt of `length` tokens into whole chunks and one padded up to a power of two."""
    whole, rest = divmod(length, chunk)
    sizes = [chunk] * whole
    return [*sizes, min(chunk, max(smallest, 2 ** math.ceil(math.log2(rest))))] if rest else sizes
