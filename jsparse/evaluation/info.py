"""Describes a model and its memory, from its files' headers alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jsparse.cache import CacheSpec
from jsparse.evaluation.weight_sizes import (
    ITEM_BYTES,
    assumed_weights,
    num_active_parameters,
    num_parameters,
    own_weight_bytes,
    planned_weights,
)
from jsparse.hyper_parameters import whole_number
from jsparse.machine import memory
from jsparse.models.checkpoint import require_kv_cache_dtype
from jsparse.models.config import ModelConfig
from jsparse.models.config_files import checked_path, read_config
from jsparse.models.formats import plan_files
from jsparse.models.hub import locate
from jsparse.models.weight_plan import named_types, parse_weights
from jsparse.policies.auto import auto, choose
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy, Policy, resolved
from jsparse.runtime import capacity
from jsparse.runtime.host_store import available_host_bytes
from jsparse.runtime.store import store_of

PAGE_SIZE = 16


def describe(
    model: str,
    *,
    dtype: str,
    weights: str | None = None,
    policy: AnyPolicy | str = "dense",
    context: int | None = None,
    revision: str | None = None,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Returns the sizes of a model, its cache and a policy's state, and how much context fits.

    The cache and the policy's state, in pages of 16 tokens, must fit with the weights in the
    currently free memory of each device; temporary arrays of a step are not counted. "auto" is
    resolved for one prompt of `context` tokens, by default the model's maximum, for which the
    largest batch is also computed. Other arguments are those of `jsparse.load`.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the kind of model is not supported, its files would not load, `context` is out
            of range, the policy is invalid, or the model cannot be spread over that number of
            devices.
    """
    whole_number("tensor_parallel_size", tensor_parallel_size, 1)
    require_kv_cache_dtype(kv_cache_dtype)
    original = as_policy(policy)
    config = read_config(model, revision=revision)
    option = parse_weights(weights, dtype)
    path = checked_path(locate(model, revision, weights=False), model)
    planned = plan_files(path, option, jnp.dtype(dtype), tensor_parallel_size)
    limit = config.max_position_embeddings
    context = limit if context is None else context
    if not 1 <= context <= limit:
        raise ValueError(f"context={context}: must be from 1 to {limit}, the model's maximum")
    ranks = tensor_parallel_size
    own = config.of_rank(ranks)
    if planned is None:
        of_weights = assumed_weights(config, ranks, dtype, option)
    else:
        of_weights = planned_weights(planned, config, ranks, dtype)
    types = named_types(dtype, kv_cache_dtype, of_weights.forms)
    how = {"model": model, "types": types, "ranks": ranks, "kv_cache_dtype": kv_cache_dtype}
    sizes = _spec(own, -(-context // PAGE_SIZE), dtype)._replace(**how)
    policy = resolved(original, sizes)
    parameters = num_parameters(config)
    per_token = ranks * sizes.token_bytes
    free, host_free = memory.available_bytes(), available_host_bytes()
    on_host = store_of(policy, sizes).host_bytes() > 0
    growth, fixed = kept_beside(sizes, policy, limit)
    of_cache, of_prompt = on_device(sizes, policy, limit)
    room = max(free - of_weights.device_bytes, 0)
    tokens = max(room - fixed - of_prompt, 0) // (of_cache + growth)
    prompts = room // (context * (of_cache + growth) + fixed + of_prompt)
    if on_host:
        tokens = min(tokens, host_free // per_token)
        prompts = min(prompts, host_free // (context * per_token))
    return {
        "model": model,
        "config": dataclasses.asdict(config),
        "parameters": parameters,
        "active_parameters": num_active_parameters(config),
        "devices": ranks,
        "device_weight_bytes": of_weights.device_bytes,
        "weight_bytes": {name: parameters * size for name, size in ITEM_BYTES.items()}
        | ({} if config.experts else {"q8_0": own_weight_bytes(config, 1, dtype, "q8_0")}),
        "weight_formats": of_weights.formats,
        "dtype": dtype,
        "weights": option,
        "types": types,
        "kv_cache_dtype": kv_cache_dtype,
        "cache_bytes_per_token": per_token,
        "device_cache_bytes_per_token": of_cache,
        "device_cache_bytes_per_prompt": of_prompt,
        "offloaded": on_host,
        "free_host_bytes": host_free,
        "policy": original.name,
        "policy_that_runs": policy.name,
        "policy_reason": choose(sizes).reason if original is auto() else "",
        "policy_bytes_per_token": ranks * growth,
        "policy_bytes_per_prompt": ranks * fixed,
        "policy_fraction": ranks * growth / per_token,
        "max_cache_bytes": max_cache_bytes(config, policy, context, per_token),
        "free_bytes": free,
        "longest_context": min(int(tokens), limit),
        "context": context,
        "largest_batch": int(prompts),
    }


def kept_beside(sizes: CacheSpec, policy: Policy, limit: int) -> tuple[float, int]:
    """Returns a policy's bytes besides K and V, per token of context and per prompt.

    `sizes` are those of one prompt, and `limit` is the model's maximum context.
    """
    return _growth(sizes, limit, lambda spec: capacity.policy_bytes(spec, policy))


def on_device(sizes: CacheSpec, policy: Policy, limit: int) -> tuple[float, int]:
    """Returns the bytes of K and V on the device, per token of context and per prompt.

    With K and V in host memory, these are the tail, the resident heads, and one whole layer.
    """

    def kept(spec: CacheSpec) -> int:
        return capacity.device_bytes(spec, policy) - capacity.policy_bytes(spec, policy)

    return _growth(sizes, limit, kept)


def _growth(sizes: CacheSpec, limit: int, kept: Callable[[CacheSpec], int]) -> tuple[float, int]:
    """Returns bytes per token of context, and bytes per prompt.

    They follow from the model's maximum and twice that, so that bounded sizes do not grow.
    """
    pages = -(-limit // PAGE_SIZE)
    once, twice = (kept(sizes._replace(num_pages=n)) for n in (pages, 2 * pages))
    return (twice - once) / (pages * PAGE_SIZE), 2 * once - twice


def max_cache_bytes(config: ModelConfig, policy: Policy, context: int, per_token: int) -> int:
    """Returns the maximum bytes of K and V of a row after a prompt of `context` tokens."""
    limit = config.max_position_embeddings
    max_length = None if policy.eviction is None else policy.eviction.max_length
    slots = limit if max_length is None else max_length(context, limit - context)
    spec = _spec(config, -(-limit // PAGE_SIZE), "float32")
    return min(capacity.slots_left(slots, spec), limit) * per_token


def _spec(config: ModelConfig, pages: int, dtype: str) -> CacheSpec:
    """Returns the sizes of a cache for one prompt."""
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return CacheSpec(config.num_layers, 1, *heads, PAGE_SIZE, pages, jnp.dtype(dtype))
