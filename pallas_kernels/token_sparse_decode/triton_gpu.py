"""Implements `api.token_sparse_decode` with jax-triton; all heads' lists are one pool of work.

Rows are gathered one by one, those of K only where the list brings no logits. The list of a head
is cut into units, whose length depends on what that head lists alone, so that a row gives the same
bits alone and in any batch. A fixed number of programs share out the units of all heads, which each
of them finds by itself in a prefix sum over all counts; a second, small launch merges the units of
every head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache, PagePool
from jsparse.pallas_kernels.merge_splits.api import merge_splits
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.partials import AttentionOut, ListedLogits, Stats, StatsKind, softmax_partial
from jsparse.selection import Selection


class TokenTiling(NamedTuple):
    """Describes how the work is cut; the bits of a result depend on it, but not on `programs`.

    Attributes:
        block: entries of a list that are read at once.
        unit_blocks: least number of blocks per unit.
        max_units: most units per head: longer lists have longer units.
        programs: programs per multiprocessor.
        num_warps, num_stages: warps per program, and blocks of it in flight.
    """

    block: int
    unit_blocks: int = 2
    max_units: int = 64
    programs: int = 3
    num_warps: int = 4
    num_stages: int = 3


def default_tiling(head_dim: int, itemsize: int, *, listed: bool = False) -> TokenTiling:
    """Choose blocks of 16 KB of K.

    Two of them and two of V in flight, in each of three programs, fill a multiprocessor; where
    logits are listed, registers do not hold more than two programs.
    """
    block = min(max(16384 // (triton.next_power_of_2(head_dim) * itemsize), 16), 128)
    return TokenTiling(block, programs=2 if listed else 3)


def token_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float,
    stats: StatsKind | None,
    dtype: DTypeLike = jnp.float32,
    tiling: TokenTiling | None = None,
) -> AttentionOut:
    """Implement `api.token_sparse_decode` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    (batch, heads), head_dim, capacity = layer.lengths.shape, q.shape[2], selection.ids.shape[2]
    pairs, group = batch * heads, q.shape[1] // heads
    listed = stats == "listed_logits"
    if tiling is None:
        tiling = default_tiling(head_dim, q.dtype.itemsize, listed=listed)
    # a list, and the newest token behind it
    longest = capacity + 1 if selection.dense is None else max(capacity + 1, layer.capacity)
    splits = min(tiling.max_units, triton.cdiv(longest, tiling.block * tiling.unit_blocks))
    rows = group + (stats is not None and not listed)
    # dense heads and the mean query read keys of which no logits are known
    known = selection.logits is not None and selection.dense is None and not rows - group
    absent = layer.lengths  # stands in for arrays that the call lacks; never read
    by_slot = stats is not None and not listed
    k, v = layer.k, layer.v
    places, ring, resident = (absent,) * 5, 0, False
    if isinstance(k, PagePool) and isinstance(v, PagePool):
        ring, resident = k.ring_pages(layer), k.resident is not None
        own = (k.resident, v.resident, k.resident_first(layer)) if resident else (absent,) * 3
        places = k.ring, v.ring, *own
        k, v = k.host, v.host
    whole_row = jax.ShapeDtypeStruct((batch, heads, layer.capacity), jnp.float32)
    of_list = jax.ShapeDtypeStruct((batch, heads, group, capacity + 1), jnp.float32)
    nothing = jax.ShapeDtypeStruct((1,), jnp.int32)
    o, lse, used, scores, ids, count = triton_call(
        *(q, k, v, layer.lengths, selection.count),
        absent if selection.dense is None else selection.dense,
        selection.ids if capacity else absent,
        absent if layer.block_table is None else layer.block_table,
        absent if layer.bias is None else layer.bias,
        jnp.full(whole_row.shape, -jnp.inf, jnp.float32) if by_slot else absent,
        *places,
        with_newest(q, layer, selection, sm_scale) if known else absent,
        *(pairs, capacity, layer.num_pages, splits),
        kernel=attend_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((pairs, splits, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((pairs, splits, rows), jnp.float32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
            whole_row if by_slot else of_list if listed else nothing,
            jax.ShapeDtypeStruct((batch, heads, capacity + 1), jnp.int32) if listed else nothing,
            jax.ShapeDtypeStruct((batch, heads), jnp.int32) if listed else nothing,
        ],
        input_output_aliases={9: 3} if by_slot else {},
        grid=min(pairs * splits, tiling.programs * jax.local_devices()[0].core_count),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        BLOCK=tiling.block,
        UNIT_BLOCKS=tiling.unit_blocks,
        MAX_UNITS=tiling.max_units,
        RING=ring,
        RESIDENT=resident,
        KNOWN=known,
        HAS_DENSE=selection.dense is not None,
        HAS_TABLE=layer.block_table is not None,
        HAS_BIAS=layer.bias is not None,
        STATS=rows - group,  # 1 or 0
        LISTED=listed,
        G=group,
        H=head_dim,
        P=layer.page_size,
        ROWS=max(16, triton.next_power_of_2(rows)),  # 16 rows are the fewest of an MMA
        COLS=max(16, triton.next_power_of_2(head_dim)),
        PAIRS=triton.next_power_of_2(pairs),
        SCALE=sm_scale,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )
    o, lse = merge_splits(
        o, lse, used, rows, lse_only=rows - group, dtype=dtype, implementation="triton"
    )
    out = AttentionOut(o.reshape(q.shape), lse[:, -group:].reshape(q.shape[:2]))
    if stats is None:
        return out
    if listed:
        lse = lse.reshape(batch, heads, group)
        if selection.dense is not None:  # they report nothing
            lse = jnp.where(count[..., None] > 0, lse, -jnp.inf)
        return out._replace(stats=ListedLogits(ids, count, scores, lse))
    if stats == "page_mass":
        scores = softmax_partial(scores.reshape(batch, heads, layer.num_pages, layer.page_size))[2]
    return out._replace(stats=Stats(scores, lse[:, 0].reshape(batch, heads)))


def with_newest(
    q: Float[Array, "B N H"], layer: LayerCache, selection: Selection, sm_scale: float
) -> Float32[Array, "B K G entries"]:
    """Return the logits that lists bring, and right behind them that of the newest token."""
    newest = jnp.clip(layer.lengths[..., None] - 1, 0)
    of_newest = sm_scale * products(
        q.reshape(*layer.lengths.shape, -1, q.shape[-1]), layer.k, layer, newest
    )
    assert selection.logits is not None
    logits = jnp.pad(selection.logits, ((0, 0), (0, 0), (0, 0), (0, 1)))
    nth = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    behind = nth == selection.count[..., None]
    return jnp.where(behind[:, :, None], of_newest, logits)


@triton.jit
def _entries(
    lengths_ptr,  # [B, K]
    count_ptr,  # [B, K]
    dense_ptr,  # [B, K]
    pair,
    mask,
    HAS_DENSE: tl.constexpr,
):
    """Count what heads read, and how much of that their lists name.

    A list is followed by the newest token. For a dense head the second number is -1.
    """
    entries = tl.load(lengths_ptr + pair, mask=mask, other=0)
    listed = tl.load(count_ptr + pair, mask=mask, other=0)
    if HAS_DENSE:
        listed = tl.where(tl.load(dense_ptr + pair, mask=mask, other=0) != 0, -1, listed)
    entries = tl.where((listed < 0) | (entries == 0), entries, tl.where(listed > 0, listed + 1, 0))
    return entries, listed


@triton.jit
def _unit_size(entries, BLOCK: tl.constexpr, UNIT_BLOCKS: tl.constexpr, MAX_UNITS: tl.constexpr):
    """Return the number of entries per unit."""
    return tl.maximum(tl.cdiv(entries, BLOCK * MAX_UNITS), UNIT_BLOCKS) * BLOCK


@triton.jit
def _find(
    ids_ptr,  # [B, K, capacity]
    table_ptr,  # [B, K, pages]
    pair,
    entry,
    entries,
    listed,
    newest,
    capacity,
    pages,
    P: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Return the slots of a block of entries, their rows in the pool, and which of them count."""
    unlisted = tl.where(listed < 0, entry, newest)
    slot = tl.load(
        ids_ptr + pair.to(tl.int64) * capacity + entry, mask=entry < listed, other=unlisted
    )
    # the newest token counts once, as the last entry, whether or not it is listed
    valid = (entry < entries) & ((slot < newest) | (entry == entries - 1))
    if HAS_TABLE:
        page = tl.load(table_ptr + pair.to(tl.int64) * pages + slot // P, mask=valid, other=0)
        return slot, page.to(tl.int64) * P + slot % P, valid
    return slot, pair.to(tl.int64) * pages * P + slot, valid


@triton.jit
def _away(base_ptr, ptr):
    """Return how many elements lie between two arrays, a multiple of 16 bytes.

    Loads stay as wide as within one array, and there is one of them wherever a row lies.
    """
    unit: tl.constexpr = 128 // base_ptr.dtype.element_ty.primitive_bitwidth
    return (ptr.to(tl.int64) - base_ptr.to(tl.int64)) // 16 * unit


@triton.jit
def _tiered(
    k_ptr,
    v_ptr,
    ring_k_ptr,
    ring_v_ptr,
    own_k_ptr,
    own_v_ptr,
    own_first,
    pair,
    slot,
    at,
    newest,
    RING: tl.constexpr,
    RESIDENT: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
):
    """Return the elements at which rows begin, counted from k_ptr and v_ptr.

    The newest RING pages of a head are read from its ring, all pages of a resident head from the
    device, others where k_ptr and v_ptr lie.
    """
    page = slot // P
    ring = (pair.to(tl.int64) * RING + page % RING) * P + slot % P
    here = page > newest // P - RING
    at_k = tl.where(here, _away(k_ptr, ring_k_ptr) + ring * H, at * H)
    at_v = tl.where(here, _away(v_ptr, ring_v_ptr) + ring * H, at * H)
    if RESIDENT:
        own = own_first.to(tl.int64) * P + slot
        at_k = tl.where(own_first >= 0, _away(k_ptr, own_k_ptr) + own * H, at_k)
        at_v = tl.where(own_first >= 0, _away(v_ptr, own_v_ptr) + own * H, at_v)
    return at_k, at_v


@triton.jit
def _older(
    ids_ptr,  # [listed]
    listed,
    newest,
    BLOCK: tl.constexpr,
):
    """Count the ids below the newest; only the end of a list, which ascends, may hold others."""
    older, searching = listed, True
    while searching:
        at = older - 1 - tl.arange(0, BLOCK)
        others = tl.load(ids_ptr + at, mask=at >= 0, other=-1) >= newest
        number = tl.sum(others.to(tl.int32), 0)
        older -= number
        searching = number == BLOCK
    return older


@triton.jit
def _end_report(
    logits_ptr,  # [G, capacity + 1]
    named_ptr,  # [capacity + 1]
    number_ptr,  # []
    number,
    capacity,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the number of reported tokens, and what stands behind them."""
    tl.store(number_ptr, number)
    for start in range(number, capacity + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(named_ptr + at, at * 0, mask=at <= capacity)
        for row in range(G):
            minus_inf = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(logits_ptr + row * (capacity + 1) + at, minus_inf, mask=at <= capacity)


@triton.jit
def attend_kernel(
    q_ptr,  # [B, N, H]
    k_ptr,  # [pool pages, P, H]
    v_ptr,  # [pool pages, P, H]
    lengths_ptr,  # [B, K]
    count_ptr,  # [B, K]
    dense_ptr,  # [B, K]
    ids_ptr,  # [B, K, capacity]
    table_ptr,  # [B, K, pages]
    bias_ptr,  # [pool pages, P]
    _,  # with STATS an alias of scores_ptr, full of -inf
    ring_k_ptr,  # [pairs · RING, P, H], where k_ptr lies in host memory
    ring_v_ptr,  # [pairs · RING, P, H]
    own_k_ptr,  # [resident pages, P, H]
    own_v_ptr,  # [resident pages, P, H]
    own_first_ptr,  # [B, K], a resident head's first page; -1 for the others
    known_ptr,  # [pairs, G, capacity + 1] with KNOWN, logits of the lists and the newest token
    pairs,
    capacity,
    pages,  # M, of a head
    splits,
    o_ptr,  # [pairs, splits, STATS + G, H]
    lse_ptr,  # [pairs, splits, STATS + G]
    used_ptr,  # [pairs]
    scores_ptr,  # [pairs, pages · P] with STATS; [pairs, G, capacity + 1] with LISTED
    named_ptr,  # [pairs, capacity + 1] with LISTED
    number_ptr,  # [pairs] with LISTED
    BLOCK: tl.constexpr,
    UNIT_BLOCKS: tl.constexpr,
    MAX_UNITS: tl.constexpr,
    RING: tl.constexpr,
    RESIDENT: tl.constexpr,
    KNOWN: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATS: tl.constexpr,
    LISTED: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the partial (o, lse) of every unit; with STATS, the group's mean query is row 0.

    With LISTED, the tokens that lists name and every row's logits are stored in their order.
    """
    minus_inf = float("-inf")
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    offset, everyone = tl.arange(0, BLOCK), tl.arange(0, PAIRS)
    all_entries, _ = _entries(
        lengths_ptr, count_ptr, dense_ptr, everyone, everyone < pairs, HAS_DENSE
    )
    used = tl.cdiv(all_entries, _unit_size(all_entries, BLOCK, UNIT_BLOCKS, MAX_UNITS))
    tl.store(used_ptr + everyone, used, mask=(everyone < pairs) & (tl.program_id(0) == 0))
    if LISTED:
        for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
            entries, listed = _entries(
                lengths_ptr, count_ptr, dense_ptr, pair, pair < pairs, HAS_DENSE
            )
            if (entries == 0) | (listed < 0):
                line = tl.full([], capacity + 1, tl.int64) * pair
                _end_report(
                    scores_ptr + line * G,
                    named_ptr + line,
                    number_ptr + pair,
                    0,
                    capacity,
                    G,
                    BLOCK,
                )
    ends = tl.cumsum(used, 0)  # units of each head and of all before it
    for unit in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        pair = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
        entries, listed = _entries(lengths_ptr, count_ptr, dense_ptr, pair, pair < pairs, HAS_DENSE)
        newest = tl.load(lengths_ptr + pair) - 1
        line = pair.to(tl.int64) * (capacity + 1)  # of LISTED and KNOWN
        own_first = tl.full([], -1, tl.int32)
        if RESIDENT:
            own_first = tl.load(own_first_ptr + pair)
        size = _unit_size(entries, BLOCK, UNIT_BLOCKS, MAX_UNITS)
        first = split * size
        slot, at, valid = _find(
            ids_ptr,
            table_ptr,
            pair,
            first + offset,
            entries,
            listed,
            newest,
            capacity,
            pages,
            P,
            HAS_TABLE,
        )
        # the rows of this group's queries; the mean query is rounded to their type, as an operand
        own = (row >= STATS) & (row < STATS + G) & (col < H)
        q = tl.load(q_ptr + (pair * G + row - STATS) * H + col, mask=own, other=0.0)
        if STATS:
            mean = tl.sum(q.to(tl.float32), 0) / G
            q = tl.where(row == 0, mean.to(q.dtype)[None, :], q)
        top = tl.full([ROWS], minus_inf, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(first, tl.minimum(first + size, entries), BLOCK):
            # found a block ahead: only then do the loads of K and V, which depend on it, overlap
            # with the arithmetic
            ahead = start + BLOCK + offset
            slot_ahead, at_ahead, valid_ahead = _find(
                ids_ptr,
                table_ptr,
                pair,
                ahead,
                entries,
                listed,
                newest,
                capacity,
                pages,
                P,
                HAS_TABLE,
            )
            inside = valid[:, None] & (col < H)
            at_k, at_v = at * H, at * H
            if RING:
                at_k, at_v = _tiered(
                    k_ptr,
                    v_ptr,
                    ring_k_ptr,
                    ring_v_ptr,
                    own_k_ptr,
                    own_v_ptr,
                    own_first,
                    pair,
                    slot,
                    at,
                    newest,
                    RING,
                    RESIDENT,
                    P,
                    H,
                )
            v = tl.load(v_ptr + at_v[:, None] + col, mask=inside, other=0.0)
            if KNOWN:
                lines = known_ptr + line * G + row * (capacity + 1) + (start + offset)[None, :]
                logits = tl.load(lines, mask=valid[None, :] & (row < G), other=0.0)
            else:
                k = tl.load(k_ptr + at_k[:, None] + col, mask=inside, other=0.0)
                logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
            if HAS_BIAS:
                logits += tl.load(bias_ptr + at, mask=valid, other=0.0)[None, :]
            if STATS:
                of_mean = tl.sum(tl.where(row == 0, logits, 0.0), 0)
                tl.store(scores_ptr + pair.to(tl.int64) * pages * P + slot, of_mean, mask=valid)
            if LISTED:
                # the newest token, read behind the list, is reported right behind the older ones:
                # lists may name it, and go on past the head's length
                last = entries - 1 - start
                lines = scores_ptr + line * G + row * (capacity + 1)
                older = valid & (offset != last) & (listed > 0)
                tl.store(named_ptr + line + start + offset, slot, mask=older)
                tl.store(
                    lines + (start + offset)[None, :],
                    logits,
                    mask=older[None, :] & (row < G),
                )
                if (last < BLOCK) & (listed > 0):
                    nth = _older(ids_ptr + pair.to(tl.int64) * capacity, listed, newest, BLOCK)
                    of_newest = tl.sum(tl.where((offset == last)[None, :], logits, 0.0), 1)
                    tl.store(named_ptr + line + nth, newest)
                    tl.store(lines + nth, of_newest[:, None], mask=row < G)
                    _end_report(
                        scores_ptr + line * G,
                        named_ptr + line,
                        number_ptr + pair,
                        nth + 1,
                        capacity,
                        G,
                        BLOCK,
                    )
            logits = tl.where(valid[None, :], logits, minus_inf)
            higher = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(higher == minus_inf, 0.0, higher)  # -inf less -inf would be NaN
            weights = tl.exp(logits - base[:, None])
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, 1)
            o = tl.dot(weights.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
            top, slot, at, valid = higher, slot_ahead, at_ahead, valid_ahead
        part = (pair.to(tl.int64) * splits + split) * (G + STATS)
        o /= tl.where(total == 0, 1.0, total)[:, None]
        tl.store(o_ptr + (part + row) * H + col, o, mask=(row < G + STATS) & (col < H))
        line = tl.arange(0, ROWS)
        tl.store(lse_ptr + part + line, top + tl.log(total), mask=line < G + STATS)
