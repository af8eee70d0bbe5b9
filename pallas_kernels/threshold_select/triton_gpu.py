"""Implements `api.threshold_select` with jax-triton, in the one launch of triton_kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.pallas_kernels.threshold_select.rules import Budget, Rule, Threshold, TopK, TopP
from jsparse.pallas_kernels.threshold_select.triton_kernel import Lists, select_kernel
from jsparse.pallas_kernels.threshold_select.triton_tiles import SearchedRow
from jsparse.selection import Selection
from jsparse.shapes import Lengths

RULES = {TopK: "top_k", TopP: "top_p", Threshold: "threshold", Budget: "budget"}


class SelectTiling(NamedTuple):
    """Describes how a row is shared out; what is chosen depends on it only by the order of sums.

    Under a budget a row's sizes lie beside its scores: tiles have half as many entries, and half as
    many end a search.

    Attributes:
        entries: entries of a tile per thread. With more there are fewer threads, which repeat less
            of the work that every thread does.
        tile: most entries per tile; 32768 floats are half of a multiprocessor's registers.
        threads: least number of threads per row.
        few: most entries that may be drawn out of a row, or listed, to end a search, a power of
            two; at most one per four threads. 0 draws none.
    """

    entries: int = 64
    tile: int = 32768
    threads: int = 128
    # drawing took top-p of 64 x 32K from 23.5 to 19.4 us, and of 256 x 32K from 43.4 to 41.6; top-k
    # of the latter from 39.6 to 44.1 (bench/README.md)
    few: int = 128


def threshold_select(
    scores: Float[Array, "B K G n"],
    rule: Rule,
    *,
    capacity: int,
    granularity: str,
    page_size: int,
    weights: str,
    group: str,
    lengths: Lengths | None,
    names: Int32[Array, "B K m"] | None,
    tiling: SelectTiling | None = None,
) -> Selection:
    """Implement `api.threshold_select` with jax-triton."""
    from jsparse.pallas_kernels.triton_call import triton_call

    batch, heads = scores.shape[:2]
    setting = rule[0]
    static = isinstance(setting, int | float)
    sizes = rule.sizes if isinstance(rule, Budget) else None
    plan = make_plan(
        scores.shape,
        RULES[type(rule)],
        float(setting) if static else None,
        capacity=capacity,
        granularity=granularity,
        page_size=page_size,
        sharing=1 if sizes is None else heads // sizes.shape[1],
        softmax=weights == "softmax",
        pooled=group == "max" and scores.shape[2] > 1,
        with_lengths=lengths is not None,
        names=0 if names is None else names.shape[-1],
        tiling=tiling or SelectTiling(),
    )
    listed = jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32)
    outputs = (
        listed,
        jax.ShapeDtypeStruct((batch, heads), jnp.int32),  # count
        jax.ShapeDtypeStruct(listed.shape if plan.with_bits else (1,), jnp.uint32),
        # from here on memory that the kernel works in: bitmaps, floats, rows that have finished
        jax.ShapeDtypeStruct((batch * heads, plan.words), jnp.uint32),
        jax.ShapeDtypeStruct((batch * heads, max(plan.floats, 1)), jnp.float32),
        jax.ShapeDtypeStruct((batch * heads,), jnp.int32),
    )
    ids, count, bits, *_ = triton_call(
        scores,
        scores if static else setting,  # scores stand in for arrays that the call lacks
        scores if sizes is None else sizes,
        scores if lengths is None else lengths,
        scores if names is None else names,
        kernel=select_kernel,
        out_shape=outputs,
        grid=(batch * heads * plan.rows,),
        num_warps=plan.row.threads // 32,
        num_stages=1,
        zeroed_outputs=(len(outputs) - 1,) if plan.rows > 1 else (),
        plan=plan,
    )
    bits = bits if plan.with_bits else None
    return Selection(
        ids, count, bits=bits, granularity="token" if granularity == "token" else "page"
    )


def make_plan(
    shape: tuple[int, ...],
    rule: str,
    value: float | None,
    *,
    capacity: int,
    granularity: str,
    page_size: int,
    sharing: int,
    softmax: bool,
    pooled: bool,
    with_lengths: bool,
    names: int,
    tiling: SelectTiling,
) -> Lists:
    """Collect the static parameters of one launch."""
    group, scored = shape[2:]
    by_mass = granularity == "page_mass"
    size = scored // page_size if by_mass else scored
    units = scored // page_size
    if rule == "budget":  # sizes take as many registers as scores
        tiling = tiling._replace(
            entries=tiling.entries // 2, tile=tiling.tile // 2, few=tiling.few // 2
        )
    threads = max(_power_of_two(min(scored, tiling.tile)) // tiling.entries, tiling.threads)

    def runs(entries: int) -> int:
        return max(min(_power_of_two(entries), tiling.tile) // (4 * threads), 1)

    row = SearchedRow(rule, value, softmax, pooled, size, threads, runs(size), tiling.few)
    # no list can be too long: there are no more units, or one row chooses, and the kernel lowers
    # its k to the capacity
    fits = capacity >= units or (rule == "top_k" and size == units and (pooled or group == 1))
    cap = (
        None
        if fits
        else SearchedRow("top_k", None, False, False, units, threads, runs(units), tiling.few)
    )
    return Lists(
        row,
        cap,
        group,
        sharing,
        pooled,
        by_mass,
        page_size,
        capacity,
        granularity == "bits",
        with_lengths,
        names,
    )


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
