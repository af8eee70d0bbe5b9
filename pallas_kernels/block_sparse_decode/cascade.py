"""Reads the pages of a shared prefix once for all rows that share it.

Attention over the prefix and over the rest of each row are two partials, merged by their lse. For
the prefix, the queries of all its rows become those of a single row (Hydragen, Juravsky et al.,
arXiv 2402.05099, section 3).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache, SharedPrefixes
from jsparse.selection import Selection, everything
from jsparse.selection.partials import AttentionOut, merge


def cascade(
    attend: Callable[..., AttentionOut],
    q: Float[Array, "B N H"],
    layer: LayerCache,
    prefixes: SharedPrefixes,
    selection: Selection,
    dtype: DTypeLike,
) -> AttentionOut:
    """Attends in dense or empty heads of rows with shared prefixes.

    Args:
        attend: `block_sparse_decode` for queries, a layer without prefixes, and a selection.
        q: the queries, after RoPE.
        layer: K and V, with a block table.
        prefixes: the shared prefixes and the rows of each.
        selection: the dense heads; it lists no pages.
        dtype: the dtype of o.
    """
    assert layer.block_table is not None
    assert selection.dense is not None
    batch, kv_heads = layer.lengths.shape
    seats, families = prefixes.rows.size, len(prefixes.rows)
    group = q.shape[1] // kv_heads
    own = layer._replace(prefixes=None)

    # all rows that share a prefix have its pages in their tables: use the first row's
    tables = layer.block_table.at[prefixes.rows[:, 0]].get(mode="clip")
    held = jnp.broadcast_to(prefixes.tokens[:, None], (families, kv_heads))
    common = own._replace(lengths=held, block_table=tables)
    grouped = q.reshape(batch, kv_heads, group, -1)
    seated = grouped.at[prefixes.rows].get(mode="fill", fill_value=0)  # [families, n, K, G, H]
    shared = attend(
        seated.swapaxes(1, 2).reshape(families, -1, q.shape[-1]),
        common,
        everything(held),
        dtype=jnp.float32,
    )

    def by_row(x: Float32[Array, "families heads *H"], empty: float) -> Float32[Array, "B N *H"]:
        apart = x.reshape(families, kv_heads, -1, group, *x.shape[2:]).swapaxes(1, 2)
        apart = apart.reshape(seats, q.shape[1], *x.shape[2:])
        return apart.at[seat].get(mode="fill", fill_value=empty)

    nth = jnp.arange(seats, dtype=jnp.int32)
    seat = jnp.full(batch, seats, jnp.int32).at[prefixes.rows.reshape(-1)].set(nth, mode="drop")
    attends = selection.dense & (layer.lengths > 0)
    attends = jnp.repeat(attends, group, axis=1, total_repeat_length=q.shape[1])
    lse = jnp.where(attends, by_row(shared.lse, -jnp.inf), -jnp.inf)

    before = prefixes.tokens.at[seat // prefixes.rows.shape[1]].get(mode="fill", fill_value=0)
    rest = own._replace(
        lengths=jnp.maximum(layer.lengths - before[:, None], 0),
        block_table=_shifted(layer.block_table, before // layer.page_size),
    )
    behind = attend(q, rest, selection, dtype=jnp.float32)
    o, lse = merge(by_row(shared.o, 0.0), lse, behind.o, behind.lse)
    return AttentionOut(o.astype(dtype), lse)


def lists_nothing(selection: Selection) -> bool:
    """Returns whether every head is dense or empty."""
    return selection.dense is not None and selection.ids.shape[-1] == 0


def _shifted(table: Int32[Array, "B K M"], pages: Int32[Array, "B"]) -> Int32[Array, "B K M"]:
    """Returns the tables without each row's first `pages` pages."""
    at = jnp.minimum(lax.iota(jnp.int32, table.shape[2]) + pages[:, None], table.shape[2] - 1)
    return jnp.take_along_axis(table, at[:, None], axis=2)
