"""Implements top-k and top-p with static shapes.

They bisect a threshold, select the values above it and compact them to ids, without sorting: 32
passes over the order-preserving integer image of the float32 scores find the threshold exactly.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Integer, UInt, UInt32

_PARTS = 8  # into which a GPU cuts rows, unless there are many
_MANY_ROWS = 512
_LANES = 128  # a multiple of a word's 32 bits; a byte can count that number of marks


def top_k_mask(
    scores: Float[Array, "*rows S"], k: Int[Array, "*#rows"] | int
) -> Bool[Array, "*rows S"]:
    """Marks the k largest scores of each row; ties go to the lowest index.

    k may differ between rows. A row with fewer than k finite scores marks them all; -inf and NaN
    are never marked.
    """
    keys = ordered(scores)
    finite = keys > ordered(jnp.float32(-jnp.inf))
    target = jnp.minimum(jnp.asarray(k, jnp.int32), jnp.sum(finite, -1, dtype=jnp.int32))
    kth = _largest(keys, lambda count: count >= target)
    above, ties = keys > kth[..., None], keys == kth[..., None]
    missing = target - jnp.sum(above, -1, dtype=jnp.int32)

    def first(ties: Array) -> Array:
        return ties & (jnp.cumsum(ties, -1, dtype=jnp.int32) <= missing[..., None])

    too_many = jnp.any(jnp.sum(ties, -1, dtype=jnp.int32) > missing)
    return finite & (above | jax.lax.cond(too_many, first, lambda ties: ties, ties))


def top_k_ids(
    keys: UInt[Array, "*rows S"], k: Int[Array, "*#rows"], capacity: int
) -> tuple[Int32[Array, "*rows C"], Int32[Array, "*rows"]]:
    """Returns the indices of the k largest keys of each row, ascending, and their number.

    Ties go to the lowest index, keys of 0 are never listed, and entries past the number are 0. k is
    at most `capacity`. The result is that of `compact` of `top_k_mask`, but it is faster on a CPU:
    marks are packed into words, so that cumulative sums have a 32nd of the entries, and keys of 16
    bits need half the passes over half the bytes.
    """
    padding = [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % _LANES)]
    keys = jnp.pad(keys, padding)
    target = jnp.minimum(jnp.asarray(k, jnp.int32), _number(keys > 0))
    kth = _largest(keys, lambda count: count >= target, count=_number)[..., None]
    above, ties = _words(keys > kth), _words(keys == kth)
    sizes = _sizes(ties)
    missing = target[..., None] - jnp.sum(_sizes(above), -1, keepdims=True)
    left = jnp.clip(missing - (jnp.cumsum(sizes, -1) - sizes), 0)
    first = ties & ((jnp.uint32(1) << _nth_bit(ties, left)) - 1)
    return _listed(above | jnp.where(left < sizes, first, ties), capacity)


def top_p_mask(
    weights: Float[Array, "*rows S"], p: Float[Array, "*#rows"] | float
) -> Bool[Array, "*rows S"]:
    """Marks the smallest set of each row whose weights sum to at least p times the row's sum.

    Ties go to the lowest index. Weights are non-negative (a softmax, normalised or not). A row with
    any positive weight marks at least one. With p ≥ 1 every positive weight is marked.
    """
    weights = weights.astype(jnp.float32)
    positive = weights > 0
    target = jnp.asarray(p, jnp.float32) * jnp.sum(weights, -1)
    keys = ordered(weights)

    # p times the sum can underflow to 0
    lowest = _largest(keys, lambda mass: (mass >= target) & (mass > 0), weights)
    above, ties = keys > lowest[..., None], keys == lowest[..., None]
    missing = target - jnp.sum(jnp.where(above, weights, 0.0), -1)

    def first(ties: Array) -> Array:
        before = (jnp.cumsum(ties, -1, dtype=jnp.int32) - 1).astype(jnp.float32) * weights
        return ties & ((before < missing[..., None]) | (before == 0))

    # a row keeps at least one
    several = jnp.any(jnp.sum(ties, -1, dtype=jnp.int32) > 1)
    smallest = above | jax.lax.cond(several, first, lambda ties: ties, ties)
    everything = jnp.broadcast_to(jnp.asarray(p, jnp.float32) >= 1.0, target.shape)[..., None]
    return positive & (smallest | everything)


def budget_mask(
    scores: Float[Array, "*rows S"],
    sizes: Integer[Array, "*#rows S"],
    tokens: Int[Array, "*#rows"] | int,
) -> Bool[Array, "*rows S"]:
    """Marks the largest scores of each row, until the next one's size exceeds the rest.

    Sizes are at least 0, and negative `tokens` count as 0. Ties go to the lowest index. A row marks
    its largest score for any size, unless it is -inf or NaN, which are never marked.
    """
    keys = ordered(scores)
    finite = keys > ordered(jnp.float32(-jnp.inf))
    sizes, tokens = jnp.where(finite, sizes, 0), jnp.maximum(tokens, 0)

    def size(marks: Array) -> Array:
        return jnp.sum(jnp.where(marks, sizes, 0), -1, dtype=jnp.int32)

    first_left_out = _largest(keys, lambda total: total > tokens, sizes)[..., None]
    above, ties = keys > first_left_out, keys == first_left_out
    taken = jnp.cumsum(jnp.where(ties, sizes, 0), -1, dtype=jnp.int32)
    fits = above | (ties & (taken <= (tokens - size(above))[..., None]))
    best = jnp.arange(keys.shape[-1]) == jnp.argmax(keys, -1)[..., None]
    return finite & (fits | best)


def compact(
    mask: Bool[Array, "*rows S"], capacity: int
) -> tuple[Int32[Array, "*rows C"], Int32[Array, "*rows"]]:
    """Returns the indices of the marked entries, ascending, and their number.

    Entries past the count are 0. Marks beyond `capacity` would be lost: limit them first, by score
    (`top_k_mask`).
    """
    running = jnp.cumsum(mask, -1, dtype=jnp.int32)
    count = jnp.minimum(running[..., -1], capacity)
    nth = jnp.arange(1, capacity + 1, dtype=jnp.int32)
    flat = running.reshape(-1, running.shape[-1])
    ids = jax.vmap(lambda row: jnp.searchsorted(row, nth, side="left", method="scan_unrolled"))(
        flat
    )
    ids = ids.reshape(*mask.shape[:-1], capacity).astype(jnp.int32)
    return jnp.where(nth <= count[..., None], ids, 0), count


def ordered(x: Array) -> UInt32[Array, "..."]:
    """Maps float32 to uint32 in the same order (NaN below everything)."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 and 0 are equal
    key = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(x), jnp.uint32(0), key)


def _count(marks: Bool[Array, "*rows S"]) -> Int32[Array, "*rows"]:
    return jnp.sum(marks, -1, dtype=jnp.int32)


def _largest(
    keys: UInt[Array, "*rows S"],
    enough: Callable[[Array], Array],
    values: Array | None = None,
    *,
    count: Callable[[Array], Array] = _count,
) -> UInt[Array, "*rows"]:
    """Finds bit by bit the largest threshold t of each row for which enough(a sum) holds.

    The sum is over the values with keys of at least t; without values it is the number of these
    keys, which `count` returns for their marks. `enough` is monotone.
    """
    if jax.default_backend() == "gpu":
        return _largest_on_gpu(keys, enough, values)
    bits, one = jnp.iinfo(keys.dtype).bits, jnp.ones((), keys.dtype)

    def step(i: Array, t: Array) -> Array:
        trial = t | (one << (bits - 1 - i).astype(keys.dtype))
        marks = keys >= trial[..., None]
        if values is None:
            found = count(marks)
        else:
            found = jnp.sum(jnp.where(marks, values, 0), -1, dtype=_sum_dtype(values))
        return jnp.where(enough(found), trial, t)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros(keys.shape[:-1], keys.dtype))


def _largest_on_gpu(
    keys: UInt[Array, "*rows S"], enough: Callable[[Array], Array], values: Array | None
) -> UInt[Array, "*rows"]:
    """Computes `_largest` where launching a pass over the keys takes longer than running it.

    Each pass finds two bits. Few rows are summed in parts, and their passes unrolled. Many rows
    fill the GPU, and take a loop, which compiles sooner.
    """
    if values is None:
        values = jnp.ones(keys.shape, jnp.int32)
    few = math.prod(keys.shape[:-1]) < _MANY_ROWS
    cut = _PARTS if few else 1
    pad = [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % cut)]
    parts = (*keys.shape[:-1], cut, -1)
    # no tried threshold is 0, the key of padding
    keys, values = (
        jnp.pad(x, pad).reshape(parts) for x in (keys, jnp.broadcast_to(values, keys.shape))
    )
    zero, one = jnp.zeros((), _sum_dtype(values)), jnp.ones((), keys.dtype)
    passes = jnp.iinfo(keys.dtype).bits // 2

    def step(nth: Array | int, t: Array) -> Array:
        shift = jnp.asarray(2 * (passes - 1 - nth), keys.dtype)
        trials = [t | one * digit << shift for digit in (1, 2, 3)]
        terms = [
            jnp.where(keys >= trial[..., None, None], values.astype(zero.dtype), zero)
            for trial in trials
        ]
        sums = jax.lax.reduce(terms, [zero] * 3, partial(jax.tree.map, jnp.add), (keys.ndim - 1,))
        held = [enough(jnp.sum(each, -1, dtype=zero.dtype)).astype(keys.dtype) for each in sums]
        return t | (held[0] + held[1] + held[2]) << shift

    t = jnp.zeros(parts[:-2], keys.dtype)
    if not few:
        return jax.lax.fori_loop(0, passes, step, t)
    for nth in range(passes):
        t = step(nth, t)
    return t


def _sum_dtype(values: Array) -> Any:
    return values.dtype if jnp.issubdtype(values.dtype, jnp.floating) else jnp.int32


def _number(mask: Bool[Array, "*rows S"]) -> Int32[Array, "*rows"]:
    """Counts the marks of each row, a multiple of _LANES, in bytes where possible.

    A sum of _LANES bytes down the columns is the widest addition of a CPU.
    """
    columns = mask.reshape(*mask.shape[:-1], _LANES, -1)
    return jnp.sum(jnp.sum(columns, -2, dtype=jnp.uint8), -1, dtype=jnp.int32)


def _words(mask: Bool[Array, "*rows S"]) -> UInt32[Array, "*rows W"]:
    """Packs 32 marks into a word, the lowest index into the lowest bit."""
    bits = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    by_word = mask.reshape(*mask.shape[:-1], -1, 32)
    return jnp.sum(jnp.where(by_word, bits, 0), -1, dtype=jnp.uint32)


def _sizes(words: UInt32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _nth_bit(
    words: UInt32[Array, "*shape"], nth: Int32[Array, "*shape"]
) -> UInt32[Array, "*shape"]:
    """Finds the nth set bit of each word, from 0 on; words with fewer give 31."""
    at = jnp.zeros_like(words)
    for half in (16, 8, 4, 2, 1):
        low = words & ((1 << half) - 1)
        further = nth >= _sizes(low)
        nth = jnp.where(further, nth - _sizes(low), nth)
        words = jnp.where(further, words >> half, low)
        at += jnp.where(further, jnp.uint32(half), 0)
    return at


def _listed(
    words: UInt32[Array, "*rows W"], capacity: int
) -> tuple[Int32[Array, "*rows C"], Int32[Array, "*rows"]]:
    """Lists the set bits, as `compact` does."""
    sizes = _sizes(words)
    ends = jnp.cumsum(sizes, -1)
    flat = ends.reshape(-1, ends.shape[-1])
    row = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    # the word of an entry is the number of words that end at or before it
    passed = jnp.zeros((flat.shape[0], capacity), jnp.int32).at[row, flat].add(1, mode="drop")
    at = jnp.cumsum(passed, -1).reshape(*words.shape[:-1], capacity)
    of_entry = partial(jnp.take_along_axis, indices=at, axis=-1, mode="clip")
    nth = jnp.arange(capacity, dtype=jnp.int32)
    ids = at * 32 + _nth_bit(of_entry(words), nth - of_entry(ends - sizes)).astype(jnp.int32)
    count = ends[..., -1]
    return jnp.where(nth < count[..., None], ids, 0), count
