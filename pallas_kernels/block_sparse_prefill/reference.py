"""Implements `api.block_sparse_prefill` in plain jnp: the CPU path and the kernel's oracle.

Scores exist for one block of queries and one segment of keys at a time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_prefill.segments import BLOCK, segment
from jsparse.selection.partials import merge, softmax_partial

# Blocks of keys per segment: longer ones save steps, and take more memory for scores.
SEGMENT = 8


def block_sparse_prefill(
    q: Float[Array, "B T N H"],
    kv: LayerCache,
    valid: Int32[Array, "B"],
    chosen: Bool[Array, "B N QB KB"] | None = None,
) -> Float[Array, "B T N H"]:
    """Implements `api.block_sparse_prefill` in plain jnp."""
    batch, tokens, heads, head_dim = q.shape
    query_blocks, key_blocks = -(-tokens // BLOCK), -(-kv.capacity // BLOCK)
    if chosen is None:
        chosen = jnp.ones((batch, heads, query_blocks, key_blocks), jnp.bool_)
    size = min(SEGMENT, key_blocks)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, -key_blocks % size)))
    first = kv.lengths[:, 0] - valid
    grouped = (batch, kv.lengths.shape[1], -1)

    def of_block(
        nth_and_part: tuple[Array, Float[Array, "B t N H"], Bool[Array, "B N KB"]],
    ) -> Float32[Array, "B K G t H"]:
        nth, part, listed = nth_and_part
        queries = part.swapaxes(1, 2).reshape(*grouped, BLOCK, head_dim)
        positions = first[:, None] + nth * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        positions = jnp.minimum(positions, kv.lengths[:, :1] - 1)  # padding reads no unused slot

        def step(
            at: Array, so_far: tuple[Float32[Array, "B K G t H"], Float32[Array, "B K G t"]]
        ) -> tuple[Float32[Array, "B K G t H"], Float32[Array, "B K G t"]]:
            k, v = (segment(pool, kv, at * size, size) for pool in (kv.k, kv.v))
            here = jax.lax.dynamic_slice_in_dim(listed, at * size, size, axis=2)
            here = jnp.repeat(here, BLOCK, axis=2).reshape(*grouped, 1, size * BLOCK)
            slots = at * size * BLOCK + jnp.arange(size * BLOCK, dtype=jnp.int32)
            seen = here & (slots <= positions[..., None])[:, None, None]
            logits = jnp.einsum("bkgth,bksh->bkgts", queries, k, preferred_element_type=jnp.float32)
            logits = jnp.where(seen, head_dim**-0.5 * logits, -jnp.inf)
            weights, total, lse = softmax_partial(logits)
            weights /= jnp.where(total > 0, total, 1.0)[..., None]
            o = jnp.einsum("bkgts,bksh->bkgth", weights, v.astype(jnp.float32))
            return merge(*so_far, o, lse)

        none = jnp.zeros(queries.shape, jnp.float32), jnp.full(queries.shape[:-1], -jnp.inf)
        newest = jnp.minimum(jnp.max(positions) + 1, jnp.max(kv.lengths))
        segments = (newest + size * BLOCK - 1) // (size * BLOCK)
        return jax.lax.fori_loop(0, segments, step, none)[0]

    padded = jnp.pad(q, ((0, 0), (0, query_blocks * BLOCK - tokens), (0, 0), (0, 0)))
    parts = padded.reshape(batch, query_blocks, BLOCK, heads, head_dim).swapaxes(0, 1)
    nth = jnp.arange(query_blocks, dtype=jnp.int32)
    o = jax.lax.map(of_block, (nth, parts, jnp.moveaxis(chosen, 2, 0)))
    o = o.reshape(query_blocks, batch, heads, BLOCK, head_dim).transpose(1, 0, 3, 2, 4)
    return o.reshape(padded.shape)[:, :tokens].astype(q.dtype)
