"""Estimates the attention mass of key blocks from a few combinations of queries and keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse.hooks import ChunkView
from jsparse.pallas_kernels.block_sparse_prefill.segments import (
    BLOCK,
    blocks_per_segment,
    num_segments,
    segment,
)


def antidiagonal_masses(view: ChunkView, stride: int) -> Float32[Array, "B N QB KB"]:
    """Returns the sums of strided attention in each block, whose rows have a sum of 1.

    A tile has `stride` queries and as many keys. Its logit is the mean of q·k/√H along its
    antidiagonal; a softmax over the tiles of a row of tiles gives their weights, and a block has
    the sum of its tiles' weights. Tiles are those of positions if the chunk starts at a multiple of
    the stride; those that begin after their queries' first position have weight 0, and missing
    tokens count as zero vectors. Logits have the queries' dtype.
    """
    q, kv, valid = view
    batch, tokens, heads, head_dim = q.shape
    kv_heads, (query_blocks, key_blocks) = kv.lengths.shape[1], view.num_blocks
    padded = jnp.pad(q, ((0, 0), (0, query_blocks * BLOCK - tokens), (0, 0), (0, 0)))
    nth = jnp.arange(padded.shape[1], dtype=jnp.int32)
    padded = jnp.where((nth < valid[:, None])[..., None, None], padded, 0)
    # the first query of a tile meets its last key
    tiles = padded.reshape(batch, -1, stride, kv_heads, heads // kv_heads, head_dim)[:, :, ::-1]
    tiles = tiles.transpose(0, 3, 4, 1, 2, 5).reshape(
        *tiles.shape[:1], kv_heads, -1, nth.size // stride, stride * head_dim
    )
    starts = view.first[:, None] + nth[::stride]
    per_block = BLOCK // stride
    size = blocks_per_segment(tiles.size // (stride * head_dim) * per_block, key_blocks)

    def step(at: Array, found: Array) -> Array:
        keys = segment(kv.k, kv, at * size, size)
        slots = at * size * BLOCK + jnp.arange(size * BLOCK, dtype=jnp.int32)
        keys = jnp.where((slots < kv.lengths[..., None])[..., None], keys, 0)
        columns = keys.reshape(batch, kv_heads, size * per_block, stride * head_dim)
        logits = jnp.einsum("bkgrd,bkcd->bkgrc", tiles, columns).astype(jnp.float32)
        begun = (slots[::stride] <= starts[..., None])[:, None, None]
        logits = jnp.where(begun, logits / (stride * head_dim**0.5), -jnp.inf)
        by_block = logits.reshape(*logits.shape[:-1], size, per_block)
        mass = jax.nn.logsumexp(by_block, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(found, mass, at * size, axis=4)

    columns = -(-key_blocks // size) * size
    none = jnp.full((*tiles.shape[:-1], columns), -jnp.inf, jnp.float32)
    found = jax.lax.fori_loop(0, num_segments(kv, size), step, none)[..., :key_blocks]
    weights = jax.nn.softmax(found, axis=-1)
    weights = jnp.where((nth[::stride] < valid[:, None])[:, None, None, :, None], weights, 0)
    return weights.reshape(batch, heads, query_blocks, per_block, key_blocks).sum(3)
