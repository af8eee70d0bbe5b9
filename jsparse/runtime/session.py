"""Dispatches the jitted programs of prefill and decoding to the device.

The host runs ahead: it never waits for a step before it dispatches the next (see
jsparse.host_reader).
"""

from collections import deque
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache
from jsparse.host_reader import OnProgress, Reader, StepResult
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import to_logits
from jsparse.policy import Policy, State
from jsparse.runtime import prefill, sampling
from jsparse.runtime.correct import correct
from jsparse.runtime.decode_step import StepStats, decode_step
from jsparse.runtime.sampling import Sampling
from jsparse.shapes import Rows

step = jax.jit(
    decode_step, static_argnames=("decoder", "policy"), donate_argnames=("cache", "state")
)
sample = jax.jit(sampling.sample, static_argnames=("sampling",))
first_logits = jax.jit(to_logits, static_argnames=("decoder",))
_mark_seen = jax.jit(sampling.mark_seen, donate_argnames=("seen",))


@partial(jax.jit, static_argnames=("spec", "policy"))
def empty(spec: CacheSpec, policy: Policy) -> tuple[KVCache, State]:
    """Returns an empty cache and the policy's first state."""
    return kv_cache.init(spec, fields=policy.needs), policy.init(spec)


@partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache", "state"))
def maintain(policy: Policy, cache: KVCache, state: State) -> tuple[KVCache, State]:
    """Runs the policy's maintenance."""
    state, cache = policy.maintain(state, cache)
    return cache, state


class Primed(NamedTuple):
    """Holds the logits that follow the prompts, the cache and the policy's state."""

    logits: Float32[Array, "B V"]
    cache: KVCache
    state: State


def prime(
    params: Params, policy: Policy, rows: list[list[int]], spec: CacheSpec, report: OnProgress
) -> Primed:
    """Reads the prompts chunk by chunk, all rows side by side."""
    longest = max(map(len, rows))
    sizes = prefill.chunk_sizes(longest, prefill.chunk_tokens(params.decoder, len(rows)))
    tokens = np.zeros((len(rows), sum(sizes)), np.int32)
    for b, ids in enumerate(rows):
        tokens[b, : len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    carry = prefill.start(params.decoder, policy, *empty(spec, policy))
    done = 0
    try:
        for size in sizes:
            carry = prefill.prefill_chunk(
                params.decoder,
                policy,
                params.weights,
                jnp.asarray(tokens[:, done : done + size]),
                jnp.asarray(np.clip(lengths - done, 0, size)),
                carry,
                last=done + size >= longest,
            )
            done += size
            report("prefill", min(done, longest), longest)
        return Primed(
            first_logits(params.decoder, params.weights, carry.last_hidden),
            carry.cache,
            carry.state,
        )
    except BaseException:
        _settle(carry)
        raise


def decode(
    params: Params,
    policy: Policy,
    options: Sampling,
    rows: list[list[int]],
    primed: Primed,
    seed: int,
    reader: Reader,
) -> None:
    """Decodes until every row has stopped, has max_new_tokens, or the cache is full.

    The reader gets every token.
    """
    logits, cache, state = primed
    stats = None
    # a key takes 32 bits of a seed: the upper ones are folded in
    key = jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32)
    seen = _seen(rows, params.config.vocab_size) if options.repetition_penalty != 1.0 else None
    recent = recent_tokens(policy)
    try:
        for i in range(reader.max_new_tokens):
            tokens, logprobs = sample(options, logits, key, jnp.int32(i), seen)
            reader.push(
                StepResult(tokens, logprobs, stats, cache.overflow + False)
            )  # a copy: the cache is donated below
            if reader.finished or i + 1 == reader.max_new_tokens:
                break
            seen = _mark_seen(seen, tokens)
            logits, cache, state, stats = advance(
                params, policy, i + 1, recent, tokens, cache, state
            )
        reader.drain()
    finally:
        _settle(logits, cache, state)


def recent_tokens(policy: Policy) -> deque[Rows]:
    """Returns a deque for the tokens that were fed, as long as `advance` may correct."""
    return deque(maxlen=policy.correct_every or 1)


def advance(
    params: Params,
    policy: Policy,
    nth: int,
    recent: deque[Rows],
    tokens: Rows,
    cache: KVCache,
    state: State,
) -> tuple[Float32[Array, "B V"], KVCache, State, StepStats]:
    """Runs the nth decode step, from 1 on, and the corrections and maintenance due after it."""
    decoder, weights = params.decoder, params.weights
    logits, cache, state, stats = step(decoder, policy, weights, tokens, cache, state)
    recent.append(tokens)
    if policy.correct_every and nth % policy.correct_every == 0:
        cache, state = correct(decoder, policy, weights, jnp.stack(recent, axis=1), cache, state)
    if policy.period and nth % policy.period == 0:
        cache, state = maintain(policy, cache, state)
    return logits, cache, state, stats


def _settle(*running: Any) -> None:
    """Waits for running steps: a process that exits during one is aborted."""
    for array in jax.tree.leaves(running):
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.block_until_ready()


def _seen(rows: list[list[int]], vocab_size: int) -> Array:
    seen = np.zeros((len(rows), vocab_size), np.bool_)
    for b, ids in enumerate(rows):
        seen[b, ids] = True
    return jnp.asarray(seen)
