"""Implements `api.rope_append` in plain jnp."""

from jaxtyping import Array, Int32

from jsparse.cache import LayerCache, as_held, finite, write
from jsparse.heads import Heads
from jsparse.shapes import ChunkKV, ChunkQueries, Rows


def rope_append(
    heads: Heads, layer: LayerCache, positions: Int32[Array, "B T"], valid: Rows
) -> tuple[ChunkQueries, ChunkKV, ChunkKV, LayerCache]:
    """Implements `api.rope_append` in plain jnp."""
    q, k, v = heads.rotated()
    k, v = finite(k), finite(v)
    layer = write(layer, k, v, positions, valid, layer.lengths - valid[:, None])
    return q, *as_held(layer, k, v), layer
