"""Fills a cache or a session with random K and V, for timings without a prompt."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jsparse import cache as kv_cache
from jsparse.cache import (
    KEY_REACH,
    CacheSpec,
    Int8Pages,
    KVCache,
    ReadOnly,
    StepView,
    read_heads,
    step_view,
)
from jsparse.hooks import PrefillView, State
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy
from jsparse.runtime.constants import constants
from jsparse.runtime.session import PrefillResult, Session
from jsparse.runtime.spread_programs import by_rank, same_on_all

PARTS = 16  # equal parts of a random pool in 8 bits


def full_session(
    params: Params, policy: Policy, spec: CacheSpec, tokens: int, **how: Any
) -> Session:
    """Returns a session with random tokens in its rows, and the state after a prompt.

    `how`: further arguments of Session.
    """
    mesh, known, vocab_size = params.mesh, constants(params, policy), params.config.vocab_size
    cache = random_cache(spec, tokens, policy.fields, mesh, known)
    static = ("policy", "spec", "vocab_size")
    state_after = by_rank(_state_after, mesh, sharded=("cache",), static=static)
    state = state_after(known, cache, policy._replace(offload=None), spec, vocab_size)
    logits = jnp.zeros((spec.batch, vocab_size), jnp.float32)
    logits = logits if mesh is None else same_on_all(logits, mesh)
    session = Session(params, policy, spec, adopts=True, **how)
    session.adopt(PrefillResult(logits, cache, state))
    return session


def _state_after(
    known: Mapping[str, Array] | None,
    cache: KVCache,
    policy: Policy,
    spec: CacheSpec,
    vocab_size: int,
) -> State:
    view = step_view(cache, ReadOnly(known))
    return state_after_prompt(policy, spec, view, vocab_size)


def random_cache(
    spec: CacheSpec,
    tokens: int,
    fields: tuple[str, ...] = (),
    mesh: Mesh | None = None,
    constants: Mapping[str, Array] | None = None,
) -> KVCache:
    """Returns a cache with `tokens` random keys and values in every head, in order.

    Their standard deviation is about 1. `fields` are the optional fields that a policy needs; slots
    have no bias. All devices of `mesh` have the same contents. With K in 8 bits, `constants` have
    the reach of the model's keys.
    """
    reach = np.ones(spec.num_layers)
    if constants is not None and KEY_REACH in constants:
        reach = np.asarray(constants[KEY_REACH]).mean((1, 2))
    in_order = by_rank(_in_order, mesh, static=("spec", "tokens", "fields"))
    fill = jax.jit(_filled, donate_argnames="like")
    if mesh is not None:
        fill = by_rank(_filled, mesh, sharded=("like",), donated=("like",))
    cache = in_order(spec, tokens, fields)
    layers = list(cache.layers)
    for i, layer in enumerate(layers):
        k = fill(jnp.int32(2 * i), jnp.float32(1 / reach[i]), layer.k)
        v = fill(jnp.int32(2 * i + 1), jnp.float32(1), layer.v)
        layers[i] = layer._replace(k=k, v=v)
    return cache._replace(layers=tuple(layers))


def _in_order(spec: CacheSpec, tokens: int, fields: tuple[str, ...]) -> KVCache:
    """Returns a cache with `tokens` tokens per head, each in the slot of its position."""
    cache = kv_cache.init(spec, fields=fields)
    in_order = jnp.arange(spec.capacity, dtype=jnp.int32).reshape(-1, spec.page_size)
    layers = tuple(
        layer._replace(
            lengths=jnp.full_like(layer.lengths, tokens),
            slot_positions=jnp.tile(in_order, (spec.batch * spec.num_kv_heads, 1))
            if "slot_positions" in fields
            else None,
        )
        for layer in cache.layers
    )
    return cache._replace(layers=layers, positions=jnp.full_like(cache.positions, tokens))


def _filled(seed: Array, size: Array, like: Array | Int8Pages) -> Array | Int8Pages:
    """Returns random numbers in the shape of `like`, a pool of zeros.

    Their standard deviation is 1, or in 8 bits `size`, times the reach of a channel.
    """
    key = jax.random.key(seed)
    if isinstance(like, Int8Pages):
        # drawing takes eight bytes per number, so larger pools repeat a part
        part = like.shape[0] // math.gcd(like.shape[0], PARTS), *like.shape[1:]
        values = jax.random.randint(key, part, -64, 64, jnp.int8)
        values = jnp.broadcast_to(values, (like.shape[0] // part[0], *part)).reshape(like.shape)
        # sums, so that they are made in the memory of `like`
        scales = like.scales + (size / 37).astype(jnp.bfloat16)
        return replace(like, values=like.values + values, scales=scales)
    return like + jax.random.normal(key, like.shape, like.dtype)


def state_after_prompt(policy: Policy, spec: CacheSpec, step: StepView, vocab_size: int) -> State:
    """Returns the policy's state after a prompt of one chunk of random tokens and queries."""
    return _reader(policy, spec, vocab_size)(step)


@functools.cache
def _reader(policy: Policy, spec: CacheSpec, vocab_size: int) -> Callable[[StepView], State]:
    """Returns a jitted function of a view, shared by all caches of these sizes."""

    @jax.jit
    def take_in(step: StepView) -> State:
        state = policy.init(spec)
        slots = spec.batch, spec.capacity
        tokens = jax.random.randint(jax.random.key(1), slots, 0, vocab_size, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(spec.capacity, dtype=jnp.int32), slots)
        shape = spec.batch, policy.window, spec.num_heads, spec.head_dim
        queries = jax.random.normal(jax.random.key(0), shape, spec.dtype)
        windows = jnp.full(spec.batch, policy.window, jnp.int32)
        for layer, layer_cache in enumerate(step.layers):
            k, v = (read_heads(pool, layer_cache).swapaxes(1, 2) for pool in layer_cache[:2])
            chunk = tokens, positions, k, v, layer_cache.lengths[:, 0]
            view = PrefillView(*chunk, step, queries, windows, last=True)
            state = policy.prefill(state, layer, view)
        return state

    return take_in
