"""Finds a model's retrieval heads without training, as RazorAttention does.

The model reads n random tokens four times. Random tokens have no meaning, so a head that finds an
earlier occurrence of a token can only have matched the token itself. A query's *echo* weight is its
attention to the earlier occurrences of its own token, and its *induction* weight that to the tokens
after them, one of which comes next. A head's scores are the means of both over the last three
repetitions; a KV head has the best scores of its query heads.

Paper: "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (Tang et al.),
arXiv:2407.15891, section 3.2. The sum over all earlier occurrences and the maximum over a group are
those of the authors' published code (MindSpore Golden Stick); the paper names neither. Where we
differ: the random tokens are distinct, so that every other occurrence is a repetition.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

import jsparse
from jsparse.builder import builder, dense
from jsparse.cache import CacheSpec, read_heads
from jsparse.evaluation.channel_calibration import chunk_queries
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import flag, number_in, whole_number
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import (
    Params,
    require_full_attention,
    require_on_one_device,
    require_params,
)
from jsparse.policies.head_gates import HeadGates
from jsparse.policies.lfps_variants import scaled_products
from jsparse.policy import Policy, at_layer
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.host_reader import OnChunk
from jsparse.runtime.session import Session

TOKENS, REPEATS = 2500, 4
# queries whose weights exist at a time: for 32 heads and 10,000 keys, 41 MB
BLOCK = 32


class HeadScores(NamedTuple):
    """The mean attention of each KV head to earlier occurrences, and to the tokens after them."""

    echo: Float32[np.ndarray, "L K"]
    induction: Float32[np.ndarray, "L K"]


@own_settings()
def calibrate_heads(
    params: Params,
    *,
    tokens: int | None = None,
    induction: float = 0.14,
    echo: float = 0.01,
    first_layer: bool = False,
    seed: int = 0,
    on_progress: OnChunk | None = None,
) -> HeadGates:
    """Marks the KV heads with the best induction scores and those with the best echo scores.

    `jsparse.policies.head_gates.save` writes the result to a file for `razor_attention`,
    `duo_attention` and `retrieval_heads`, and with `first_layer` for `lychee_decode`. A head's
    score is the larger of its two, each divided by the least chosen one: retrieval heads have at
    least 1. The record has both.

    Args:
        params: the model.
        tokens: n, the number of random tokens, each read four times; None: 2500, or the maximum
            that the model's context allows.
        induction: the share of all KV heads to choose by induction score.
        echo: the share to choose by echo score.
        first_layer: whether to mark all heads of layer 0 too, which `lychee_decode` requires.
        seed: the seed of the random tokens.
        on_progress: a callable that receives ("prefill", done, total), in tokens.

    Raises:
        ValueError: an argument is out of range, the model has sliding windows, or four repetitions
            do not fit in its context or in memory.
    """
    require_params(params)
    require_on_one_device(params)
    require_full_attention(params)
    config = params.config
    most = min((config.max_position_embeddings - 1) // REPEATS, config.vocab_size)
    tokens = min(TOKENS, most) if tokens is None else tokens
    whole_number("tokens", tokens, 2)
    if tokens > most:
        raise ValueError(
            f"tokens={tokens}: must be at most {most}, since {REPEATS} repetitions must fit in the "
            "model's context, and tokens differ"
        )
    for name, share in (("induction", induction), ("echo", echo)):
        number_in(name, share, "[0, 1]")
    flag("first_layer", first_layer)
    whole_number("seed", seed, 0)
    ids = np.random.default_rng(seed).choice(config.vocab_size, tokens, replace=False)
    found = head_scores(params, np.tile(ids, REPEATS).tolist(), tokens, on_progress)
    scores = np.maximum(_over_least(found.induction, induction), _over_least(found.echo, echo))
    retrieval = scores >= 1
    retrieval[0] |= first_layer
    settings = {"tokens": tokens, "induction": induction, "echo": echo, "seed": seed}
    record = {
        "model": params.name,
        "dtype": str(np.dtype(params.dtype)),
        "settings": settings | {"first_layer": first_layer},
        "scores": {name: x.tolist() for name, x in found._asdict().items()},
        "versions": {"jax": jax.__version__, "jsparse": jsparse.__version__},
    }
    return HeadGates(retrieval, scores, record)


def _over_least(scores: Float32[np.ndarray, "L K"], share: float) -> Float32[np.ndarray, "L K"]:
    """Divides scores by the least of the best `share` of them; 0 if these are none."""
    count = round(share * scores.size)
    if not count:
        return np.zeros_like(scores)
    least = np.sort(scores, axis=None)[-count]
    return scores / np.maximum(least, np.finfo(np.float32).tiny)


def head_scores(
    params: Params, ids: list[int], period: int, on_progress: OnChunk | None = None
) -> HeadScores:
    """Returns the scores on a text whose tokens repeat every `period` tokens.

    Queries of the first period do not count.
    """
    spec = cache_spec(params, [ids], 1, None, 16)
    chunks = chunk_attention.chunk_sizes(len(ids), chunk_attention.chunk_tokens(spec))
    with capacity.exhaustion(spec):
        session = Session(params, _scored(max(chunks), period), spec)
        session.prefill([ids], on_progress or (lambda *_: None))
    total = np.stack(jax.device_get(session.prefilled.state))[:, 0]  # [L, 2, N]
    mean = total.reshape(*total.shape[:2], spec.num_kv_heads, -1) / (len(ids) - period)
    return HeadScores(*np.moveaxis(mean.max(axis=-1), 1, 0))


@builder
def _scored(window: int, period: int) -> Policy:
    """Attends densely and sums the weights of every query head; no chunk exceeds `window`."""

    def init(spec: CacheSpec) -> State:
        shape = (spec.batch, 2, spec.num_heads)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in range(spec.num_layers))

    def take(state: State, layer: int, view: PrefillView) -> State:
        return at_layer(state, layer, state[layer] + _weights(view, layer, period))

    return dense()._replace(init=init, prefill=take, window=window)


def _weights(view: PrefillView, layer: int, period: int) -> Float32[Array, "B 2 N"]:
    """Sums the echo and the induction weights of a chunk's queries after the first period."""
    kv, queries = view.step.layers[layer], chunk_queries(view)
    batch, size, heads, head_dim = queries.shape
    keys, slots = read_heads(kv.k, kv), jnp.arange(kv.capacity, dtype=jnp.int32)
    counted = jnp.arange(size, dtype=jnp.int32) < view.valid[:, None]
    counted &= view.positions >= period

    def of_block(block: tuple[Array, Array, Array]) -> Float32[Array, "B 2 N"]:
        q, at, counted = block
        grouped = q.reshape(batch, -1, kv.lengths.shape[1], heads // kv.lengths.shape[1], head_dim)
        logits = scaled_products("btkgh,bksh->btkgs", grouped, keys)
        behind = (at[..., None] - slots)[:, :, None, None]  # tokens from each slot to the query
        weights = jax.nn.softmax(jnp.where(behind >= 0, logits, -jnp.inf), axis=-1)
        weights = jnp.where(counted[:, :, None, None, None], weights, 0.0)
        echo = (behind % period == 0) & (behind > 0)
        induction = (behind % period == period - 1) & (slots > 0)  # slot 0 follows no token
        sums = [jnp.sum(jnp.where(which, weights, 0.0), (1, 4)) for which in (echo, induction)]
        return jnp.stack([x.reshape(batch, heads) for x in sums], axis=1)

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(batch, -1, min(BLOCK, size), *x.shape[2:]), 1, 0)

    return jnp.sum(jax.lax.map(of_block, tuple(map(blocks, (queries, view.positions, counted)))), 0)
