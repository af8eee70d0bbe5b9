"""StreamingLLM's pattern for prompts: the first tokens, and those before each query.

Papers: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.), arXiv:2309.17453;
MInference (arXiv:2407.02490) calls the pattern A-shape.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jsparse.builder import builder
from jsparse.hooks import ChunkView
from jsparse.hyper_parameters import whole_number
from jsparse.policy import PrefillMethod


@builder
def streaming(sink: int = 128, recent: int = 4096) -> PrefillMethod:
    """Attends to the first `sink` tokens and to at least the last `recent`, in blocks of 128.

    Args:
        sink: the first tokens of a row, rounded up to whole blocks.
        recent: the newest tokens of each query, its own included, rounded up to whole blocks.
    """
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 1)
    return PrefillMethod(nothing, partial(choose, sink, recent))


def nothing(view: ChunkView) -> tuple[()]:
    """Returns no scores, since positions decide alone."""
    return ()


def choose(sink: int, recent: int, scores: tuple[()], view: ChunkView) -> Bool[Array, "B N QB KB"]:
    """Chooses the same blocks in all heads."""
    shape = (*view.q.shape[:1], view.q.shape[2], *view.num_blocks)
    return jnp.broadcast_to(sink_and_recent(sink, recent, view), shape)


def sink_and_recent(sink: int, recent: int, view: ChunkView) -> Bool[Array, "B 1 QB KB"]:
    """Marks the blocks of the first `sink` tokens, and of the last `recent` of every query."""
    start = view.starts
    newest = view.holding(jnp.maximum(start - recent + 1, 0), start)
    first = view.holding(0 * start, 0 * start + sink - 1)
    return newest | first
