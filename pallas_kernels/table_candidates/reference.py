"""Implements `api.table_candidates` in plain jnp: the kernel's oracle, and all of Kurtosis."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, UInt16

from jsparse.pallas_kernels.table_candidates.rules import CandidateRule, Kurtosis
from jsparse.selection import Selection
from jsparse.selection.threshold import top_k_ids
from jsparse.shapes import Lengths

OFFSETS = (-1, 0, 1, 2)
# Ranks have 16 bits: 0 is never listed, 1 is the score 0. The largest score plus MARKED stays below
# NEWEST.
MARKED, NEWEST, SINKS = 2**15, 2**16 - 2, 2**16 - 1


def table_candidates(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    lengths: Lengths,
    rule: CandidateRule,
    *,
    capacity: int,
    sink: int,
) -> Selection:
    """Implements `api.table_candidates` in plain jnp."""
    slots = jnp.arange(vertical.shape[-1], dtype=jnp.int32)
    newest = lengths[..., None] - 1
    ranked = (slots >= sink) & (slots < newest)
    tables = [jnp.where(ranked, table, 0) for table in (vertical, by_slot(distance, lengths))]
    rank = 1 + jnp.maximum(*map(_ordered, tables))
    if isinstance(rule, Kurtosis):
        marked = standing_out(tables, ranked, rule.a)
        rank += jnp.where(marked, jnp.uint16(MARKED), 0)
        always = jnp.minimum(lengths, sink + 1)
        number = jnp.maximum(jnp.sum(marked, -1, dtype=jnp.int32) + always, rule.min_count)
        number = jnp.minimum(number, rule.max_count)
    else:
        number = rule.number
    rank = jnp.where(slots == newest, NEWEST, jnp.where(slots < sink, SINKS, rank))
    rank = jnp.where(slots <= newest, rank, 0)
    ids, count = top_k_ids(rank, jnp.clip(number, 1, capacity), capacity)
    return Selection(ids, count, granularity="token")


def by_slot(distance: BFloat16[Array, "B K S"], lengths: Lengths) -> BFloat16[Array, "B K S"]:
    """Converts a table over distance to one over slots; slots from a head's length on have 0.

    It slices the reversed table, because a CPU gathers single entries slowly.
    """
    size = distance.shape[-1]
    backwards = jnp.pad(distance[..., ::-1], ((0, 0), (0, 0), (0, size)))
    cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=size)
    return jax.vmap(jax.vmap(cut))(backwards, size - lengths)


def standing_out(
    tables: list[BFloat16[Array, "B K S"]], ranked: Bool[Array, "B K S"], a: float
) -> Bool[Array, "B K S"]:
    """Marks the peaks of either table, and their eligible neighbours.

    Both tables are by slot, and 0 for unranked slots.
    """
    number = jnp.maximum(jnp.sum(ranked, -1, dtype=jnp.int32), 1)[..., None]
    out, above_mean = jnp.zeros_like(ranked), jnp.zeros_like(ranked)
    for table in tables:
        x = table.astype(jnp.float32)
        greatest = jnp.max(jnp.abs(x), -1, keepdims=True)
        x /= jnp.where(greatest > 0, greatest, 1.0)  # otherwise fourth powers overflow float32
        mean = jnp.sum(x, -1, keepdims=True) / number
        out |= x > threshold(x, mean, ranked, a)
        above_mean |= x > mean
    out &= ranked
    size = ranked.shape[-1]
    padded = jnp.pad(out, ((0, 0), (0, 0), (max(OFFSETS), -min(OFFSETS))))
    near = jnp.zeros_like(ranked)
    for offset in OFFSETS:
        first = max(OFFSETS) - offset
        near |= padded[..., first : first + size]
    return near & above_mean & ranked


def threshold(
    x: Float32[Array, "B K S"],
    mean: Float32[Array, "B K 1"],
    ranked: Bool[Array, "B K S"],
    a: float,
) -> Float32[Array, "B K 1"]:
    """Returns a · mean / κ of the ranked entries, +inf if they are all equal."""
    squares = jnp.where(ranked, (x - mean) ** 2, 0.0)
    total = jnp.sum(squares, -1, keepdims=True)
    return jnp.where(
        total > 0, a * mean * total**2 / jnp.sum(squares**2, -1, keepdims=True), jnp.inf
    )


def _ordered(scores: BFloat16[Array, "B K S"]) -> UInt16[Array, "B K S"]:
    """Maps scores to the numbers 0 to 2^15 - 1 in the same order, and negative ones to 0."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int16)  # negative if the sign is set
    return jnp.maximum(bits, 0).astype(jnp.uint16)
