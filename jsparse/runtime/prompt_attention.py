"""Attention of prompt chunks, dense or to the blocks that a prefill method chooses."""

from jsparse.cache import LayerCache
from jsparse.hooks import ChunkView
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill, not_mosaic
from jsparse.policy import PrefillMethod
from jsparse.runtime.chunk_attention import attend_chunk
from jsparse.shapes import ChunkKV, ChunkQueries, Rows


def attend_prompt(
    method: PrefillMethod | None,
    q: ChunkQueries,
    k: ChunkKV,
    v: ChunkKV,
    kv: LayerCache,
    valid: Rows,
    window: int | None = None,
) -> ChunkQueries:
    """Attends as `attend_chunk` does, from a chunk whose k and v the cache holds.

    With a method and no window, only to the query's own block and to those that the method chooses.

    Raises:
        ValueError: the method does not return a mask of all blocks.
    """
    if window is not None:
        return attend_chunk(q, k, v, kv, valid, window)
    if method is None:
        if not_mosaic(q, kv) is None:
            return block_sparse_prefill(q, kv, valid)
        return attend_chunk(q, k, v, kv, valid)
    view = ChunkView(q, kv, valid)
    chosen = method.choose(method.score(view), view)
    shape = (q.shape[0], q.shape[2], *view.num_blocks)
    if getattr(chosen, "shape", None) != shape or chosen.dtype != bool:
        raise ValueError(f"choose of {method} must return a mask of {shape}, not {chosen}")
    return block_sparse_prefill(q, kv, valid, chosen | view.own)
