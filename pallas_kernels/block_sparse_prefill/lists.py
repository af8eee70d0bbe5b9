"""Lists the chosen blocks of every unit of work: 128 queries of one head, in launch order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.pallas_kernels.block_sparse_prefill.problem import BLOCK
from jsparse.pallas_kernels.threshold_select import Threshold, threshold_select
from jsparse.shapes import Rows


class Unit(NamedTuple):
    """A unit of work, or an array of each field for several."""

    row: Any
    head: Any
    token: Any  # its first token in the chunk
    first: Any  # the position of that token
    blocks: Any  # the number of blocks to multiply: a unit that lists none masks all of block 0
    newest: Any  # the position of the row's newest token; -1 if the unit lists no block


class Lists(NamedTuple):
    """The work of a launch, in the order in which units start.

    Attributes:
        units: the fields of each `Unit`.
        ids: the numbers of its blocks, ascending, then any numbers.
    """

    units: Int32[Array, "units fields"]
    ids: Int32[Array, "units KB"]


def lists(
    chosen: Bool[Array, "B N QB KB"] | None,
    lengths: Rows,
    valid: Rows,
    heads: int,
    query_blocks: int,
    key_blocks: int,
) -> Lists:
    """Lists the chosen blocks that start at or before the last token of their unit; None: all.

    The heads with most blocks start first, so that the last units to end are short, and each
    head's latest queries, which have the longest lists if all blocks are chosen. A head's units
    start together, because they find blocks that others have read in the L2 cache.
    """
    rows = len(lengths)
    token = jnp.arange(query_blocks, dtype=jnp.int32)[::-1] * BLOCK
    before = lengths - valid
    end = before[:, None] + jnp.minimum(token + BLOCK, valid[:, None])
    reached = jnp.where(token < valid[:, None], (end + BLOCK - 1) // BLOCK, 0)
    if chosen is None:  # the heads of a row are equal
        # read as lists of chosen blocks are: the kernel is faster than if it counted itself
        every = jnp.arange(key_blocks, dtype=jnp.int32)
        ids = jnp.broadcast_to(every, (rows * heads * query_blocks, key_blocks))
        nth = jnp.arange(heads, dtype=jnp.int32)
        pairs = (_longest_first(reached)[:, None] * heads + nth).reshape(-1)
        count = jnp.repeat(reached, heads, axis=0)[pairs].reshape(-1)
    else:
        seen = jnp.arange(key_blocks) < reached[..., None]
        listed = (chosen[:, :, ::-1] & seen[:, None]).reshape(rows * heads, query_blocks, -1)
        pairs = _longest_first(jnp.sum(listed, axis=2, dtype=jnp.int32))
        listed = listed[pairs].reshape(len(pairs) * query_blocks, -1)
        ids, count = _ids(listed), jnp.sum(listed, axis=1, dtype=jnp.int32)
    pair, token = jnp.repeat(pairs, query_blocks), jnp.tile(token, len(pairs))
    row = pair // heads
    unit = Unit(
        row=row,
        head=pair % heads,
        token=token,
        first=before[row] + token,
        blocks=jnp.maximum(count, 1),
        newest=jnp.where(count > 0, lengths[row] - 1, -1),
    )
    return Lists(jnp.stack(unit, axis=1), ids)


def _longest_first(counts: Int32[Array, "items QB"]) -> Int32[Array, "items"]:
    return jnp.argsort(-jnp.sum(counts, axis=1)).astype(jnp.int32)


def _ids(listed: Bool[Array, "units KB"]) -> Int32[Array, "units KB"]:
    """Returns the numbers of the listed blocks, ascending, then any numbers."""
    marks = listed[None, :, None].astype(jnp.float32)
    rule = Threshold(0.5)  # of a unit without blocks, it lists one
    return threshold_select(marks, rule, capacity=listed.shape[1], weights="raw").ids[0]
