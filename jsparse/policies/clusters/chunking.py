"""Cuts rows of tokens into chunks that end at boundaries of the text, as LycheeCluster does.

The paper is arXiv 2603.08453; this is its section 4.3, with the classes of table 4.

A chunk has `min_length` to `max_length` tokens and ends at the best boundary in this range: after a
paragraph or a bracket (class 1), a sentence or a line (2), a comma (3), at a blank (4), else at
`max_length` (0). Ties go to the last boundary of the best class, which the paper leaves open.
jsparse.policies.clusters.boundary_classes classifies the boundaries.

The end of a chunk depends on its start, so the paper's loop is serial. Here the end of a chunk is
found for every possible start, and pointer doubling follows these links; the chunks are those of
the loop.
"""

from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt8

from jsparse.policies.clusters.boundary_classes import (
    ENDS_IN_NEWLINE,
    IS_NEWLINES,
    STARTS_WITH_BLANK,
)
from jsparse.shapes import Rows

_CLASS_BITS = 3


class Chunks(NamedTuple):
    """The chunks of each row.

    Attributes:
        starts: chunk i of row b is the slots starts[b, i] to starts[b, i + 1] - 1; entries past
            `count` equal starts[b, count], the first slot that is in no chunk yet.
        count: the number of chunks of each row.
    """

    starts: Int32[Array, "B C+1"]
    count: Rows  # pyright: ignore[reportIncompatibleMethodOverride]


def marks(table: UInt8[Array, "V 2"], tokens: Int32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Looks up the boundary marks of tokens: a class in 3 bits, flags above them."""
    packed = table[:, 0] | table[:, 1] << _CLASS_BITS
    return packed[tokens]


def boundaries(marks: UInt8[Array, "B S"]) -> UInt8[Array, "B S"]:
    """Returns the class of the boundary after each slot, from the marks of it and its neighbours.

    A blank at the start of the next token makes a boundary of class 4 if there is no other. A token
    of newlines only, after one that ends in a newline, completes an empty line, which is class 1.
    The last slot's boundary may still change from 0 to 4 when a token follows.
    """
    classes, flags = marks & ((1 << _CLASS_BITS) - 1), marks >> _CLASS_BITS
    before = jnp.pad(flags[:, :-1], ((0, 0), (1, 0)))
    after = jnp.pad(flags[:, 1:], ((0, 0), (0, 1)))
    at_blank = (classes == 0) & (after & STARTS_WITH_BLANK > 0)
    empty_line = (flags & IS_NEWLINES > 0) & (before & ENDS_IN_NEWLINE > 0)
    return jnp.where(empty_line, 1, jnp.where(at_blank, 4, classes)).astype(jnp.uint8)


def cut(
    classes: UInt8[Array, "B S"] | None,
    first: Rows | int,
    ends: Rows,
    *,
    capacity: int,
    min_length: int = 8,
    max_length: int = 16,
) -> Chunks:
    """Cuts each row greedily, from slot `first` on, into the chunks that end by `ends`.

    The classes of the first `max_length` slots from its start determine the end of a chunk, so the
    classes of the slots before ends + max_length - min_length must be right. A chunk that would end
    later than `ends` is left out.

    Capacity always suffices for all slots. With u chunks used and s the next start, let the slack
    be max_length · (capacity - u) - (S - s) slots, at least 0 initially. A chunk of n tokens
    reduces it by max_length - n, which is at most max_length - min_length. If less slack is left,
    chunks are cut at `max_length` and reduce it by none. So it never becomes negative, and s ≥ S
    once all chunks are used. It also never grows: once a row must be cut at `max_length`, it is to
    its end.

    Args:
        classes: the class of the boundary after each slot; None cuts every chunk at `max_length`,
            regardless of `min_length`.
        first: at most S; the slots before it belong to no chunk.
        ends: the number of each row's slots that may belong to chunks, at most S.
        capacity: the maximum number of chunks of a row; max_length · capacity must be at least S -
            first.
        min_length: the minimum number of tokens of a chunk.
        max_length: the maximum number of tokens of a chunk.

    Raises:
        ValueError: the sizes contradict each other.
    """
    _check(classes, min_length, max_length)
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: must be at least 1")
    begin = jnp.broadcast_to(jnp.asarray(first, jnp.int32), ends.shape)
    if classes is None:
        return _up_to(ends, _every(max_length, begin, capacity))
    size = classes.shape[1]
    if isinstance(first, int) and not 0 <= size - first <= max_length * capacity:
        raise ValueError(
            f"first={first}: must be from {max(size - max_length * capacity, 0)} to {size}, for "
            f"{capacity} chunks of {max_length} tokens in {size} slots"
        )
    if min_length == max_length:
        return _up_to(ends, _every(max_length, begin, capacity))
    starts = _followed(_next_starts(classes, min_length, max_length), begin, capacity + 1)
    number = jnp.arange(capacity + 1, dtype=jnp.int32)
    full = _must_be_full(starts, number, size, capacity, min_length, max_length)
    turn = jnp.where(jnp.any(full, axis=1), jnp.argmax(full, axis=1), capacity)[:, None]
    at_turn = jnp.take_along_axis(starts, turn, axis=1)
    starts = jnp.where(number <= turn, starts, at_turn + max_length * (number - turn))
    return _up_to(ends, starts)


def cut_on(
    classes: UInt8[Array, "B S"] | None,
    chunks: Chunks,
    ends: Rows,
    *,
    max_new: int,
    min_length: int = 8,
    max_length: int = 16,
) -> Chunks:
    """Adds up to `max_new` chunks to each row, the next ones that `cut` would make.

    It reads only the slots that these chunks could reach. Arguments are those of `cut`; max_new is
    static and small.
    """
    _check(classes, min_length, max_length)
    if max_new < 1:
        raise ValueError(f"max_new={max_new}: must be at least 1")
    starts, count = chunks
    capacity = starts.shape[1] - 1
    number = jnp.arange(capacity + 1, dtype=jnp.int32)
    begin = start = jnp.take_along_axis(starts, count[:, None], axis=1)[:, 0]
    next_starts = None
    if classes is not None:
        window = _window(classes, begin, max_new * max_length)
        next_starts = _next_starts(window, min_length, max_length)
    for _ in range(max_new):
        end = start + max_length
        if classes is not None and next_starts is not None:
            free = begin + jnp.take_along_axis(next_starts, (start - begin)[:, None], axis=1)[:, 0]
            full = _must_be_full(start, count, classes.shape[1], capacity, min_length, max_length)
            end = jnp.where(full, end, free)
        fits = (end <= ends) & (count < capacity)
        start = jnp.where(fits, end, start)
        count = count + fits
        starts = jnp.where(number >= count[:, None], start[:, None], starts)
    return Chunks(starts, count)


def chunks_after(
    chunks: Chunks, before: Rows, max_new: int
) -> tuple[Int32[Array, "B n"], Bool[Array, "B n"], Int32[Array, "B n"], Int32[Array, "B n"]]:
    """Returns the chunks of each row after the first `before`, up to `max_new`.

    Returns:
        Their indices, whether they exist, their first slots, and their lengths, 0 for those that do
        not exist.
    """
    nth = before[:, None] + jnp.arange(max_new, dtype=jnp.int32)
    there = nth < chunks.count[:, None]
    at = jnp.where(there, nth, 0)
    first = jnp.take_along_axis(chunks.starts, at, axis=1)
    lengths = jnp.where(there, jnp.take_along_axis(chunks.starts, at + 1, axis=1) - first, 0)
    return nth, there, first, lengths


def _check(classes: UInt8[Array, "B S"] | None, min_length: int, max_length: int) -> None:
    if not 1 <= (max_length if classes is None else min_length) <= max_length:
        raise ValueError(
            f"min_length={min_length}, max_length={max_length}: must be 1 <= min_length <= "
            "max_length"
        )


def _next_starts(
    classes: UInt8[Array, "B S"], min_length: int, max_length: int
) -> Int32[Array, "B S"]:
    """Returns the slot after a chunk that starts at each slot; the class is 0 past the row."""
    size = classes.shape[1]
    reach = size + max_length - 1
    ranks = jnp.where(classes == 0, 0, 5 - classes.astype(jnp.int32))
    ranks = jnp.pad(ranks, ((0, 0), (0, max_length - 1)))
    ordered = ranks * reach + jnp.arange(reach, dtype=jnp.int32)  # by rank, then by slot
    window = (ordered[:, offset : offset + size] for offset in range(min_length - 1, max_length))
    return reduce(jnp.maximum, window) % reach + 1


def _followed(links: Int32[Array, "B S"], begin: Rows, count: int) -> Int32[Array, "B count"]:
    """Returns the first `count` slots of the chain of links from `begin`; S + 1 past its end."""
    size = links.shape[1]
    links = jnp.pad(jnp.minimum(links, size + 1), ((0, 0), (0, 2)), constant_values=size + 1)
    chain = begin[:, None]
    while chain.shape[1] < count:  # each link spans the chain's current length
        chain = jnp.concatenate([chain, jnp.take_along_axis(links, chain, axis=1)], axis=1)
        links = jnp.take_along_axis(links, links, axis=1)
    return chain[:, :count]


def _must_be_full(
    start: Int32[Array, "..."],
    used: Int32[Array, "..."],
    size: int,
    capacity: int,
    min_length: int,
    max_length: int,
) -> Bool[Array, "..."]:
    """Returns whether a chunk must have `max_length` tokens so that the rest fits."""
    return max_length * (capacity - used) < size - start + max_length - min_length


def _window(classes: UInt8[Array, "B S"], begin: Rows, length: int) -> UInt8[Array, "B length"]:
    """Returns the classes of `length` slots from `begin` on; 0 past the row."""
    slots = begin[:, None] + jnp.arange(length, dtype=jnp.int32)
    return jnp.take_along_axis(classes, slots, axis=1, mode="fill", fill_value=0)


def _every(max_length: int, begin: Rows, capacity: int) -> Int32[Array, "B starts"]:
    return begin[:, None] + max_length * jnp.arange(capacity + 1, dtype=jnp.int32)


def _up_to(ends: Rows, starts: Int32[Array, "B starts"]) -> Chunks:
    """Keeps the chunks that end by `ends`."""
    count = jnp.sum(starts[:, 1:] <= ends[:, None], axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(starts, count[:, None], axis=1)
    return Chunks(jnp.minimum(starts, last), count)
