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
from jsparse.policies.prefill_methods.masses import antidiagonal_masses
from jsparse.policy import PrefillMethod
from jsparse.selection.threshold import top_p_mask


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
    share = missing / jnp.where(rest > 0, rest, 1.0)
    return always | ((missing > 0)[..., None] & top_p_mask(others, share))
