"""Computes dense logits of whole texts, for checks and scoring."""

from functools import partial
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jsparse.machine import memory
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_in_one_process
from jsparse.models.transformer import Decoder, Weights, hidden_states, to_logits
from jsparse.runtime.chunk_attention import flash, has_flash
from jsparse.runtime.spread_programs import REPLICATED, by_rank
from jsparse.shapes import Tokens


@own_settings()
def logits(params: Params, tokens: Any) -> Float32[Array, "B T V"]:
    """Returns the model's logits after every token, with full causal attention and no cache.

    Args:
        params: the model that `jsparse.load` returned.
        tokens: integer ids [B, T], or one row [T]; all rows have the same length. In a jitted
            function they may be traced, and then must be in the vocabulary.

    Raises:
        ValueError: the ids have another shape or kind, are outside the vocabulary, or are longer
            than the model's maximum; or the model is spread over several processes.
    """
    require_in_one_process(params)
    traced = isinstance(tokens, jax_core.Tracer)
    try:
        ids: Any = tokens if traced else np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            f"tokens: must be integers [B, T], all rows of one length ({error})"
        ) from None
    ids = ids[None] if ids.ndim == 1 else ids
    config = params.config
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"tokens of shape {ids.shape} and type {ids.dtype}: must be integers [B, T], at least "
            "one"
        )
    if not traced and (ids.min() < 0 or ids.max() >= config.vocab_size):
        raise ValueError(
            f"tokens range from {ids.min()} to {ids.max()}: must be in 0 … {config.vocab_size - 1}"
        )
    if ids.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"tokens has {ids.shape[1]} per row: must be at most {config.max_position_embeddings}, "
            "the model's maximum"
        )
    _require_room(params, *ids.shape)
    run = by_rank(
        dense_pass, params.mesh, sharded=("weights",), static=("decoder",), out=REPLICATED
    )
    return run(params.decoder, params.weights, jnp.asarray(ids, jnp.int32))


def _require_room(params: Params, batch: int, length: int) -> None:
    config = params.config
    scores = 0 if has_flash(config.head_dim, params.dtype) else 2 * config.num_heads * length
    needed, free = 4 * batch * length * (config.vocab_size + scores), memory.available_bytes()
    if needed > free:
        raise ValueError(
            f"tokens of shape {(batch, length)} take {memory.size(needed)} of logits and scores: "
            f"must fit in the {memory.size(free)} that are free"
        )


@partial(jax.jit, static_argnames=("decoder",))
def dense_pass(decoder: Decoder, weights: Weights, tokens: Tokens) -> Float32[Array, "B T V"]:
    """Runs one dense pass; see `logits`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        window = decoder.config.window(layer, tokens.shape[1])
        return flash(q, k, v, causal=True, window=window)[0]

    return to_logits(decoder, weights, hidden_states(decoder, weights, tokens, positions, attend))
