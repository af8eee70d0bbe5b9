"""Trains an indexer, the gates of SeerAttention-R, by distillation from the frozen model.

"SeerAttention-R: Sparse Attention Adaptation for Long Reasoning" (Gao et al.), arXiv:2506.08889,
section 3. For each query, a KV head's target is the highest weight that dense attention gives to
any token of a block, in any query head of the group; over the complete blocks before the query's
own, normalised to a sum of 1. The loss is the KL divergence of the gate's scores from it, averaged
over queries, heads and layers. The gradient of a layer's loss only reaches that layer's gates, so
it is computed during the forward pass, and nothing is kept for a backward pass.

Where we differ: all queries after two complete blocks count (the authors skip the first half of a
text), and texts are pass keys in filler or questions (jsparse.train.data) instead of reasoning.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32

import jsparse
from jsparse.models.checkpoint import Params, require_full_attention, require_on_one_device
from jsparse.models.indexer import BLOCK, Indexer, IndexerFile
from jsparse.models.layers import rope_frequencies
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.policies.seer_attention import Gates, gate_keys, gate_queries
from jsparse.runtime.chunk_attention import flash
from jsparse.selection.threshold import top_k_mask
from jsparse.shapes import ChunkKV, ChunkQueries, Rows, Tokens
from jsparse.train.data import Source, check_at_least

QUERIES = 128  # queries whose weights over all tokens are in memory at a time
WARM_UP = 20  # steps
LAST = 0.01  # of the learning rate, at the end
DEVIATION = 0.02  # of the initial weights
KEPT = 0.25  # the share of a query's blocks that are compared with the best

OnStep = Callable[[int, int, float], Any]


@dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Attributes:
        steps: the number of steps.
        batch: the number of texts per step.
        rate: the highest learning rate of AdamW, which rises for 20 steps and falls as a cosine.
        block: the number of tokens of a block.
        norm: whether gate queries and keys are normalised.
        held_out: the number of batches on which the result is measured.
        seed: the seed of the initial weights.
    """

    steps: int = 800
    batch: int = 1
    rate: float = 1e-3
    block: int = BLOCK
    norm: bool = True
    held_out: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("steps", "batch", "block", "held_out")}
        check_at_least(1, **counts)
        check_at_least(0, seed=self.seed)
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate={self.rate}: must be a finite number above 0")


class Measure(NamedTuple):
    """The mean over layers, heads and queries.

    Attributes:
        loss: the KL divergence from the target, in nats.
        overlap: the share of the best quarter of a query's blocks that are in the gate's quarter.
    """

    loss: Float32[Array, ""]
    overlap: Float32[Array, ""]


def train_indexer(
    params: Params, source: Source, settings: Settings, report: OnStep = lambda *_: None
) -> IndexerFile:
    """Trains the gates of a model; the model's weights do not change.

    `report` receives each step's number, the number of steps, and its loss. The file's record has
    the measures on held-out batches, before and after training.

    Raises:
        ValueError: the model is on several devices or has sliding windows, or no held-out text has
            more than two blocks.
    """
    require_on_one_device(params)
    require_full_attention(params)
    held_out = range(settings.steps, settings.steps + settings.held_out)
    longest = max(int(texts(source, settings, nth)[1].max()) for nth in held_out)
    if longest <= 2 * settings.block:
        raise ValueError(
            f"block={settings.block}: texts must have more than two blocks, but no held-out one "
            f"has more than {longest} tokens"
        )
    shared = params.decoder, params.weights
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.rate, min(WARM_UP, settings.steps - 1), settings.steps, LAST * settings.rate
    )
    optimizer = optax.adamw(schedule, weight_decay=0.0)
    indexer = untrained(params, settings)
    state = optimizer.init(indexer)

    @partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def step(
        decoder: Decoder, weights: Weights, indexer: Indexer, state: Any, tokens: Tokens, rows: Rows
    ) -> tuple[Array, Indexer, Any]:
        loss, gradient = gradients(decoder, weights, indexer, tokens, rows, settings)
        updates, state = optimizer.update(gradient, state, indexer)
        return loss, cast(Indexer, optax.apply_updates(indexer, updates)), state

    def measured(indexer: Indexer) -> dict[str, float]:
        batches = (texts(source, settings, nth) for nth in held_out)
        found = [_measured(*shared, indexer, *batch, settings) for batch in batches]
        named = zip(Measure._fields, zip(*found, strict=True), strict=True)
        return {name: float(np.mean(each)) for name, each in named}

    before, began = measured(indexer), time.perf_counter()
    ahead = texts(source, settings, 0)
    for nth in range(settings.steps):
        loss, indexer, state = step(*shared, indexer, state, *ahead)
        ahead = texts(source, settings, nth + 1)  # while the device is busy
        report(nth + 1, settings.steps, float(loss))
    seconds = time.perf_counter() - began
    device = jax.local_devices()[0]
    record = {
        "settings": asdict(settings),
        "data": source.describe(),
        "model": params.name,
        "dtype": str(np.dtype(params.dtype)),
        "seconds": round(seconds, 2),
        "device": device.device_kind,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": {"jax": jax.__version__, "jsparse": jsparse.__version__},
        "untrained": before,
        "trained": measured(indexer),
    }
    kept = Indexer(*(np.asarray(x).astype(params.dtype) for x in indexer))
    return IndexerFile(kept, settings.block, record)


def untrained(params: Params, settings: Settings) -> Indexer:
    """Returns random gates, in float32, with norms of scale 1."""
    config, kv_heads, size = params.config, params.config.num_kv_heads, params.config.head_dim
    rng, heads = np.random.default_rng(settings.seed), (config.num_layers, kv_heads)
    q, k = (*heads, config.num_heads // kv_heads, size, size), (*heads, 3 * size, size)
    drawn = (DEVIATION * rng.standard_normal(shape, np.float32) for shape in (q, k))
    norms = np.full((config.num_layers, 2, size), float(settings.norm), np.float32)
    return Indexer(*(jnp.asarray(x) for x in (*drawn, norms)))


def texts(source: Source, settings: Settings, step: int) -> tuple[Tokens, Rows]:
    """Returns contexts with the tokens after them, padded to whole blocks, and their lengths."""
    samples = source.draw(step, settings.batch)
    rows = [np.concatenate([context, target]) for context, target, _ in samples]
    longest = max(len(context) for context, *_ in samples)
    bucket = next(bucket for bucket in source.buckets if bucket >= longest)
    width = -(-(bucket + source.target_tokens) // settings.block) * settings.block
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    return jnp.asarray(tokens, jnp.int32), jnp.array([len(row) for row in rows], jnp.int32)


def gradients(
    decoder: Decoder,
    weights: Weights,
    indexer: Indexer,
    tokens: Tokens,
    lengths: Rows,
    settings: Settings,
) -> tuple[Float32[Array, ""], Indexer]:
    """Returns the loss and its gradient."""

    def of_layer(gates: Gates, *layer: Array) -> tuple[Array, Gates]:
        return jax.value_and_grad(lambda x: loss_of_layer(settings, x, *layer).loss)(gates)

    made = _by_layer(decoder, weights, indexer, tokens, lengths, of_layer)
    losses, parts = zip(*made, strict=True)
    q, k, norms = (jnp.stack(each) / len(parts) for each in zip(*parts, strict=True))
    # without norms, their scales stay 0
    return jnp.mean(jnp.stack(losses)), Indexer(q, k, norms * settings.norm)


@partial(jax.jit, static_argnames=("decoder", "settings"))
def _measured(
    decoder: Decoder,
    weights: Weights,
    indexer: Indexer,
    tokens: Tokens,
    lengths: Rows,
    settings: Settings,
) -> Measure:
    measure = partial(loss_of_layer, settings)
    parts = _by_layer(decoder, weights, indexer, tokens, lengths, measure)
    return Measure(*(jnp.mean(jnp.stack(each)) for each in zip(*parts, strict=True)))


def _by_layer[T](
    decoder: Decoder,
    weights: Weights,
    indexer: Indexer,
    tokens: Tokens,
    lengths: Rows,
    function: Callable[..., T],
) -> list[T]:
    """Runs the dense model, and a function of each layer's gates, q, k, lengths and frequencies."""
    frequencies = jnp.asarray(rope_frequencies(decoder.config))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    parts = []

    def attend(layer: int, q: ChunkQueries, k: ChunkKV, v: ChunkKV) -> ChunkQueries:
        gates = Gates(*(x[layer] for x in indexer))
        parts.append(function(gates, q, k, lengths, frequencies))
        return flash(q, k, v, causal=True)[0].astype(q.dtype)

    hidden_states(decoder, weights, tokens, positions, attend)
    return parts


def loss_of_layer(
    settings: Settings,
    gates: Gates,
    q: ChunkQueries,
    k: ChunkKV,
    lengths: Rows,
    frequencies: Float32[Array, "half"],
) -> Measure:
    """Returns the measures of one layer, of q and k after RoPE.

    T is a multiple of the block; row b has `lengths[b]` tokens.
    """
    batch, count, kv_heads, size = k.shape
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    first = positions[:, :: settings.block]
    query = gate_queries(gates, q, positions, frequencies)
    blocks = k.swapaxes(1, 2).reshape(batch, kv_heads, -1, settings.block, size)
    key = gate_keys(gates, blocks, first[:, None], frequencies)
    logits = jnp.einsum("btkd,bknd->bktn", query, key) * size**-0.5
    before = positions[..., None] >= first[:, None] + settings.block
    counted = (jnp.sum(before, axis=-1) > 1) & (positions < lengths[:, None])
    target = block_weights(q, k, settings.block, before)
    before = before[:, None]
    found = jax.nn.log_softmax(jnp.where(before, logits, -1e30), axis=-1)
    wanted = jnp.log(jnp.maximum(target, 1e-30))
    loss = jnp.sum(jnp.where(before, target * (wanted - found), 0.0), axis=-1)
    return Measure(_mean(loss, counted), _mean(overlap(found, target, before), counted))


def block_weights(
    q: ChunkQueries, k: ChunkKV, block: int, before: Bool[Array, "B T n"]
) -> Float32[Array, "B K T n"]:
    """Returns the target: the highest weight in each block `before` a query, normalised."""
    batch, count, kv_heads, size = k.shape
    grouped = q.reshape(batch, count, kv_heads, -1, size)
    chunk = math.gcd(QUERIES, count)
    slots = jnp.arange(count, dtype=jnp.int32)

    def of_queries(start: Array) -> Float32[Array, "B K c n"]:
        some = jax.lax.dynamic_slice_in_dim(grouped, start, chunk, axis=1)
        logits = jnp.einsum("btkgh,bskh->bkgts", some, k, preferred_element_type=jnp.float32)
        seen = slots <= (start + jnp.arange(chunk, dtype=jnp.int32))[:, None]
        weights = jax.nn.softmax(jnp.where(seen, logits * size**-0.5, -jnp.inf), axis=-1)
        return jnp.max(weights.reshape(*weights.shape[:-1], -1, block), axis=(2, -1))

    parts = jax.lax.map(of_queries, jnp.arange(0, count, chunk, dtype=jnp.int32))
    highest = jnp.moveaxis(parts, 0, 2).reshape(batch, kv_heads, count, -1)
    highest = jnp.where(before[:, None], highest, 0.0)
    total = jnp.sum(highest, axis=-1, keepdims=True)
    return jax.lax.stop_gradient(highest / jnp.maximum(total, 1e-30))


def overlap(
    found: Float[Array, "B K T n"], target: Float[Array, "B K T n"], before: Bool[Array, "B 1 T n"]
) -> Float32[Array, "B K T"]:
    """Returns the share of the target's best quarter of blocks that the found scores rank best."""
    count = jnp.ceil(KEPT * jnp.sum(before, axis=-1)).astype(jnp.int32)
    count = jnp.broadcast_to(count, found.shape[:-1])
    ours, best = (
        top_k_mask(jnp.where(before, scores, -jnp.inf), count) for scores in (found, target)
    )
    return jnp.sum(ours & best, axis=-1) / jnp.maximum(jnp.sum(best, axis=-1), 1)


def _mean(x: Float32[Array, "B K T"], counted: Bool[Array, "B T"]) -> Float32[Array, ""]:
    """Returns the mean over heads and the counted queries."""
    total = jnp.sum(jnp.where(counted[:, None], x, 0.0)) / x.shape[1]
    return total / jnp.maximum(jnp.sum(counted), 1)
