"""Attention over K and V in host memory, with only the newest tokens on the device.

An op that can read host memory does so in place. Otherwise the rows or pages that the selection
lists are first gathered into consecutive pages on the device, and the op attends to those; the
result is the same. Dense heads always read in place.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.cache import LayerCache
from jsparse.host_memory.pool import HostPool, with_pools
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.policy import Offload
from jsparse.selection import Selection, everything
from jsparse.selection.partials import AttentionOut, ListedLogits, StatsKind
from jsparse.shapes import Ids, Lengths, Queries


def attention(
    op: Callable[..., AttentionOut], offload: Offload | None
) -> Callable[..., AttentionOut]:
    """Returns an attention op like `op` that also accepts layers with K and V in host memory."""
    return partial(attend, op, reads=None if offload is None else offload.reads)


def attend(
    op: Callable[..., AttentionOut],
    q: Queries,
    layer: LayerCache,
    selection: Selection,
    *,
    stats: StatsKind | None,
    dtype,
    reads: str | None = None,
) -> AttentionOut:
    """Attends as `op` does; `reads` is that of `Offload`."""
    options = {"stats": stats, "dtype": dtype}
    if not layer.on_host or _way(reads, selection) == "in_place":
        return op(q, layer, selection, **options)
    pages, listed, ids = compacted(layer, _sparse(selection))
    out = op(q, pages, listed, **options)
    if isinstance(out.stats, ListedLogits):
        out = out._replace(stats=_named(out.stats, ids))
    if selection.dense is None:
        return out
    return _with_dense_heads(out, q, layer, selection.dense, dtype)


def _way(reads: str | None, selection: Selection) -> str:
    """Returns how a selection is read: by default, tokens in place.

    A GPU must fetch pages; the reference ops of other backends also read these in place.
    """
    fetches = jax.default_backend() == "gpu" and selection.granularity == "page"
    if fetches and reads == "in_place":
        raise ValueError(
            "reads='in_place': must be None or 'gather' for a policy that selects pages, which a "
            "GPU does not read in host memory"
        )
    return reads or ("gather" if fetches else "in_place")


def _sparse(selection: Selection) -> Selection:
    """Returns a selection whose dense heads list nothing and are not dense."""
    if selection.dense is None:
        return selection
    return replace(selection, count=jnp.where(selection.dense, 0, selection.count), dense=None)


def compacted(
    layer: LayerCache, selection: Selection
) -> tuple[LayerCache, Selection, Int32[Array, "B K entries"]]:
    """Returns the rows that a selection lists as a separate layer.

    Its pages and slots are numbered in the order of the list. The third result is their numbers in
    the whole layer.
    """
    ids, number = _with_newest(layer, selection)
    size = layer.page_size if selection.granularity == "page" else 1
    capacity = ids.shape[-1]
    nth = jnp.broadcast_to(jnp.arange(capacity - 1, dtype=jnp.int32), selection.ids.shape)
    newest = (layer.lengths[..., None] - 1) // size
    valid = (nth < selection.count[..., None]) & (selection.ids <= newest)
    # a list without a valid entry still means the newest token
    count = jnp.maximum(jnp.sum(valid, -1, dtype=jnp.int32), jnp.minimum(selection.count, 1))
    bits = None if selection.bits is None else jnp.where(valid, selection.bits, jnp.uint32(0))
    # the newest token is the last one listed, and all entries before it are full
    lengths = jnp.where(layer.lengths > 0, (number - 1) * size + (layer.lengths - 1) % size + 1, 0)
    place = _place(layer, selection, ids)

    def fetched(pool: HostPool) -> Array:
        rows = pool.with_ring(layer, *place, pool.fetched(layer, *place, number))
        pad = -capacity % layer.page_size if size == 1 else 0
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pad), *((0, 0),) * (rows.ndim - 3)))
        return rows.reshape(-1, *pool.shape[1:])

    compact = with_pools(fetched, layer)._replace(lengths=lengths, block_table=None)
    return compact, replace(selection, ids=jnp.where(valid, nth, 0), count=count, bits=bits), ids


def _with_newest(layer: LayerCache, selection: Selection) -> tuple[Ids, Lengths]:
    """Returns the listed ids, with the newest token's appended if missing, and their number.

    Ids past the head's length, which may end a list, are excluded from the number.
    """
    size = layer.page_size if selection.granularity == "page" else 1
    newest = (layer.lengths - 1) // size
    nth = jnp.arange(selection.ids.shape[-1] + 1, dtype=jnp.int32)
    ids = jnp.pad(selection.ids, ((0, 0), (0, 0), (0, 1)))
    older = (nth < selection.count[..., None]) & (ids < newest[..., None])
    number = jnp.sum(older, -1, dtype=jnp.int32)
    ids = jnp.where(older, ids, jnp.where(nth == number[..., None], newest[..., None], 0))
    return ids, number + 1


def _place(layer: LayerCache, selection: Selection, ids: Ids) -> tuple[Array, Array | None]:
    """Returns the pages of listed ids, and the offsets within them if ids are tokens."""
    return jnp.divmod(ids, layer.page_size) if selection.granularity == "token" else (ids, None)


def _named(report: ListedLogits, ids: Ids) -> ListedLogits:
    """Returns a report with ids of the whole layer in place of compacted slots."""
    nth = jnp.arange(report.ids.shape[-1], dtype=jnp.int32)
    valid = nth < report.count[..., None]
    return report._replace(ids=jnp.where(valid, ids, 0))


def _with_dense_heads(
    out: AttentionOut, q: Queries, layer: LayerCache, dense: Bool[Array, "B K"], dtype
) -> AttentionOut:
    """Returns attention to everything for the dense heads, and `out` for the others."""
    every = replace(everything(layer.lengths), dense=dense, granularity="token")
    whole = token_sparse_decode(q, layer, every, stats=None, dtype=dtype)
    heads = jnp.repeat(dense, q.shape[1] // dense.shape[1], axis=1)
    stats = out.stats
    if isinstance(stats, ListedLogits):
        count = jnp.where(dense, 0, stats.count)
        gone = dense[..., None]
        stats = ListedLogits(
            jnp.where(gone, 0, stats.ids),
            count,
            jnp.where(gone[..., None], -jnp.inf, stats.logits),
            jnp.where(gone, -jnp.inf, stats.lse),
        )
    return AttentionOut(
        jnp.where(heads[..., None], whole.o, out.o), jnp.where(heads, whole.lse, out.lse), stats
    )
