"""Prefills prompts in chunks, filling the cache and the policy's state.

A chunk attends causally to itself and to the cache before it (jsparse.runtime.prompt_attention);
scores of a whole chunk never exist at once. One compilation serves every chunk of one size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jsparse.cache import (
    NOTHING,
    KVCache,
    ReadOnly,
    append,
    as_held,
    finite,
    read_slots,
    replace_layer,
    step_view,
    without_borrowed,
)
from jsparse.hooks import PrefillView, State
from jsparse.host_memory.tails import whole
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.policy import Policy, kept
from jsparse.runtime import chunk_attention
from jsparse.runtime.compilation import inlined, program
from jsparse.runtime.prompt_attention import attend_prompt
from jsparse.runtime.rereading import reread_prompts
from jsparse.runtime.store import KVStore
from jsparse.shapes import ChunkQueries, Rows, Tokens

OnChunk = Callable[[str, int, int], Any]


class PrefillCarry(NamedTuple):
    """State that one chunk passes to the next.

    Attributes:
        cache, state: the cache and the policy's state so far.
        last_hidden: the hidden state of each row's newest token; NaN once any token's is not
            finite, since the cache does not hold NaN.
        windows: the last W queries of each row, per layer; empty if the policy needs none.
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


def prefill_prompts(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens | np.ndarray,
    lengths: Rows | np.ndarray,
    carry: PrefillCarry,
    *,
    chunk: int,
    read_only: ReadOnly = NOTHING,
    store: KVStore | None = None,
    report: OnChunk = lambda *_: None,
    within: bool = False,
    mesh: Mesh | None = None,
) -> PrefillCarry:
    """Prefills the first `lengths[b]` tokens of each row, `chunk` at a time, all rows together.

    A store, if K and V have one, is notified of each chunk. Chunks follow the tokens already in
    `carry`, which is donated. `report` receives ("prefill", tokens done, tokens) after each chunk.
    With `within`, this becomes part of the calling program; `mesh` has the devices that the model
    is spread over.
    """
    prefill_one = inlined(prefill_chunk) if within else prefill_chunk.on(mesh)
    longest = tokens.shape[1]
    try:
        for part in chunks(tokens, lengths, chunk_attention.chunk_sizes(longest, chunk)):
            carry = prefill_one(
                decoder,
                policy,
                weights,
                part.tokens,
                part.valid,
                carry,
                read_only if store is None else read_only._replace(host=store.pages),
                last=policy.uses_last_chunk and part.end >= longest,
            )
            if store is not None:
                store.after_chunk(carry.cache, part.valid, part.tokens.shape[1])
            report("prefill", min(part.end, longest), longest)
        kept_anew = reread_prompts(
            *(decoder, policy, weights, tokens, carry.cache, carry.state, read_only),
            within=within,
            mesh=mesh,
        )
        carry = carry._replace(state=kept_anew)
    except BaseException:
        settle(carry, store and store.pages)
        raise
    return carry


class PromptChunk(NamedTuple):
    """A chunk of all rows' prompts.

    Attributes:
        tokens: T tokens per row, padded.
        valid: the number of tokens of each row.
        end: the end of the chunk in the longest prompt, including padding.
    """

    tokens: Tokens
    valid: Rows
    end: int


def chunks(
    tokens: Tokens | np.ndarray, lengths: Rows | np.ndarray, sizes: Sequence[int]
) -> Iterator[PromptChunk]:
    """Yields the first `lengths[b]` tokens of each row in chunks of these sizes."""
    array = np if isinstance(tokens, np.ndarray) else jnp
    tokens = array.pad(tokens, ((0, 0), (0, sum(sizes) - tokens.shape[1])))
    done = 0
    for size in sizes:
        valid = jnp.asarray(array.clip(lengths - done, 0, size), jnp.int32)
        part = jnp.asarray(tokens[:, done : done + size], jnp.int32)
        done += size
        yield PromptChunk(part, valid, done)


def settle(*running: Any) -> None:
    """Waits for running programs: if the process exits during one, it is aborted."""
    for array in jax.tree.leaves(running):
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.block_until_ready()


@program(
    static_argnames=("decoder", "policy", "last"),
    donate_argnames=("carry",),
    sharded=("weights", "carry"),
)
def prefill_chunk(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    read_only: ReadOnly = NOTHING,
    *,
    last: bool,
) -> PrefillCarry:
    """Prefills the first `valid[b]` of T tokens of each row; `last`: no chunk follows.

    Rows at the end of their prompt have valid = 0 and do not change.
    """
    return prefill_tokens(decoder, policy, weights, tokens, valid, carry, read_only, last=last)[0]


def prefill_tokens(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    read_only: ReadOnly = NOTHING,
    *,
    last: bool,
) -> tuple[PrefillCarry, Float[Array, "B T D"]]:
    """Prefills a chunk as `prefill_chunk` does; also returns the tokens' hidden states."""
    view, state = step_view(carry.cache, read_only), carry.state
    cache = view.cache
    before = cache.positions
    positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    windows = list(carry.windows)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal cache, state
        cache = append(cache, layer, k, v, positions, valid)
        kv, q = whole(cache.layers[layer], q, (k, v), positions, valid)
        k, v = as_held(kv, k, v)
        window = decoder.config.window(layer, kv.capacity)
        o = attend_prompt(policy.prefill_method, q, k, v, kv, valid, window)
        k, v = finite(k), finite(v)  # as the cache holds those of sound rows
        if windows:
            windows[layer] = _shift_in(windows[layer], q, valid)
        newest = windows[layer] if windows else q[:, :0]
        in_window = jnp.minimum(before + valid, policy.window)
        now = view._replace(cache=replace_layer(cache, layer, kv))
        part = PrefillView(tokens, positions, k, v, valid, now, newest, in_window, last)
        state = kept(policy, "prefill", state, policy.prefill(state, layer, part))
        if kv is not cache.layers[layer]:
            # or XLA may defer the hooks' work on a layer until after all layers
            o, state = jax.lax.optimization_barrier((o, state))
        return o

    hidden = hidden_states(decoder, weights, tokens, positions, attend)
    newest = jnp.take_along_axis(hidden, jnp.maximum(valid - 1, 0)[:, None, None], axis=1)[:, 0]
    newest = jnp.where((valid > 0)[:, None], newest, carry.last_hidden)
    padding = jnp.arange(tokens.shape[1]) >= valid[:, None]
    sound = jnp.all(jnp.isfinite(hidden).all(-1) | padding, axis=1)
    sound &= jnp.all(jnp.isfinite(carry.last_hidden), axis=1)
    carry = PrefillCarry(
        without_borrowed(cache)._replace(positions=before + valid),
        state,
        jnp.where(sound[:, None], newest, jnp.nan),
        tuple(windows),
    )
    return carry, hidden


def replay_chunk(
    decoder: Decoder,
    policy: Policy,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    read_only: ReadOnly,
    *,
    last: bool = False,
) -> PrefillCarry:
    """Shows the policy a chunk of newest tokens, whose K and V are already in the cache.

    `valid` and `last` are as in `prefill_chunk`. This is that program without the model: the
    carry's windows must already have the chunk's queries, or get them with later chunks.
    """
    config, after = decoder.config, carry.cache.positions
    first = after - valid
    positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    view = step_view(carry.cache._replace(positions=first), read_only)
    by_head = (len(valid), config.num_kv_heads, tokens.shape[1])
    slots = jnp.broadcast_to(positions[:, None], by_head)
    none = jnp.zeros((len(valid), 0, config.num_heads, config.head_dim), decoder.dtype)
    state = carry.state
    for layer, kv in enumerate(view.layers):
        k, v = (read_slots(pool, kv, slots).swapaxes(1, 2) for pool in (kv.k, kv.v))
        window = carry.windows[layer] if carry.windows else none
        seen = jnp.minimum(after, policy.window)
        part = PrefillView(tokens, positions, k, v, valid, view, window, seen, last)
        state = kept(policy, "prefill", state, policy.prefill(state, layer, part))
    return carry._replace(state=state)


def _shift_in(
    window: Float[Array, "B W N H"], q: ChunkQueries, valid: Rows
) -> Float[Array, "B W N H"]:
    """Returns the last W queries of the old window followed by each row's valid queries."""
    newest = valid[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)
    joined = jnp.concatenate([window, q.astype(window.dtype)], axis=1)
    return jnp.take_along_axis(joined, newest[:, :, None, None], axis=1)
