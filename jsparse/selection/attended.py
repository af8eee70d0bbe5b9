"""Marks and counts the slots that the heads of a selection attend to and read."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.selection import Selection, bits_of, low_bits, unpack_bits, valid_ids
from jsparse.shapes import Lengths


def token_mask(
    selection: Selection, lengths: Lengths, *, num_pages: int, page_size: int
) -> Bool[Array, "B K S"]:
    """Marks the slots that each head attends to, including its newest token's."""
    slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    valid = valid_ids(selection)
    row, head = (i[..., None] for i in jnp.indices(lengths.shape))
    if selection.granularity == "token":
        at = jnp.where(valid, selection.ids, slots.size)
        listed = (
            jnp.zeros((*lengths.shape, slots.size), jnp.bool_)
            .at[row, head, at]
            .set(True, mode="drop")
        )
    else:
        at = jnp.where(valid, selection.ids, num_pages)
        paged = jnp.zeros((*lengths.shape, num_pages, page_size), jnp.bool_)
        marks = (
            unpack_bits(bits_of(selection), page_size)
            if selection.bits is not None
            else jnp.bool_(True)
        )
        listed = paged.at[row, head, at].set(marks, mode="drop").reshape(*lengths.shape, slots.size)
    newest = slots == lengths[..., None] - 1
    mask = listed | (newest & (selection.count > 0)[..., None])
    if selection.dense is not None:
        mask |= selection.dense[..., None]
    return mask & (slots < lengths[..., None])


def attended_tokens(selection: Selection, lengths: Lengths, page_size: int) -> Lengths:
    """Counts the slots that each head attends to, from the list alone."""
    return count_tokens(selection, lengths, page_size)[0]


def read_tokens(selection: Selection, lengths: Lengths, page_size: int) -> Lengths:
    """Counts the slots whose K and V are read.

    Pages are read whole, including the newest token's, up to the head's length.
    """
    return count_tokens(selection, lengths, page_size)[1]


def count_tokens(selection: Selection, lengths: Lengths, page_size: int) -> tuple[Lengths, Lengths]:
    """Returns `attended_tokens` and `read_tokens`, in one pass over the list.

    The newest token and its page count whether listed or not, once for each nonempty list.
    """
    unit = page_size if selection.granularity == "page" else 1
    newest, listed = lengths - 1, (selection.count > 0) & (lengths > 0)
    # slots of an entry without the newest: all of its unit or none, except in the newest's page
    before = jnp.where(
        valid_ids(selection), jnp.clip(newest[..., None] - selection.ids * unit, 0, unit), 0
    )
    last = jnp.where(listed, newest % unit + 1, 0)
    if selection.bits is None:
        attended = jnp.sum(before, -1, dtype=jnp.int32)
        whole = attended // unit * unit
    else:
        marked = jax.lax.population_count(selection.bits & low_bits(before)).astype(jnp.int32)
        attended, whole = _sum_both(marked, jnp.where(before == unit, unit, 0))
    attended, read = attended + listed, whole + last
    if selection.dense is not None:
        attended, read = (jnp.where(selection.dense, lengths, n) for n in (attended, read))
    return attended, read


def _sum_both(a: Int32[Array, "B K C"], b: Int32[Array, "B K C"]) -> tuple[Lengths, Lengths]:
    """Sums both over C in one reduction; XLA then fuses several layers into one kernel."""
    both = jnp.sum(jnp.stack([a, b]), -1, dtype=jnp.int32)
    return both[0], both[1]
