"""Times decode steps of a whole model for bench.eviction_speed, and measures its memory.

Caches are built as after a prompt, from random K and V, so no prefill is needed. Heads of hard_kv
then have the lengths of a trace of SmolLM2, and get them back after every compression, since random
weights would give all heads about the same length.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.lib.kernel_programs import random
from bench.lib.llama_8b import LLAMA_8B
from bench.lib.replay import lengths_kept, spread_evenly
from bench.lib.subprocesses import spread
from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView
from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.models.transformer import random_weights
from jsparse.policies.expressions import parse
from jsparse.policy import Policy
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import PrefillResult, Session
from jsparse.runtime.store import empty_rows

PAGE = 16


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a policy's layer.

    Attributes:
        capacity: the slots per head.
        cap, floor: the maximum and minimum that a compression leaves.
        period: the steps between compressions.
        prompt: the tokens of the dense baseline's heads.
    """

    capacity: int = 2304
    cap: int = 2048
    floor: int = 512
    period: int = 128
    prompt: int = 131072


def replayed_lengths(batch: int, layer: int, sizes: LayerSizes) -> np.ndarray:
    """Returns the lengths of a layer's heads [B, K] on SmolLM2, clipped to `sizes`."""
    shape = (batch, LLAMA_8B.num_kv_heads)
    lengths = spread_evenly(lengths_kept(), layer, shape) * sizes.cap // LayerSizes.cap
    return np.clip(lengths, sizes.floor, sizes.cap).astype(np.int32)


@dataclass(frozen=True)
class Scale:
    """The run: the model, the steps per program, and the number of timings.

    Attributes:
        model: the model's sizes.
        sizes: those of the policy.
        count: steps per program, a divisor of the period.
        runs: the number of timed periods.
    """

    model: ModelConfig = LLAMA_8B
    sizes: LayerSizes = field(default_factory=LayerSizes)
    count: int = 8
    runs: int = 5


def spec_of(scale: Scale, batch: int, slots: int) -> CacheSpec:
    """Returns the sizes of a cache."""
    model = scale.model
    return CacheSpec(
        *(model.num_layers, batch, model.num_heads, model.num_kv_heads, model.head_dim),
        *(PAGE, slots // PAGE, jnp.bfloat16),
    )


def model_of(scale: Scale) -> Params:
    """Returns a model of random weights."""
    weights = random_weights(scale.model, jnp.bfloat16)
    return Params(weights, scale.model, None, {}, "llama-3.1-8b")


def filled(
    spec: CacheSpec, policy: Policy, lengths: Sequence[np.ndarray], position: int
) -> PrefillResult:
    """Returns a cache of random K and V, with these lengths per layer, and a policy state."""
    shape = (spec.pages, spec.page_size, spec.head_dim)
    layers = tuple(
        LayerCache(
            random(2 * i, shape),
            random(2 * i + 1, shape),
            jnp.asarray(held),
            bias=jnp.zeros(shape[:2]) if "bias" in policy.fields else None,
        )
        for i, held in enumerate(lengths)
    )
    positions = jnp.full(spec.batch, position, jnp.int32)
    cache = KVCache(layers, positions, jnp.zeros(spec.batch, jnp.bool_))
    # only the shape of the logits matters: one token follows from them
    return PrefillResult(
        jnp.zeros((spec.batch, 1)), cache, jax.jit(policy.init, static_argnums=0)(spec)
    )


def keeping_lengths(policy: Policy, lengths: Sequence[np.ndarray]) -> Policy:
    """Returns the policy with heads that have these lengths after every compression.

    Everything is still computed, and rows move as the policy directs; K and V are random in any
    case. There is no prompt, and therefore nothing after it.
    """

    def maintain(state, view):
        state, cache = policy.services.maintain(state, view)
        layers = (
            layer._replace(lengths=jnp.asarray(held))
            for layer, held in zip(cache.layers, lengths, strict=True)
        )
        return state, cache._replace(layers=tuple(layers))

    assert policy.eviction is not None
    alone = policy.eviction._replace(after_prompt=None)
    return policy._replace(
        services=policy.services._replace(maintain=maintain),
        eviction=alone,
        name=f"replayed({policy.name})",
    )


def lengths_after(expression: str, scale: Scale, batch: int) -> list[np.ndarray]:
    """Returns the lengths of each layer's heads after a compression.

    For a policy with equal lengths, they are its budget.
    """
    heads = (batch, scale.model.num_kv_heads)
    if "'uniform'" in parse(expression).name:
        eviction = parse(expression).eviction
        assert eviction is not None and eviction.max_length is not None
        budget = eviction.max_length(2**30, 0) - scale.sizes.period
        return [np.full(heads, budget, np.int32)] * scale.model.num_layers
    return [
        replayed_lengths(batch, layer, scale.sizes)[:, : heads[1]]
        for layer in range(scale.model.num_layers)
    ]


def periods(session: Session, scale: Scale, held: PrefillResult, runs: int) -> dict[str, Any]:
    """Times steps from `held` on, by periods of the policy.

    Returns:
        step: seconds per step, including its share of a compression.
        alone: the same without compression.
        compression: seconds of a compression of all layers, and of one start of the host, for which
            the device waits.
    """
    period, count = scale.sizes.period, scale.count
    session.adopt(held)
    del held
    limit = 1 + period * (runs + 1) + count
    results = session.steps(greedy, (), limits=[limit] * session.deployment.spec.batch)

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps // count):
            result = next(results)
        result.tokens.block_until_ready()
        return time.perf_counter() - began

    next(results)
    run(period)  # compiles
    # the first program of a period waits for the compression at the end of the previous one
    times = [(run(count), run(period - count)) for _ in range(runs)]
    run(count)
    results.close()
    rest = [b / (period - count) for _, b in times]
    return {
        "step": spread([(a + b) / period for a, b in times]),
        "alone": spread(rest),
        "compression": spread([a - count * r for (a, _), r in zip(times, rest, strict=True)]),
    }


def after_prompt(scale: Scale, batch: int, expression: str) -> dict[str, Any]:
    """Times steps after the prompt: dense, or with hard_kv's replayed heads."""
    policy, sizes = parse(expression), scale.sizes
    if policy.evicts:
        lengths, slots = lengths_after(expression, scale, batch), sizes.capacity
        policy = keeping_lengths(policy, lengths)
    else:
        slots = sizes.prompt
        steps = scale.sizes.period * (scale.runs + 1) + 2 * scale.count
        full = np.full((batch, scale.model.num_kv_heads), sizes.prompt - steps, np.int32)
        lengths = [full] * scale.model.num_layers
    params, spec = model_of(scale), spec_of(scale, batch, slots)
    session = Session(params, policy, spec, adopts=True, steps_per_program=scale.count)
    held = filled(spec, policy, lengths, sizes.prompt - scale.sizes.period * (scale.runs + 2))
    return periods(session, scale, held, scale.runs) | sized(params, spec, lengths)


def sized(params: Params, spec: CacheSpec, lengths: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns the bytes that a step must read, and the peak memory."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    # a step reads one row of the input embedding
    weights -= params.weights["params"]["embed"].nbytes
    slots = sum(int(held.sum()) for held in lengths)
    return {
        "batch": spec.batch,
        "capacity": spec.capacity,
        "slots_per_head": slots / spec.num_layers / spec.batch / spec.num_kv_heads,
        "bytes": weights + slots * 2 * spec.head_dim * jnp.dtype(spec.dtype).itemsize,
        "peak_bytes": memory("peak_bytes_in_use"),
    }


def dense_over_lengths(scale: Scale, batch: int, longest: int, at: Sequence[int]) -> dict[str, Any]:
    """Times dense steps in a cache of `longest` slots at several lengths."""
    policy, heads = parse("dense"), (batch, scale.model.num_kv_heads)
    params, spec = model_of(scale), spec_of(scale, batch, longest)
    # at most one period of steps per length
    few = Scale(scale.model, scale.sizes, scale.count, 3)
    session = Session(params, policy, spec, adopts=True, steps_per_program=scale.count)
    steps = few.sizes.period * (few.runs + 1) + 2 * few.count
    starts = [min(length, longest - steps) for length in at]
    held = filled(spec, policy, [np.full(heads, 0, np.int32)] * spec.num_layers, 0)
    rows = []
    for start in starts:
        cache = held.cache
        full = jnp.full(heads, start, jnp.int32)
        layers = tuple(layer._replace(lengths=jnp.copy(full)) for layer in cache.layers)
        positions = jnp.full(batch, start, jnp.int32)
        cache = cache._replace(layers=layers, positions=positions)
        held = held._replace(cache=cache)
        del cache, layers
        rows.append({"slots": start} | periods(session, few, held, few.runs))
        held = session.prefilled
    lengths = [np.full(heads, starts[-1], np.int32)] * spec.num_layers
    return {"lengths": rows, **sized(params, spec, lengths)}


def evicted_over_time(scale: Scale, batch: int, expression: str) -> dict[str, Any]:
    """Times steps of hard_kv at its steady size, at a position in the middle."""
    sizes, lengths = scale.sizes, lengths_after(expression, scale, batch)
    policy = keeping_lengths(parse(expression), lengths)
    params, spec = model_of(scale), spec_of(scale, batch, sizes.capacity)
    session = Session(params, policy, spec, adopts=True, steps_per_program=scale.count)
    held = filled(spec, policy, lengths, 16384)
    return periods(session, scale, held, 3) | sized(params, spec, lengths)


def prompt_memory(scale: Scale, expression: str) -> dict[str, Any]:
    """Prefills a prompt of random tokens and measures the memory before and after a compression."""
    policy, prompt = parse(expression), scale.sizes.prompt
    params, spec = model_of(scale), spec_of(scale, 1, prompt)
    jax.block_until_ready(params.weights)
    before = memory("bytes_in_use")
    session = Session(params, policy, spec, steps_per_program=scale.count)
    tokens = np.random.default_rng(0).integers(0, scale.model.vocab_size, prompt)
    began = time.perf_counter()
    session.prefill([tokens.tolist()])
    jax.block_until_ready(session.prefilled)
    read = time.perf_counter() - began
    dense = memory("bytes_in_use")
    results = session.steps(greedy, (), limits=[1 + scale.count])
    began = time.perf_counter()
    next(results).tokens.block_until_ready()
    compressed = time.perf_counter() - began
    gc.collect()
    after = memory("bytes_in_use")
    next(results).tokens.block_until_ready()
    results.close()
    layers = session.prefilled.cache.layers
    return {
        "before": before,
        "after_prompt_dense": dense - before,
        "after_compression": after - before,
        "capacity": layers[0].capacity,
        "slots_per_head": float(np.mean([layer.lengths for layer in layers])),
        "read_seconds": read,
        "compression_seconds_with_compilation": compressed,
    }


def compression_memory(scale: Scale, expression: str) -> dict[str, Any]:
    """Measures the peak memory of a prompt's compression in addition to the cache.

    K and V are zeros: memory has had no other contents.
    """
    policy, sizes = parse(expression), scale.sizes
    spec = spec_of(scale, 1, sizes.prompt)
    cache, state = empty_rows(spec, policy)
    full = jnp.full(cache.layers[0].lengths.shape, sizes.prompt, jnp.int32)
    layers = tuple(layer._replace(lengths=jnp.copy(full)) for layer in cache.layers)
    cache = cache._replace(layers=layers, positions=jnp.full(1, sizes.prompt, jnp.int32))
    del layers
    jax.block_until_ready(cache)
    before, peak_before = memory("bytes_in_use"), memory("peak_bytes_in_use")
    assert policy.eviction is not None and policy.eviction.after_prompt is not None
    state, cache = policy.eviction.after_prompt(state, StepView(cache), sizes.capacity)
    jax.block_until_ready((state, cache))
    peak = memory("peak_bytes_in_use")
    return {
        "cache_and_state": before,
        "peak_before": peak_before,
        "peak_above": peak - before,
        "after": memory("bytes_in_use"),
    }


def memory(name: str) -> int:
    """Returns one of the device's memory statistics, or 0 if it has none, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name, 0)


def tiny() -> Scale:
    """Returns a scale for a CPU."""
    model = ModelConfig(
        family="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_theta=10000.0,
    )
    return Scale(model, LayerSizes(192, 128, 48, 16, prompt=256), count=4, runs=2)
