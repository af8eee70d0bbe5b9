"""Finds offline the channels of K that contribute most to the logits, to calibrate Double Sparsity.

As in the paper (arXiv:2408.07092, and its authors' code), a channel's weight is the mean of its
|q·k|, with each token's query and the same token's key, after RoPE. There are three differences. k
is in the frame of the model's key constants (jsparse.cache.key_constants), since the constant part
of a channel needs no search. The query heads of a KV head share its ranking, by their sum. The text
is the user's, prefilled in one piece with full attention (theirs is cut into blocks of 512 tokens).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jsparse.builder import builder, dense
from jsparse.cache import CacheSpec
from jsparse.cache.key_constants import (
    KEY_CONSTANTS,
    KeyFrame,
    frame_at,
    into_frame,
    scaled_queries,
)
from jsparse.hooks import PrefillView, State
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_on_one_device, require_params
from jsparse.policies.channel_ranking import Ranking
from jsparse.policy import Policy, at_layer
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.host_reader import OnChunk
from jsparse.runtime.session import Session
from jsparse.text import prompts


@own_settings()
def calibrate_channels(
    params: Params, prompt: Any, *, on_progress: OnChunk | None = None
) -> Ranking:
    """Ranks the channels of every KV head on a text.

    `channel_ranking.save` writes the ranking to a file for double_sparsity.

    Args:
        params: the model.
        prompt: the text, as for `generate`: text, token ids, or a list of these, each prefilled
            separately.
        on_progress: a callable that receives ("prefill", done, total), in tokens of each prompt.

    Raises:
        ValueError: a prompt is malformed, or leaves no room for one more token in the model's
            context, or in memory.
    """
    require_params(params)
    require_on_one_device(params)
    rows, _ = prompts.encode(params, prompt)
    spec = cache_spec(params, rows, 1, None, 16)._replace(batch=1)
    chunk, report = (
        chunk_attention.chunk_tokens(spec),
        on_progress or (lambda *_: None),
    )
    weights = np.zeros((spec.num_layers, spec.num_kv_heads, spec.head_dim))
    for ids in rows:
        policy = _weighed(max(chunk_attention.chunk_sizes(len(ids), chunk)))
        with capacity.exhaustion(spec):
            session = Session(params, policy, spec)
            session.prefill([ids], report)
        weights += np.concatenate(jax.device_get(session.prefilled.state))
    return np.argsort(-weights, axis=-1, kind="stable").astype(np.int32)


@builder
def _weighed(window: int) -> Policy:
    """Attends densely and sums the weight of every channel; no chunk exceeds `window`."""

    def init(spec: CacheSpec) -> State:
        shape = (spec.batch, spec.num_kv_heads, spec.head_dim)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in range(spec.num_layers))

    def take(state: State, layer: int, view: PrefillView) -> State:
        return at_layer(state, layer, state[layer] + _weights(view, frame_at(view.step, layer)))

    return dense()._replace(init=init, prefill=take, window=window, needs=KEY_CONSTANTS)


def chunk_queries(view: PrefillView) -> Float[Array, "B T N H"]:
    """Returns the queries of a chunk's tokens, for a policy whose window is a chunk or longer."""
    # the chunk's queries are the window's newest
    start = view.q_window.shape[1] - view.valid[:, None]
    at = start + jnp.arange(view.k.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(view.q_window, at[:, :, None, None], axis=1, mode="clip")


def _weights(view: PrefillView, frame: KeyFrame) -> Float32[Array, "B K H"]:
    """Sums |q·k| over a chunk's tokens and the queries of each group, channel by channel."""
    nth = jnp.arange(view.k.shape[1], dtype=jnp.int32)
    scaled = jax.vmap(partial(scaled_queries, frame=frame))(chunk_queries(view))
    grouped = scaled.reshape(*view.k.shape[:3], -1, scaled.shape[-1])
    heads = (view.k.shape[0], view.k.shape[2], view.k.shape[1])
    slots = jnp.broadcast_to(view.positions[:, None], heads)
    products = jnp.sum(jnp.abs(grouped), axis=3) * jnp.abs(
        into_frame(view.k.swapaxes(1, 2), frame, slots)
    ).swapaxes(1, 2)
    return jnp.sum(jnp.where((nth < view.valid[:, None])[:, :, None, None], products, 0.0), axis=1)
