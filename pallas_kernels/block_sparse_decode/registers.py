# pyright: reportCallIssue=false, reportPrivateImportUsage=false
"""Defines the register operations of a multiplying warpgroup, on a GPU and in the interpreter."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from jsparse.pallas_kernels.block_sparse_decode.problem import FIRST_ROW, M, Problem
from jsparse.pallas_kernels.mosaic_registers import (
    THREADS,
    below,
    constant,
    divided,
    index,
    plus,
    position,
    remainder,
)

LOG2_E = 1.4426950408889634


class Operations(NamedTuple):
    """Collects the operations on float32[M, tokens] or [M, H] in registers.

    Attributes:
        product: (q, k in shared memory) -> q·kᵀ.
        add_product: (acc, weights, v in shared memory) -> acc + weights·v.
        add_bias: (the bias of a tile's pages, each in a row of shared memory; logits in base 2) ->
            their sum.
        store_rows: (o, lse in memory; run; x, y) stores the head's rows of x and y.
        store_row: (row in memory; run; x) stores the mean query's row of x, the first of the
            head's.
        add_by_warp: (int32[≥ n, warps] in shared memory; n vectors of the warpgroup) adds up what
            each warp has of each vector, and waits until all have.
        load_heads: (int32[pairs] in memory) -> int32[padded], with zeros to a multiple of the
            warpgroup's threads.

    The run is a row of run_s in shared memory; its entry FIRST_ROW is the head's first row.
    """

    product: Callable[..., Any]
    add_product: Callable[..., Any]
    add_bias: Callable[..., Any]
    store_rows: Callable[..., None]
    store_row: Callable[..., None]
    add_by_warp: Callable[..., None]
    load_heads: Callable[..., Any]


def operations(p: Problem) -> Operations:
    """Returns the operations of the GPU, or of the interpreter."""
    if not p.interpret:
        return Operations(
            *(_wgmma, _add_wgmma, _bias_adder(p), _store_rows, _store_row),
            *(_add_by_warp, _heads_loader(p)),
        )

    def add_bias(bias_s, logits):  # [pages_a_tile, ≥ P], [M, tokens]
        return logits + LOG2_E * bias_s[:, : p.page_size].reshape(-1)

    def rows(run_s, x):
        return lax.dynamic_slice_in_dim(x, run_s[FIRST_ROW], p.queries)

    def store_rows(o_ref, lse_ref, run_s, x, y):  # [queries, H], [queries], [8], [M, H], [M]
        o_ref[...], lse_ref[...] = rows(run_s, x), rows(run_s, y)

    def store_row(row_ref, run_s, x):  # [tokens], [8], [M, tokens]
        row_ref[...] = rows(run_s, x)[0]

    def add_by_warp(sums_s, *vectors):  # [≥ n, warps], n times [padded]
        for i, x in enumerate(vectors):
            sums_s[i] = jnp.zeros(sums_s.shape[1:], jnp.int32).at[0].set(jnp.sum(x))

    def load_heads(ref):  # [pairs]
        return jnp.pad(ref[...], (0, p.padded_pairs - p.pairs))

    return Operations(_dot, _add_dot, add_bias, store_rows, store_row, add_by_warp, load_heads)


def _dot(q_s, k_s):  # [M, H], [tokens, H]
    return jnp.dot(q_s[...], k_s[...].T, preferred_element_type=jnp.float32)


def _add_dot(acc, weights, v_s):  # [M, H], [M, tokens], [tokens, H]
    return acc + jnp.dot(weights, v_s[...], preferred_element_type=jnp.float32)


def _wgmma(q_s, k_s):  # [M, H], [tokens, H]
    def product(acc):
        plgpu.wgmma(acc, q_s, k_s.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q_s.shape[0], k_s.shape[0]), jnp.float32))


def _add_wgmma(acc, weights, v_s):  # [M, H], [M, tokens], [tokens, H]
    # the weights go in from registers, where the softmax left them
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_s))(plgpu.ACC.init(acc))


def _bias_adder(p: Problem):
    shape = plgpu.ShapeDtypeStruct((M, p.tiles.tokens), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=shape)
    def add_bias(_, bias_ref, logits):
        def biased(value, at):  # the row and the column, which is page · P + token
            bias = memref.load(bias_ref, divided(at[1], p.page_size))
            return arith.addf(value, arith.mulf(bias, arith.constant(value.type, LOG2_E)))

        return logits.foreach(biased, create_array=True)

    return add_bias


@plgpu.inline_mgpu(
    arg_types=(
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.Layout.WGMMA,
        plgpu.Layout.WGMMA.reduce(1),
    ),
)
def _store_rows(_, o_ref, lse_ref, run_s, x, y):  # [queries, H], [queries], [8], [M, H], [M]
    row, column = _position(run_s)
    # parts[i, half]: columns 8 i + column and the next, of the row that lies 8 · half below
    parts, scalars = x.registers.reshape(-1, 2), y.registers.reshape(2)
    for half in range(2):
        with mgpu.when(below(row, o_ref.type.shape[0])):
            at = index(row)
            for i, part in enumerate(parts[:, half]):
                vector.store(part, o_ref, [at, index(plus(column, 8 * i))])
            # the four threads that share a row store the same lse
            memref.store(vector.extract(scalars[half], [], [0]), lse_ref, [at])
        row = plus(row, 8)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA))
def _store_row(_, row_ref, run_s, x):  # [tokens], [8], [M, tokens]
    row, column = _position(run_s)  # a head's first row is one of the first 8
    with mgpu.when(below(row, 1)):
        for i, part in enumerate(x.registers.reshape(-1, 2)[:, 0]):
            vector.store(part, row_ref, [index(plus(column, 8 * i))])


def _add_by_warp(sums_s, *vectors):  # [≥ n, warps], n times [padded]
    layouts = (plgpu.Layout.WG_STRIDED(x.shape, 1) for x in vectors)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *layouts))
    def add(_, sums_s, *vectors):
        warp = index(divided(remainder(mgpu.thread_idx(), THREADS), 32)[0])
        for i, x in enumerate(vectors):
            own = [vector.extract(register, [], [0]) for register in x.registers.flat]
            number = reduce(arith.addi, own)
            every_lane = constant(number, -1)
            part = utils.redux(number, every_lane, utils.ReductionKind.ADD)
            memref.store(part, sums_s, [constant(warp, i), warp])  # by all lanes, the same
        utils.warpgroup_barrier()

    add(sums_s, *vectors)


def _position(run_s):
    """Returns the first row and column that this thread holds; rows count from the head's first."""
    row, column = position()
    first = memref.load(run_s, [arith.constant(ir.IndexType.get(), FIRST_ROW)])
    return arith.subi(row, first), column


def _heads_loader(p: Problem):
    shape = (p.padded_pairs,)
    layout = plgpu.Layout.WG_STRIDED(shape, 1)
    strided = mgpu.WGStridedFragLayout(shape, 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout),
    )
    def load_heads(_, ref):  # [pairs]
        # no load is masked: past the end the last head is read, and 0 taken in its place
        registers = []
        for at in strided.linear_thread_idxs():
            last = constant(at, p.pairs - 1)
            value = memref.load(ref, [arith.minui(at, last)])
            there = arith.cmpi(arith.CmpIPredicate.ule, at, last)
            registers.append(arith.select(there, value, constant(value, 0)))
        vectors = [
            vector.broadcast(ir.VectorType.get((1,), value.type), value) for value in registers
        ]
        return mgpu.FragmentedArray(
            _registers=np.array(vectors, dtype=object), _layout=strided, _is_signed=True
        )

    return load_heads
