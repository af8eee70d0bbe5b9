"""Attends from a prompt chunk to all of its row, or to chosen blocks of 128 keys."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jsparse.cache import LayerCache, PagePool
from jsparse.pallas_kernels.block_sparse_prefill import reference
from jsparse.pallas_kernels.block_sparse_prefill.segments import BLOCK
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_mosaic, run
from jsparse.shapes import ChunkQueries


def _mosaic():
    from jsparse.pallas_kernels.block_sparse_prefill import mosaic

    return mosaic.block_sparse_prefill


def not_mosaic(q: ChunkQueries, kv: LayerCache, *_: Any) -> str | None:
    """Returns why the kernel cannot attend from these queries to this cache here, or None."""
    if isinstance(kv.k, PagePool):
        return "takes K and V of the model's type on the device"
    if q.dtype != kv.k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, not {q.dtype} and {kv.k.dtype}"
    if q.shape[-1] not in (64, 128):
        return f"takes head dimensions 64 and 128, not {q.shape[-1]}"
    if kv.page_size not in (8, 16, 32, 64, 128):
        return f"takes pages of 8, 16, 32, 64 or 128 tokens, not {kv.page_size}"
    if kv.bias is not None:
        return "takes slots without a bias"
    return no_mosaic()


BACKENDS = (
    Backend("mosaic", _mosaic, not_mosaic),
    Backend("reference", lambda: reference.block_sparse_prefill),
)


@checked()
def block_sparse_prefill(
    q: Float[Array, "B T N H"],
    kv: LayerCache,
    valid: Int32[Array, "B"],
    chosen: Bool[Array, "B N QB KB"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attends causally from a chunk that the cache already holds, to the chosen blocks of its row.

    Query block i has the tokens 128·i … 128·i + 127 of the chunk, wherever the chunk starts; key
    block j has the positions 128·j … 128·j + 127. A query attends to the keys of chosen blocks at
    or before its own position. One without such a key gives 0.

    Args:
        q: the newest `valid[b]` tokens' queries, after RoPE, padded to T; the factor of q·k is
            1/√H. Results of padding are finite.
        kv: the K and V pages, lengths and block table; all heads of a row hold the same tokens.
        valid: the number of tokens of each row, which the lengths include.
        chosen: the key blocks of each query block, by query head: QB = ⌈T / 128⌉, and
            KB = ⌈capacity / 128⌉. None: all.
        implementation: "mosaic" (Hopper, 16-bit types), "reference", or None to choose.

    Raises:
        ValueError: shapes differ, or the named implementation cannot run here.
    """
    blocks = -(-q.shape[1] // BLOCK), -(-kv.capacity // BLOCK)
    if chosen is not None and chosen.shape[2:] != blocks:
        raise ValueError(
            f"chosen.shape={chosen.shape}: must end in {blocks}, the blocks of {BLOCK} queries and "
            f"of {BLOCK} keys"
        )
    return run("block_sparse_prefill", implementation, BACKENDS, q, kv, valid, chosen)
