"""Chooses blocks from where that takes less time than attending to all of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jsparse.builder import builder
from jsparse.hooks import ChunkView
from jsparse.policies.prefill_methods.xattention import xattention
from jsparse.policy import PrefillMethod

METHOD = xattention(threshold=0.9)
START = 8192  # a position


@builder
def auto() -> PrefillMethod:
    """Attends to everything before position 8,192, and from there on as `xattention` does.

    Before it, an engine's chunks are shorter than 8,192 tokens, and choosing takes longer than it
    saves.
    """
    return PrefillMethod(score, choose)


def score(view: ChunkView) -> Any:
    """Returns the scores of `xattention`, or zeros for a chunk that needs none."""
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(METHOD.score, view))
    needed = jnp.any(view.kv.lengths > START)
    return jax.lax.cond(needed, METHOD.score, lambda _: none, view)


def choose(scores: Any, view: ChunkView) -> Bool[Array, "B N QB KB"]:
    """Chooses all blocks for the queries before `START`."""
    early = (view.starts < START)[:, None, :, None]
    return METHOD.choose(scores, view) | early
