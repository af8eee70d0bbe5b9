"""Chooses cache capacities and checks that they fit in memory."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jsparse.cache import CacheSpec
from jsparse.machine import memory
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy
from jsparse.runtime import chunk_attention, host_store, store

PAGE_SIZES = (8, 16, 32, 64)
# Capacities in this range are powers of two on a CPU: compiling one capacity's programs takes as
# long as prefilling 3,000 tokens with SmolLM2.
MIN_COARSE, MAX_COARSE = 512, 8192


def bucket(tokens: int, page_size: int) -> int:
    """Rounds `tokens` up to a capacity, so that few sizes are compiled.

    Steps between capacities are an eighth of their power of two; on a CPU, capacities up to
    MAX_COARSE are powers of two.
    """
    if _coarse(tokens):
        return max(MIN_COARSE, 2 ** (tokens - 1).bit_length())
    return _eighths(tokens, page_size)


def slots_left(tokens: int, spec: CacheSpec) -> int:
    """Returns the slots per head to leave after the prompt if `tokens` may be needed.

    A policy that bounds its memory needs the same number after every long prompt, so finer steps
    than those of `bucket` compile only a few more sizes. If little would be saved, all slots are
    left.
    """
    if _eighths(tokens, spec.page_size) >= spec.capacity:
        return spec.capacity
    step = max(64, spec.page_size)
    slots = -(-tokens // step) * step
    return min(2 ** (slots - 1).bit_length() if _coarse(slots) else slots, spec.capacity)


def _coarse(tokens: int) -> bool:
    return tokens <= MAX_COARSE and jax.default_backend() == "cpu"


def _eighths(tokens: int, page_size: int) -> int:
    step = max(64, page_size, 2 ** (tokens.bit_length() - 1) // 8)
    return -(-tokens // step) * step


def cache_spec(
    params: Params,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    max_length: int | None,
    page_size: int,
) -> CacheSpec:
    """Returns the sizes of the cache for these prompts, each with its number of new tokens.

    Raises:
        ValueError: an argument is out of range, or prompt and new tokens do not fit in the model's
            context or the given capacity.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if isinstance(value, Sequence) or (name == "max_length" and value is None):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    _require_page_size(page_size)
    config = params.config
    new = max_new_tokens if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(rows)
    needed, prompt, tokens = max(
        (len(ids) + n, len(ids), n) for ids, n in zip(rows, new, strict=True)
    )
    limits = {
        "the model's maximum": config.max_position_embeddings,
        "max_length, the capacity of the cache for both": max_length,
    }
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt of {prompt} tokens + max_new_tokens={tokens} is {needed}: "
                f"must be at most {limit}, {name}"
            )
    slots = bucket(needed, page_size) if max_length is None else max_length
    return spec_of(params, len(rows), slots, page_size)


def spec_of(params: Params, batch: int, max_length: int, page_size: int) -> CacheSpec:
    """Returns the sizes of the cache for `batch` rows of up to `max_length` tokens each.

    Raises:
        ValueError: there is no such page size.
    """
    _require_page_size(page_size)
    config = params.config
    return CacheSpec(
        num_layers=config.num_layers,
        batch=batch,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=-(-max_length // page_size),
        dtype=jnp.dtype(params.dtype),
        model=params.name,
        types=params.types,
        ranks=1 if params.mesh is None else params.mesh.size,
        kv_cache_dtype=params.kv_cache_dtype,
    )


def _require_page_size(page_size: int) -> None:
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")


def policy_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes that a policy needs besides K and V, without allocating them.

    They are its state and the cache's optional fields.
    """
    return state_bytes(spec, policy) + len(policy.fields) * 4 * spec.num_slots


def state_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes of a policy's state, without allocating it."""
    state = jax.eval_shape(lambda: policy.init(spec))
    return sum(map(_nbytes, jax.tree.leaves(state)))


def device_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes of the cache and of the policy's state on the device."""
    chunk = chunk_attention.chunk_tokens(spec, policy.prefill_method)
    own = policy_bytes(spec, policy)  # a policy raises for sizes that do not fit it
    return own + store.store_of(policy, spec).device_bytes(chunk)


def fits(spec: CacheSpec, policy: Policy) -> bool:
    """Returns whether the cache and the policy's state fit in free memory."""
    on_host = store.store_of(policy, spec).host_bytes()
    if on_host and on_host > host_store.available_host_bytes():
        return False
    return device_bytes(spec, policy) <= memory.available_bytes(devices=spec.ranks)


def require_fit(spec: CacheSpec, policy: Policy) -> None:
    """Raises ValueError if the cache and the policy's state do not fit in memory.

    Nothing is allocated.
    """
    store.store_of(policy, spec).require_fit()
    needed, free = device_bytes(spec, policy), memory.available_bytes(devices=spec.ranks)
    if needed > free:
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes {memory.size(needed)} of "
            "cache: "
            f"must fit in the {memory.size(free)} that are free"
        )


@contextmanager
def exhaustion(spec: CacheSpec) -> Iterator[None]:
    """Turns an out-of-memory error of the device into a ValueError with both numbers.

    Activations need memory in addition to the cache.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes "
            f"{memory.size(spec.nbytes)} of cache, plus activations: "
            "must fit in the device's memory; "
            f"{memory.size(memory.available_bytes())} are free now"
        ) from error


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
