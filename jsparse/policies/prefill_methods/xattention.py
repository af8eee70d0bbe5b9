"""XAttention attends to the fewest blocks that hold a share of attention, which few sums estimate.

Paper: "XAttention: Block Sparse Attention with Antidiagonal Scoring" (Xu et al.), arXiv:2503.16428.
Every query of a block and every key is in one sum, at 1/stride of the products of QKᵀ. As in the
authors' code, the first block and the query block's own count first.

Where we differ: a chunk that starts between multiples of the stride has tiles of its own.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.builder import builder
from jsparse.hooks import ChunkView
from jsparse.hyper_parameters import number_in, one_of
from jsparse.pallas_kernels.threshold_select import TopP, threshold_select
from jsparse.policies.prefill_methods.masses import antidiagonal_masses
from jsparse.policy import PrefillMethod


@builder
def xattention(threshold: float = 0.9, stride: int = 16) -> PrefillMethod:
    """Attends to the fewest blocks whose estimated attention reaches a share of the whole.

    Args:
        threshold: the share of each query block's attention, per query head; 1: everything.
        stride: the number of queries, and of keys, per sum: 4, 8, 16 or 32.
    """
    number_in("threshold", threshold, "(0, 1]")
    one_of("stride", stride, (4, 8, 16, 32))
    return PrefillMethod(partial(antidiagonal_masses, stride=stride), partial(choose, threshold))


def choose(
    threshold: float, scores: Float32[Array, "B N QB KB"], view: ChunkView
) -> Bool[Array, "B N QB KB"]:
    """Chooses the first block, the query block's own, and the fewest others; ties go to the first.

    Blocks have the query block's attention together: `threshold` of it is enough.
    """
    if threshold == 1:
        return jnp.ones(scores.shape, jnp.bool_)
    always = view.own | (jnp.arange(scores.shape[-1]) == 0)
    held = jnp.sum(scores, -1, where=always)
    others = jnp.where(always, 0.0, scores)
    rest = jnp.sum(others, -1)
    missing = threshold * (held + rest) - held
    share = jnp.clip(missing / jnp.where(rest > 0, rest, 1.0), 0.0, 1.0)
    return always | ((missing > 0)[..., None] & heaviest(others, share))


def heaviest(
    weights: Float32[Array, "B N QB KB"], share: Float32[Array, "B N QB"]
) -> Bool[Array, "B N QB KB"]:
    """Marks the fewest blocks with a share of a row's weight."""
    batch, blocks = weights.shape[0], weights.shape[-1]
    found = threshold_select(
        weights.reshape(batch, -1, 1, blocks),
        TopP(share.reshape(batch, -1)),
        capacity=blocks,
        weights="raw",
    )
    listed = jnp.arange(blocks) < found.count[..., None]
    at = jnp.where(listed, found.ids, blocks).reshape(-1, blocks)
    nth = jnp.arange(len(at))[:, None]
    return jnp.zeros(at.shape, bool).at[nth, at].set(True, mode="drop").reshape(weights.shape)
