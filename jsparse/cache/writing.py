"""Creates caches, appends tokens to them, allocates pages and shrinks layers."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jsparse import ranks
from jsparse.cache.int8_pages import Int8Pages
from jsparse.cache.layers import FreeList, KVCache, LayerCache, PagePool
from jsparse.cache.placing import map_pages, placed
from jsparse.cache.reading import rounded
from jsparse.cache.spec import CacheSpec
from jsparse.shapes import ChunkKV, Lengths, Rows

OPTIONAL_FIELDS = ("bias", "slot_positions")


def init(spec: CacheSpec, *, fields: tuple[str, ...] = ()) -> KVCache:
    """Returns an empty cache, with block tables and free lists if the spec has a shared pool.

    Args:
        spec: the sizes.
        fields: the names in OPTIONAL_FIELDS to allocate.

    Raises:
        ValueError: a field is unknown, or the pool has fewer than two pages.
    """
    heads, pages = (spec.batch, spec.num_kv_heads), spec.pages
    paged = spec.pool_pages is not None
    if paged and pages < 2:
        raise ValueError(f"pool_pages={pages}: must be at least 2, one page and the scratch page")
    unknown = set(fields) - set(OPTIONAL_FIELDS)
    if unknown:
        raise ValueError(
            f"fields={fields}: unknown {sorted(unknown)}, must be among {OPTIONAL_FIELDS}"
        )

    def pool(*, framed: bool) -> Array | PagePool:
        shape = (pages, spec.page_size, spec.head_dim)
        if spec.kv_cache_dtype != "int8":
            return jnp.zeros(shape, spec.dtype)
        scales = jnp.zeros(shape[:2], jnp.bfloat16)
        dtype = jnp.dtype(spec.dtype)
        return Int8Pages(jnp.zeros(shape, jnp.int8), scales, None, dtype, framed)

    def layer() -> LayerCache:
        return LayerCache(
            k=pool(framed=True),
            v=pool(framed=False),
            lengths=jnp.zeros(heads, jnp.int32),
            block_table=jnp.full((*heads, spec.num_pages), pages - 1, jnp.int32) if paged else None,
            free=FreeList(jnp.arange(pages, dtype=jnp.int32)[::-1] - 1, jnp.int32(pages - 1))
            if paged
            else None,
            bias=jnp.zeros((pages, spec.page_size), jnp.float32) if "bias" in fields else None,
            slot_positions=jnp.zeros((pages, spec.page_size), jnp.int32)
            if "slot_positions" in fields
            else None,
        )

    layers = tuple(layer() for _ in range(spec.num_layers))
    no_row = jnp.zeros(spec.batch, jnp.bool_)
    return KVCache(layers, jnp.zeros(spec.batch, jnp.int32), no_row)


def spec_of(cache: KVCache, num_heads: int) -> CacheSpec:
    """Returns the sizes of a cache, for a model of `num_heads` query heads."""
    layer = cache.layers[0]
    batch, heads = layer.lengths.shape
    pages, page_size, head_dim = layer.k.shape
    return CacheSpec(
        len(cache.layers),
        batch,
        num_heads,
        heads,
        head_dim,
        page_size,
        layer.num_pages,
        layer.k.dtype,
        None if layer.block_table is None else pages,
        ranks=ranks.count(),
        kv_cache_dtype="int8" if isinstance(layer.k, Int8Pages) else "auto",
    )


def append(
    cache: KVCache,
    layer_idx: int,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
) -> KVCache:
    """Appends the first `valid[b]` of T new tokens to each head of row b: `grow`, then `fill`."""
    cache = grow(cache, valid, k.shape[1], layers=(layer_idx,))
    return fill(cache, layer_idx, k, v, positions, taken(cache, valid))


def grow(
    cache: KVCache, valid: Rows, max_new: int, *, layers: Sequence[int] | None = None
) -> KVCache:
    """Makes room in each head of row b for the `valid[b]` ≤ `max_new` tokens that `fill` writes.

    It does so in all layers at once, or in the given ones; with the identity table that is one
    launch for all of them.

    A row that lacks room in some layer, now or earlier, is marked in `cache.overflow`; it keeps its
    tokens and does not grow. `taken` returns how many tokens `fill` may write. Rows are served in
    order, and a row that gets nothing does not reduce the pages of later rows.
    """
    chosen = range(len(cache.layers)) if layers is None else layers
    held = [cache.layers[i] for i in chosen]
    valid = taken(cache, valid)
    # layers first, then heads: XLA would split a reduction over a stack of layers
    full = functools.reduce(
        jnp.logical_or, (layer.lengths + valid[:, None] > layer.capacity for layer in held)
    )
    cache = cache._replace(overflow=cache.overflow | jnp.any(full, axis=1))
    if any(_hands_out(layer) for layer in held):
        short = _short_of_pages(held, taken(cache, valid), max_new)
        cache = cache._replace(overflow=cache.overflow | short)
    valid = taken(cache, valid)
    # layers with the same tokens share one array, in the order of layers: ordered by address,
    # programs would differ between processes
    nth, distinct = {}, []
    for layer in held:
        if id(layer.lengths) not in nth:
            nth[id(layer.lengths)] = len(distinct)
            distinct.append(layer.lengths + valid[:, None])
    # nothing below reads the old lengths; otherwise XLA would copy them before the new ones take
    # their (donated) place
    distinct = jax.lax.optimization_barrier(distinct)
    for i, layer in zip(chosen, held, strict=True):
        grown = _allocate(layer, valid, max_new)
        cache = replace_layer(cache, i, grown._replace(lengths=distinct[nth[id(layer.lengths)]]))
    return cache


def level(cache: KVCache) -> KVCache:
    """Returns the cache with one array of lengths for all layers; heads must have all their tokens.

    That condition is not checked: only policies that declare `Eviction` drop tokens. Results that
    layers derive from lengths alone, such as a list of the newest pages, are then computed once.
    """
    lengths = jnp.broadcast_to(cache.positions[:, None], cache.layers[0].lengths.shape)
    layers = tuple(layer._replace(lengths=lengths) for layer in cache.layers)
    return cache._replace(layers=layers)


def once(cache: KVCache) -> KVCache:
    """Returns a level cache with the lengths of the first layer alone, for loops to carry.

    With 32 references, the array would be copied 31 times per step. Only `level` accepts such a
    cache.
    """
    first, *others = cache.layers
    return cache._replace(layers=(first, *(layer._replace(lengths=None) for layer in others)))


def taken(cache: KVCache, valid: Rows) -> Rows:
    """Returns how many of `valid[b]` new tokens row b accepts: none after an overflow."""
    return jnp.where(cache.overflow, 0, valid)


def fill(
    cache: KVCache,
    layer_idx: int,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
) -> KVCache:
    """Writes the first `valid[b]` of T new tokens to the slots that `grow` added last."""
    layer = cache.layers[layer_idx]
    layer = write(layer, k, v, positions, valid, layer.lengths - valid[:, None])
    return replace_layer(cache, layer_idx, layer)


def write(
    layer: LayerCache,
    k: ChunkKV,
    v: ChunkKV,
    positions: Int32[Array, "B T"],
    valid: Rows,
    first: Lengths,
) -> LayerCache:
    """Stores the first `valid[b]` of T tokens at the slots first, first + 1, … of each head.

    Their pages must already be allocated (see `grow`); lengths do not change.
    """
    at = _new_slots(layer, k.shape[1], valid, first)
    k, v = (finite(x).swapaxes(1, 2) for x in (k, v))
    layer = layer._replace(k=placed(layer.k, layer, *at, k), v=placed(layer.v, layer, *at, v))
    return write_beside(layer, positions, valid, first)


def as_held(layer: LayerCache, k: ChunkKV, v: ChunkKV) -> tuple[ChunkKV, ChunkKV]:
    """Returns the K and V of tokens as they are read once `layer` holds them, if finite."""
    k, v = (
        rounded(pool, x.swapaxes(1, 2)).swapaxes(1, 2).astype(x.dtype)
        for pool, x in ((layer.k, k), (layer.v, v))
    )
    return k, v


def finite(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Returns x with NaN and infinities replaced by 0.

    Pages pass from one request to another, and attention multiplies V of unused slots by weights of
    0, which is safe only for finite numbers.
    """
    return jnp.where(jnp.isfinite(x), x, 0)


def write_beside(
    layer: LayerCache, positions: Int32[Array, "B T"], valid: Rows, first: Lengths
) -> LayerCache:
    """Stores the layer's other fields for the tokens that `write` stores."""
    at = _new_slots(layer, positions.shape[1], valid, first)
    shape = (*first.shape, positions.shape[1])
    if layer.bias is not None:
        layer = layer._replace(bias=placed(layer.bias, layer, *at, jnp.zeros(shape)))
    if layer.slot_positions is not None:
        given = jnp.broadcast_to(positions[:, None], shape)
        layer = layer._replace(slot_positions=placed(layer.slot_positions, layer, *at, given))
    return layer


def _new_slots(
    layer: LayerCache, count: int, valid: Rows, first: Lengths
) -> tuple[Int32[Array, "B K T"], Bool[Array, "B K T"]]:
    """Returns the slots of `count` tokens from `first` on, and which of them are to be written."""
    steps = jnp.arange(count, dtype=jnp.int32)
    slots = first[:, :, None] + steps
    ok = (steps < valid[:, None])[:, None] & (slots >= 0) & (slots < layer.capacity)
    return slots, ok


def truncate(layer: LayerCache, lengths: Lengths) -> LayerCache:
    """Shortens heads to `lengths` (never lengthens) and returns empty pages to the free list."""
    lengths = jnp.minimum(lengths, layer.lengths)
    if layer.block_table is None or layer.free is None:
        return layer._replace(lengths=lengths)
    page = jnp.arange(layer.num_pages, dtype=jnp.int32)
    used, kept = (_pages_for(n, layer.page_size)[:, :, None] for n in (layer.lengths, lengths))
    scratch = layer.k.shape[0] - 1
    freed = ((page >= kept) & (page < used) & (layer.block_table != scratch)).reshape(-1)
    order = jnp.cumsum(freed, dtype=jnp.int32)
    at = jnp.where(freed, layer.free.count + order - 1, layer.k.shape[0])
    free = FreeList(
        layer.free.pages.at[at].set(layer.block_table.reshape(-1), mode="drop"),
        layer.free.count + order[-1],
    )
    table = jnp.where(page < kept, layer.block_table, scratch)
    return layer._replace(lengths=lengths, block_table=table, free=free)


def cut_pages(layer: LayerCache, pages: int) -> LayerCache:
    """Limits every head to `pages` pages, in smaller pools; later pages are lost.

    With a block table, pools are unchanged. A table that the host writes is cut; if the device
    allocates pages, nothing changes.
    """
    if pages >= layer.num_pages or _hands_out(layer):
        return layer
    if layer.block_table is not None:
        return layer._replace(block_table=layer.block_table[:, :, :pages])

    def cut(pool: Array) -> Array:
        by_head = pool.reshape(layer.lengths.size, layer.num_pages, *pool.shape[1:])
        return by_head[:, :pages].reshape(-1, *pool.shape[1:])

    pools = {name: getattr(layer, name) for name in ("k", "v", *OPTIONAL_FIELDS)}
    return layer._replace(**{name: map_pages(cut, pool) for name, pool in pools.items()})


def replace_layer(cache: KVCache, layer_idx: int, layer: LayerCache) -> KVCache:
    """Returns the cache with one layer's entry replaced."""
    return cache._replace(layers=(*cache.layers[:layer_idx], layer, *cache.layers[layer_idx + 1 :]))


def _pages_for(tokens: Lengths, page_size: int) -> Lengths:
    return (tokens + page_size - 1) // page_size


def _wanted(layer: LayerCache, valid: Rows, max_new: int) -> tuple[Array, Array]:
    """Returns the logical pages that `valid[b]` ≤ `max_new` tokens may touch, and marks new ones.

    Both are [B, K, n].
    """
    first = _pages_for(layer.lengths, layer.page_size)
    last = _pages_for(layer.lengths + valid[:, None], layer.page_size)
    page = first[:, :, None] + jnp.arange(-(-max_new // layer.page_size) + 1, dtype=jnp.int32)
    return page, (page < last[:, :, None]) & (page < layer.num_pages)


def _hands_out(layer: LayerCache) -> bool:
    """Returns whether the device allocates the layer's pages."""
    return layer.block_table is not None and layer.free is not None


def _short_of_pages(layers: Sequence[LayerCache], valid: Rows, max_new: int) -> Bool[Array, "B"]:
    """Marks the rows for which some layer has too few free pages."""
    counted = [
        (jnp.sum(_wanted(layer, valid, max_new)[1], axis=(1, 2), dtype=jnp.int32), layer.free.count)
        for layer in layers
        if layer.free is not None
    ]
    wanted, free = (jnp.stack(column) for column in zip(*counted, strict=True))  # [L, B], [L]

    def serve(left: Array, row: Array) -> tuple[Array, Array]:
        fits = jnp.all(row <= left)
        return left - jnp.where(fits, row, 0), ~fits

    return jax.lax.cond(
        jnp.any(jnp.sum(wanted, axis=1) > free),
        lambda: jax.lax.scan(serve, free, wanted.T)[1],
        lambda: jnp.zeros(valid.shape, jnp.bool_),
    )


def _allocate(layer: LayerCache, valid: Rows, max_new: int) -> LayerCache:
    """Allocates pages to heads for `valid[b]` ≤ `max_new` more tokens; these must be free."""
    if layer.block_table is None or layer.free is None:
        return layer
    page, wanted = _wanted(layer, valid, max_new)
    order = jnp.cumsum(wanted.reshape(-1), dtype=jnp.int32).reshape(wanted.shape)
    pages = layer.free.pages[jnp.maximum(layer.free.count - order, 0)]
    row, head = jnp.indices(layer.lengths.shape, dtype=jnp.int32)
    table = layer.block_table.at[
        row[:, :, None], head[:, :, None], jnp.where(wanted, page, layer.num_pages)
    ].set(pages, mode="drop")
    free = layer.free._replace(count=layer.free.count - order.reshape(-1)[-1])
    return layer._replace(block_table=table, free=free)
