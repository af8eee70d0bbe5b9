"""Lists the chosen blocks of every unit of work: 128 queries of one head, in launch order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.pallas_kernels.block_sparse_prefill.problem import BLOCK
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
        ids: the numbers of its blocks, ascending, then zeros.
    """

    units: Int32[Array, "units fields"]
    ids: Int32[Array, "units KB"]


def lists(chosen: Bool[Array, "B N QB KB"], lengths: Rows, valid: Rows) -> Lists:
    """Lists the chosen blocks that start at or before the last token of their unit.

    The heads with most blocks start first, so that the last units to end are short, and each
    head's latest queries, which have the longest lists if all blocks are chosen. A head's units
    start together, because they find blocks that others have read in the L2 cache.
    """
    rows, heads, query_blocks, key_blocks = chosen.shape
    token = jnp.arange(query_blocks, dtype=jnp.int32)[::-1] * BLOCK
    keys = jnp.arange(key_blocks, dtype=jnp.int32)
    before = lengths - valid
    last = before[:, None] + jnp.minimum(token + BLOCK, valid[:, None]) - 1
    last = jnp.where(token < valid[:, None], last, -1)
    listed = chosen[:, :, ::-1] & (keys * BLOCK <= last[..., None])[:, None]

    listed = listed.reshape(rows * heads, query_blocks, key_blocks)
    pairs = jnp.argsort(-jnp.sum(listed, axis=(1, 2), dtype=jnp.int32)).astype(jnp.int32)
    listed = listed[pairs].reshape(-1, key_blocks)
    count = jnp.sum(listed, axis=1, dtype=jnp.int32)
    place = jnp.where(listed, jnp.cumsum(listed, axis=1, dtype=jnp.int32) - 1, key_blocks)
    ids = jnp.zeros(listed.shape, jnp.int32)
    ids = ids.at[jnp.arange(len(listed))[:, None], place].set(keys, mode="drop")

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
