"""Chooses cache capacities and checks that they fit in memory."""

import math
import sys
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
# Capacities that are powers of two on a CPU: it takes as long to compile the programs of a capacity
# as to read 3,000 tokens with SmolLM2.
MIN_COARSE, MAX_COARSE = 512, 8192
# the default share of the free host memory for an engine's K and V
DEFAULT_HOST_SHARE = 0.8


def bucket(tokens: int, page_size: int) -> int:
    """Rounds `tokens` up to a capacity, so that few sizes are compiled.

    Capacities go in steps of an eighth of their power of two; on a CPU, those up to MAX_COARSE are
    powers of two.
    """
    if _coarse(tokens):
        return max(MIN_COARSE, 2 ** (tokens - 1).bit_length())
    return _eighths(tokens, page_size)


def slots_left(tokens: int, spec: CacheSpec) -> int:
    """Returns the slots per head to leave after the prompt where `tokens` may be needed.

    A policy that bounds its memory needs the same number after every long prompt, so finer steps
    than those of `bucket` compile few more sizes. Where little would be saved, all slots are left.
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
        ValueError: an argument is out of its range, or prompt and new tokens do not fit the model
            or the given capacity.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if isinstance(value, Sequence) or (name == "max_length" and value is None):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")
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
    return CacheSpec(
        num_layers=config.num_layers,
        batch=len(rows),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=-(-slots // page_size),
        dtype=jnp.dtype(params.dtype),
        model=params.name,
        types=params.types,
        ranks=1 if params.mesh is None else params.mesh.size,
    )


def policy_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes that a policy keeps beside K and V, without allocating them.

    They are its state and the cache's optional fields.
    """
    return state_bytes(spec, policy) + len(policy.fields) * 4 * spec.num_slots


def state_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes of a policy's state, without allocating it."""
    state = jax.eval_shape(lambda: policy.init(spec))
    return sum(map(_nbytes, jax.tree.leaves(state)))


def device_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes of the cache and of the policy's state on the device."""
    chunk = chunk_attention.chunk_tokens(spec)
    own = policy_bytes(spec, policy)  # a policy refuses sizes that do not fit it
    return own + store.store_of(policy, spec).device_bytes(chunk)


def fits(spec: CacheSpec, policy: Policy) -> bool:
    """Returns whether the cache and the policy's state fit in the memory that is free."""
    on_host = store.store_of(policy, spec).host_bytes()
    if on_host and on_host > host_store.available_host_bytes():
        return False
    return device_bytes(spec, policy) <= memory.available_bytes(devices=spec.ranks)


def require_fit(spec: CacheSpec, policy: Policy) -> None:
    """Raises ValueError if the cache and the policy's state do not fit in memory.

    Nothing is allocated.
    """
    store.store_of(policy, spec).require_fit()
    wanted, there = device_bytes(spec, policy), memory.available_bytes(devices=spec.ranks)
    if wanted > there:
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes {memory.size(wanted)} of "
            "cache: "
            f"must fit in the {memory.size(there)} that are free"
        )


@contextmanager
def exhaustion(spec: CacheSpec) -> Iterator[None]:
    """Turns an out-of-memory error of the device into a ValueError with both numbers.

    The activations come on top of the cache.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes "
            f"{memory.size(spec.nbytes)} of cache, and activations "
            "on top: must fit in the device's memory, of which "
            f"{memory.size(memory.available_bytes())} are free now"
        ) from error


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def group_bytes(spec: CacheSpec, policy: Policy) -> float:
    """Returns the bytes of a group: a page of all layers and heads, and of the policy's state."""
    return _bytes_of(spec, policy)[0]


def _bytes_of(spec: CacheSpec, policy: Policy) -> tuple[float, float]:
    """Returns the bytes on the device that a pool takes for each group, and beside that."""
    held = device_bytes if policy.offload is None else policy_bytes

    def needs(groups: int) -> int:
        return held(spec._replace(pool_pages=groups * spec.num_kv_heads), policy)

    few, more = 64, 128
    per_group = (needs(more) - needs(few)) / (more - few)
    rest = needs(few) - few * per_group
    if policy.offload is not None and not _on_gpu():  # which has one memory for both
        per_group += _on_host(spec)
    return per_group, rest


def _leaving_bytes(spec: CacheSpec, policy: Policy, prompts: int, chunk: int) -> int:
    """Returns the bytes on the device of what is on its way to host memory and back.

    These are the rows' tails and resident heads; of prompts that are being read, a layer and what
    the policy knows of them; and their chunks, which are there twice as they leave, or a tail.
    """
    assert policy.offload is not None
    tokens = max(2 * chunk, host_store.stored_every(policy.offload, spec.page_size))
    pages = prompts * spec.num_pages + spec.num_layers * (-(-tokens // spec.page_size) + 2)
    read = policy_bytes(spec._replace(batch=prompts, pool_pages=None), policy)
    moved = spec.num_kv_heads * pages * host_store.page_bytes(spec)
    return host_store.row_bytes(spec, policy) + read + moved


def _on_host(spec: CacheSpec) -> int:
    """Returns the bytes that a group takes in host memory, where K and V lie there."""
    return spec.num_layers * spec.num_kv_heads * host_store.page_bytes(spec)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pool_groups(
    spec: CacheSpec,
    policy: Policy,
    tokens: int | None,
    gpu_memory_utilization: float,
    *,
    reading: CacheSpec | None = None,
    prompts: int = 1,
    chunk: int = 0,
) -> int:
    """Returns the pages per layer and head of a pool that rows share, a scratch page included.

    The pool lies in host memory where K and V of the policy do.

    Args:
        spec: the sizes of rows.
        policy: the policy, whose state takes memory by page and by row.
        tokens: the tokens that the pool must hold; None is as many as memory allows, but no more
            than all rows can use where the rest of the memory is not the engine's, on a CPU or in
            host memory, or prompts that have been read cannot be kept for others.
        gpu_memory_utilization: the share of the memory that may be in use then.
        reading: the sizes of prompts that are being read, where they have a state of their own.
        prompts: how many prompts are read at a time.
        chunk: the tokens of all their chunks.

    Raises:
        ValueError: memory does not suffice.
    """
    per_group, rows = _bytes_of(spec, policy)
    rows += _leaving_bytes(spec, policy, prompts, chunk) if policy.offload else 0
    rows += state_bytes(reading, policy) if reading else 0
    there = memory.available_bytes(gpu_memory_utilization, spec.ranks) - rows
    maximum = int(there // per_group) if per_group else sys.maxsize
    maximum = max(0, maximum) if there >= 0 else 0
    on_host = policy.offload is not None
    host_bytes = host_store.available_host_bytes() if on_host else sys.maxsize
    most_on_host = host_bytes // _on_host(spec)
    if tokens is None:
        keeps_prompts = _on_gpu() and policy.shares is not None and not on_host
        maximum = min(maximum, int(DEFAULT_HOST_SHARE * host_bytes) // _on_host(spec))
        # shared pages count once
        all_rows = spec.batch * spec.num_pages + (reading.num_pages if reading else 0)
        wanted = maximum if keeps_prompts else min(maximum, all_rows + 1)
    else:
        wanted = -(-tokens // spec.page_size) + 1
    if max(wanted, 2) > most_on_host:
        raise ValueError(
            f"K and V of {(max(wanted, 2) - 1) * spec.page_size} tokens take "
            f"{memory.size(max(wanted, 2) * _on_host(spec))} of host memory: must fit in the "
            f"{memory.size(host_bytes)} that are free"
            + (f" and {host_store.LIMIT_VARIABLE} allows" if _on_gpu() else "")
        )
    if wanted > maximum or wanted < 2:
        asked = (max(wanted, 2) - 1) * spec.page_size
        where = f" in host memory, tails of {spec.batch} rows" if on_host else ""
        raise ValueError(
            f"K and V of {asked} tokens{where} and the state of {policy} take "
            f"{memory.size(rows + max(wanted, 2) * per_group)}: must fit in the "
            f"{memory.size(max(0, there + rows))} that "
            f"gpu_memory_utilization={gpu_memory_utilization} leaves beside the model"
        )
    return wanted
