"""Implements `api.expert_product` in jax-triton, with tensor cores.

A program multiplies some rows of one expert by some columns of its matrix. With few pairs, a decode
step's, there is no sorting: each pair has programs, those of an expert's first pair find the
expert's other pairs, and all others exit; or each expert has, if there are fewer of these. More
pairs are first sorted by expert into blocks.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.expert_product import xla_blocks
from jsparse.pallas_kernels.expert_product.grouping import grouped

FEW = 512  # pairs that a program compares without sorting
SIZES = (16, 128)  # the least and most rows of a block


class Tiling(NamedTuple):
    """Division of the work.

    Attributes:
        rows: rows of a matrix per tile.
        columns: columns per program, of gate and of up if gated.
        num_warps: warps per program.
        num_stages: tiles in flight.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


FEW_TILING = Tiling(128, 64, 8, 4)  # the fastest on an H200 for Qwen3 30B-A3B's experts


def many_tiling(*, gated: bool) -> Tiling:
    """Returns the tiling for many pairs."""
    return Tiling(64, 64 if gated else 128, 8, 3)


def expert_product(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None = None,
    *,
    gated: bool = False,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
) -> Float[Array, "k R made"]:
    """Implements `api.expert_product`; only with more than `FEW` pairs does it have a gradient."""
    dtype = jnp.dtype(dtype or x.dtype)
    if chosen.size <= FEW:
        return _few(x, matrices, chosen, weights, gated, dtype, tiling)
    return _many(x, matrices, chosen, weights, gated, dtype, tiling)


def _few(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None,
    gated: bool,
    dtype: Any,
    tiling: Tiling | None,
) -> Float[Array, "k R made"]:
    from jsparse.pallas_kernels.triton_call import triton_call

    made, pairs, cut = _made(matrices, gated), chosen.size, tiling or FEW_TILING
    by_expert = pairs > len(matrices)
    y = triton_call(
        x,
        matrices,
        chosen,
        chosen if weights is None else weights,  # placeholder, never read
        kernel=few_kernel,
        out_shape=jax.ShapeDtypeStruct((*chosen.shape, made), dtype),
        grid=(triton.cdiv(made, cut.columns), min(pairs, len(matrices))),
        PAIRS=pairs,
        PADDED=triton.next_power_of_2(pairs),
        BY_EXPERT=by_expert,
        SIZE=SIZES[0],
        **_sizes(x, matrices, made, cut, gated=gated, weighted=weights is not None),
    )
    return _without_absent(y, chosen, len(matrices)) if by_expert else y


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _many(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    chosen: Int32[Array, "k R"],
    weights: Float32[Array, "k R"] | None,
    gated: bool,
    dtype: Any,
    tiling: Tiling | None,
) -> Float[Array, "k R made"]:
    from jsparse.pallas_kernels.triton_call import triton_call

    made, experts, cut = _made(matrices, gated), len(matrices), tiling or many_tiling(gated=gated)
    least, most = SIZES
    size = min(max(triton.next_power_of_2(triton.cdiv(chosen.size, experts)), least), most)
    groups = grouped(chosen, experts, size)
    y = triton_call(
        x,
        matrices,
        groups.pairs,
        groups.experts,
        chosen if weights is None else weights,  # placeholder, never read
        kernel=many_kernel,
        out_shape=jax.ShapeDtypeStruct((*chosen.shape, made), dtype),
        grid=(triton.cdiv(made, cut.columns), len(groups.experts)),
        PAIRS=chosen.size,
        SIZE=size,
        **_sizes(x, matrices, made, cut, gated=gated, weighted=weights is not None),
    )
    return _without_absent(y, chosen, experts)


def _many_forward(
    x: Array, matrices: Array, chosen: Array, weights: Array | None, *how: Any
) -> tuple[Array, Any]:
    return _many(x, matrices, chosen, weights, *how), (x, matrices, chosen, weights)


def _many_backward(gated: bool, dtype: Any, _: Any, kept: Any, change: Array) -> tuple[Any, ...]:
    x, matrices, chosen, weights = kept

    def product(x: Array, matrices: Array, weights: Array | None) -> Array:
        given = x, matrices, chosen, weights
        return xla_blocks.expert_product(*given, gated=gated, dtype=dtype)

    of_x, of_matrices, of_weights = jax.vjp(product, x, matrices, weights)[1](change)
    return of_x, of_matrices, None, of_weights


_many.defvjp(_many_forward, _many_backward)


def _without_absent(
    y: Float[Array, "k R made"], chosen: Int32[Array, "k R"], experts: int
) -> Float[Array, "k R made"]:
    """Returns products with zeros for pairs without an expert, which no program has written."""
    return jnp.where((chosen < experts)[..., None], y, 0)


def _made(matrices: Float[Array, "E in out"], gated: bool) -> int:
    return matrices.shape[2] // 2 if gated else matrices.shape[2]


def _sizes(
    x: Float[Array, "*rows in"],
    matrices: Float[Array, "E in out"],
    made: int,
    cut: Tiling,
    *,
    gated: bool,
    weighted: bool,
) -> dict[str, Any]:
    return {
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
        "X_ROWS": x.size // x.shape[-1],
        "EXPERTS": matrices.shape[0],
        "WIDTH": matrices.shape[1],
        "TOTAL": matrices.shape[2],
        "MADE": made,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "GATED": gated,
        "WEIGHTED": weighted,
    }


@triton.jit
def few_kernel(
    x_ptr,  # [X_ROWS, WIDTH]
    matrices_ptr,  # [EXPERTS, WIDTH, TOTAL]
    chosen_ptr,  # [PAIRS]
    weights_ptr,  # [PAIRS], read where WEIGHTED
    out_ptr,  # [PAIRS, MADE]
    X_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOTAL: tl.constexpr,
    MADE: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Multiplies all rows of an expert by COLUMNS columns of its matrix.

    The expert is the program's own if BY_EXPERT, else that of its pair, if no earlier pair has it.
    """
    own = tl.program_id(1)
    expert = own if BY_EXPERT else tl.load(chosen_ptr + own)
    if expert >= EXPERTS:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        zeros = tl.zeros((COLUMNS,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + own * MADE + column, zeros, mask=column < MADE)
    else:
        pair = tl.arange(0, PADDED)
        chosen = tl.load(chosen_ptr + pair, mask=pair < PAIRS, other=EXPERTS)
        same = chosen == expert
        found = tl.min(tl.where(same, pair, PADDED), 0)
        if BY_EXPERT:
            found = tl.where(found < PADDED, own, PADDED)
        if found == own:
            count = tl.sum(same.to(tl.int32), 0)
            for first in range(0, count, SIZE):
                place = first + tl.arange(0, SIZE)
                pairs = _pairs_at(chosen_ptr, expert, place, PAIRS, min(PADDED, 128), SIZE)
                _multiply(
                    x_ptr,
                    matrices_ptr,
                    weights_ptr,
                    out_ptr,
                    expert,
                    pairs,
                    place < count,
                    X_ROWS,
                    WIDTH,
                    TOTAL,
                    MADE,
                    SIZE,
                    ROWS,
                    COLUMNS,
                    GATED,
                    WEIGHTED,
                )


@triton.jit
def _pairs_at(
    chosen_ptr, expert, place, PAIRS: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr
):
    """Returns the pairs at SIZE places among those of an expert; 0 past the last.

    It reads `chosen` again, part by part: all pairs would take registers that products need.
    """
    pairs = tl.zeros((SIZE,), tl.int32)
    before = 0
    for first in range(0, PAIRS, PART):
        pair = first + tl.arange(0, PART)
        same = tl.load(chosen_ptr + pair, mask=pair < PAIRS, other=-1) == expert
        nth = before + tl.cumsum(same.to(tl.int32), 0) - 1
        here = same[None, :] & (nth[None, :] == place[:, None])
        pairs += tl.sum(tl.where(here, pair[None, :], 0), 1)
        before += tl.sum(same.to(tl.int32), 0)
    return pairs


@triton.jit
def many_kernel(
    x_ptr,  # [X_ROWS, WIDTH]
    matrices_ptr,  # [EXPERTS, WIDTH, TOTAL]
    pairs_ptr,  # [blocks, SIZE]; PAIRS: no pair
    experts_ptr,  # [blocks]; EXPERTS: no pairs
    weights_ptr,  # [PAIRS], read where WEIGHTED
    out_ptr,  # [PAIRS, MADE]
    X_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOTAL: tl.constexpr,
    MADE: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Multiplies a block's rows by COLUMNS columns of its expert's matrix."""
    block = tl.program_id(1)
    expert = tl.load(experts_ptr + block)
    if expert < EXPERTS:
        pairs = tl.load(pairs_ptr + block * SIZE + tl.arange(0, SIZE))
        _multiply(
            x_ptr,
            matrices_ptr,
            weights_ptr,
            out_ptr,
            expert,
            pairs,
            pairs < PAIRS,
            X_ROWS,
            WIDTH,
            TOTAL,
            MADE,
            SIZE,
            ROWS,
            COLUMNS,
            GATED,
            WEIGHTED,
        )


@triton.jit
def _multiply(
    x_ptr,
    matrices_ptr,
    weights_ptr,
    out_ptr,
    expert,
    pairs,
    valid,
    X_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOTAL: tl.constexpr,
    MADE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Multiplies the rows of SIZE pairs, some of them valid, by the program's columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    xs = x_ptr + (pairs % X_ROWS).to(tl.int64)[:, None] * WIDTH
    matrix = matrices_ptr + expert.to(tl.int64) * (WIDTH * TOTAL)
    sums = tl.zeros((SIZE, COLUMNS), tl.float32)
    ups = tl.zeros((SIZE, COLUMNS), tl.float32)
    for first in range(0, WIDTH, ROWS):
        nth = first + row
        x = tl.load(xs + nth[None, :], mask=valid[:, None] & (nth < WIDTH)[None, :], other=0)
        at = matrix + nth[:, None] * TOTAL + column[None, :]
        inside = (nth < WIDTH)[:, None] & (column < MADE)[None, :]
        sums = tl.dot(x, tl.load(at, mask=inside, other=0), sums)
        if GATED:
            ups = tl.dot(x, tl.load(at + MADE, mask=inside, other=0), ups)
    if GATED:
        sums = sums / (1 + tl.exp(-sums)) * ups
    if WEIGHTED:
        sums *= tl.load(weights_ptr + pairs, mask=valid, other=0)[:, None]
    at = out_ptr + pairs.to(tl.int64)[:, None] * MADE + column[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (column < MADE)[None, :])
