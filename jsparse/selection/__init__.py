"""Selection, the slots that each KV head attends to.

Every method's pages, tokens, clusters and head roles are expressed as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jsparse.selection.threshold import compact
from jsparse.shapes import Bits, HeadFlags, Ids, Lengths

Granularity = Literal["page", "token"]
MAX_BITS_PAGE = 32
_ARRAYS = ("ids", "count", "bits", "dense", "logits")


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Selection:
    """The slots that each KV head attends to.

    A head that attends to anything also attends to its newest token, listed or not. A head with
    count 0 that is not dense attends to nothing: o = 0, lse = -inf.

    Attributes:
        ids: logical page ids or token slots; the first `count` of each head are valid, distinct and
            ascending, the rest are 0. C is static.
        count: the number of valid ids.
        bits: token bits, for pages with P ≤ 32: bit t set means that token t of the page is
            attended, if it exists. None: all tokens. Bits save arithmetic, not bytes: a page with
            one bit set is read whole.
        dense: heads that attend to all their tokens; their list is ignored, and no wrapper may
            prune them.
        granularity: the unit of `ids`.
        logits: the query heads' scaled logits of listed tokens, without bias, if the selection
            computed them: attention then need not read these tokens' keys again. They save reads
            but add no information: None gives the same result, and a backend may ignore them. A
            list of other tokens must drop them.
    """

    ids: Ids
    count: Lengths
    bits: Bits | None = None
    dense: HeadFlags | None = None
    granularity: Granularity = "page"
    logits: Float32[Array, "B K G C"] | None = None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Granularity]:
        """Returns the arrays as children; the granularity is static."""
        return [
            (jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _ARRAYS
        ], self.granularity

    @classmethod
    def tree_unflatten(cls, granularity: Granularity, arrays: Sequence[Any]) -> "Selection":
        """Rebuilds a selection from arrays, or from shapes or placeholders that replace them."""
        selection = object.__new__(cls)
        for name, value in zip((*_ARRAYS, "granularity"), (*arrays, granularity), strict=True):
            object.__setattr__(selection, name, value)
        return selection


def everything(lengths: Lengths) -> Selection:
    """Returns the selection in which every head attends to all its tokens."""
    ids = jnp.zeros((*lengths.shape, 0), jnp.int32)
    return Selection(ids, jnp.zeros_like(lengths), dense=jnp.ones(lengths.shape, jnp.bool_))


def nothing(lengths: Lengths, granularity: Granularity = "page") -> Selection:
    """Returns the selection in which no head attends to anything."""
    ids = jnp.zeros((*lengths.shape, 0), jnp.int32)
    return Selection(ids, jnp.zeros_like(lengths), granularity=granularity)


def from_token_mask(
    mask: Bool[Array, "B K S"], capacity: int, *, page_size: int, granularity: Granularity = "token"
) -> Selection:
    """Lists the marked slots as tokens, or as pages with bits.

    `mask` must mark at most `capacity` ids per head.
    """
    if granularity == "token":
        ids, count = compact(mask, capacity)
        return Selection(ids, count, granularity="token")
    paged = mask.reshape(*mask.shape[:2], -1, page_size)
    ids, count = compact(paged.any(-1), capacity)
    words = jnp.take_along_axis(pack_bits(paged), ids, axis=2)
    valid = jnp.arange(capacity) < count[..., None]
    return Selection(ids, count, bits=jnp.where(valid, words, jnp.uint32(0)))


def from_page_mask(mask: Bool[Array, "B K M"], capacity: int) -> Selection:
    """Lists the marked pages whole; `mask` must mark at most `capacity` pages per head."""
    ids, count = compact(mask, capacity)
    return Selection(ids, count)


def paged(selection: Selection, *, num_pages: int, page_size: int) -> Selection:
    """Lists the same slots as pages, with bits if tokens were listed, which requires P ≤ 32."""
    if selection.granularity == "page":
        return selection
    if page_size > MAX_BITS_PAGE:
        raise ValueError(
            f"page_size={page_size}: must be at most {MAX_BITS_PAGE} if listed tokens become pages"
        )
    if selection.ids.shape[-1] == 0:
        return Selection(selection.ids, selection.count, dense=selection.dense)
    valid, page = valid_ids(selection), selection.ids // page_size
    first = valid.at[..., 1:].set(valid[..., 1:] & (page[..., 1:] != page[..., :-1]))
    at, count = compact(first, min(page.shape[-1], num_pages))
    row, head = (i[..., None] for i in jnp.indices(count.shape))
    nth = jnp.where(valid, jnp.cumsum(first, axis=-1, dtype=jnp.int32) - 1, at.shape[-1])
    bits = jnp.uint32(1) << (selection.ids % page_size).astype(
        jnp.uint32
    )  # distinct bits, so that their sum is their union
    bits = jnp.zeros(at.shape, jnp.uint32).at[row, head, nth].add(bits, mode="drop")
    ids = jnp.where(
        jnp.arange(at.shape[-1]) < count[..., None], jnp.take_along_axis(page, at, -1), 0
    )
    return Selection(ids, count, bits=bits, dense=selection.dense)


def window(
    lengths: Lengths,
    *,
    sink: int,
    recent: int | Lengths,
    num_pages: int,
    page_size: int,
    granularity: Granularity = "page",
) -> Selection:
    """Selects the first `sink` and the last `recent` slots of each head.

    C is the maximum number of their ids; if `recent` differs by head, that of all slots. Pages of
    more than 32 tokens have no bits and are attended as a whole, so slightly more slots are
    attended.
    """
    slots = num_pages * page_size
    sink, most = min(sink, slots), slots
    if isinstance(recent, int):
        recent = most = min(recent, slots)
    newest = lengths - recent  # the first of the last slots, negative if there are fewer
    unit = page_size if granularity == "page" else 1
    num_units = slots // unit
    sink_units = min(-(-sink // unit), num_units)
    # recent tokens that start within a page touch one more page
    recent_units = min(-(-most // unit) + (unit > 1 and most > 0), num_units)
    used = -(-lengths // unit)
    sink_count = jnp.minimum(used, sink_units)
    start = jnp.maximum(jnp.maximum(newest, 0) // unit, sink_count) if most else used
    nth = jnp.arange(min(sink_units + recent_units, num_units), dtype=jnp.int32)
    count = jnp.minimum(sink_count + used - start, nth.size)
    valid = nth < count[..., None]
    ids = jnp.where(
        nth < sink_count[..., None], nth, start[..., None] + nth - sink_count[..., None]
    )
    ids = jnp.where(valid, ids, 0)
    if granularity == "token":
        return Selection(ids, count, granularity="token")
    if page_size > MAX_BITS_PAGE:
        return Selection(ids, count)
    page = ids * page_size
    held = lengths[..., None] - page  # slots from each page's first one on
    inside = low_bits(sink - page) | ~low_bits(newest[..., None] - page)
    return Selection(
        ids, count, bits=inside & low_bits(jnp.where(valid, jnp.minimum(held, page_size), 0))
    )


def union(a: Selection, b: Selection, num_units: int) -> Selection:
    """Returns the union of two selections.

    `num_units` is M (pages) or S (tokens), the maximum length of a head's list.
    """
    if a.granularity != b.granularity:
        raise ValueError(
            f"granularity={b.granularity!r}: must equal the other selection's, {a.granularity!r}"
        )
    dense = a.dense if b.dense is None else b.dense if a.dense is None else a.dense | b.dense
    if a.ids.shape[-1] + b.ids.shape[-1] == 0:
        return Selection(a.ids, a.count, dense=dense, granularity=a.granularity)
    far = jnp.int32(2**31 - 1)

    def both(field):
        return jnp.concatenate([field(a), field(b)], axis=-1)

    ids = both(lambda s: jnp.where(valid_ids(s), s.ids, far))
    bits = None
    if a.bits is not None or b.bits is not None:
        bits = both(lambda s: jnp.where(valid_ids(s), bits_of(s), jnp.uint32(0)))
        ids, bits = jax.lax.sort((ids, bits), num_keys=1)
        same = ids[..., :-1] == ids[..., 1:]
        bits = bits.at[..., :-1].set(
            jnp.where(same, bits[..., :-1] | bits[..., 1:], bits[..., :-1])
        )
    else:
        ids = jnp.sort(ids)
    first = (ids != far).at[..., 1:].set((ids[..., 1:] != ids[..., :-1]) & (ids[..., 1:] != far))
    at, count = compact(first, min(ids.shape[-1], num_units))
    valid = jnp.arange(at.shape[-1]) < count[..., None]
    ids = jnp.where(valid, jnp.take_along_axis(ids, at, -1), 0)
    if bits is not None:
        bits = jnp.where(valid, jnp.take_along_axis(bits, at, -1), jnp.uint32(0))
    return Selection(ids, count, bits=bits, dense=dense, granularity=a.granularity)


def pack_bits(mask: Bool[Array, "*batch P"]) -> UInt32[Array, "*batch"]:
    """Packs P ≤ 32 flags into one word, flag t at bit t."""
    size = mask.shape[-1]
    if size > MAX_BITS_PAGE:
        raise ValueError(
            f"page_size={size}: must be at most {MAX_BITS_PAGE} if pages have token bits"
        )
    return jnp.sum(
        mask.astype(jnp.uint32) << jnp.arange(size, dtype=jnp.uint32), -1, dtype=jnp.uint32
    )


def unpack_bits(bits: UInt32[Array, "*batch"], page_size: int) -> Bool[Array, "*batch P"]:
    """Unpacks the flags of `pack_bits`."""
    return (bits[..., None] >> jnp.arange(page_size, dtype=jnp.uint32)) & 1 == 1


def valid_ids(selection: Selection) -> Bool[Array, "B K C"]:
    """Marks the valid ids, the first `count` of each head."""
    return jnp.arange(selection.ids.shape[-1], dtype=jnp.int32) < selection.count[..., None]


def bits_of(selection: Selection) -> UInt32[Array, "B K C"]:
    """Returns the bits of a selection; all set if it has none."""
    if selection.bits is None:
        return jnp.full(selection.ids.shape, 0xFFFFFFFF, jnp.uint32)
    return selection.bits


def low_bits(count: Int32[Array, "*batch"]) -> UInt32[Array, "*batch"]:
    """Returns words with the lowest `count` bits set: none for negative counts, all from 32 on."""
    low = (jnp.uint32(1) << jnp.maximum(count, 0).astype(jnp.uint32)) - 1
    return jnp.where(count >= 32, jnp.uint32(0xFFFFFFFF), low)
