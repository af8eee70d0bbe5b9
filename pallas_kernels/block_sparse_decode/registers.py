# pyright: reportCallIssue=false, reportPrivateImportUsage=false
"""Register operations of the consumer warpgroup, for a GPU and for the interpreter."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from jsparse.pallas_kernels.block_sparse_decode.problem import FIRST_ROW, LANE, WARPS, Problem
from jsparse.pallas_kernels.block_sparse_decode.refs import storage
from jsparse.pallas_kernels.block_sparse_decode.schedule import TOKENS
from jsparse.pallas_kernels.mosaic_registers import (
    THREADS,
    below,
    constant,
    divided,
    index,
    plus,
    position,
    remainder,
    times,
)

LOG2_E = 1.4426950408889634
WGMMA = plgpu.Layout.WGMMA


class Operations(NamedTuple):
    """Operations on float32[tokens, queries] or [H, queries] in registers.

    A "run" argument is a row of run_s in shared memory; its entry FIRST_ROW is the head's first
    query.

    Attributes:
        product: (k, q in shared memory) -> k·qᵀ.
        add_product: (acc, v, weights in shared memory) -> acc + vᵀ·weightsᵀ.
        add_bias: (the bias of a tile's pages, one row of shared memory per page; logits in base 2)
            -> their sum.
        over_tokens: ("max" or "add"; x; float32[warps, queries] in shared memory) ->
            float32[queries], reduced over all tokens. It synchronises the warpgroup between writing
            and reading this memory; the caller must synchronise again before it reuses the memory.
        store_weights: ([queries, tokens] in shared memory; x) stores xᵀ.
        store_columns: (o, lse in memory; run; x, y) stores the head's columns of x as rows of o,
            and the head's columns of y as lse.
        store_column: (row in memory; run; x) stores the mean query's column of x, the head's first.
        add_by_warp: (int32[≥ n, warps] in shared memory; n vectors of the warpgroup) sums each
            warp's part of each vector, and synchronises the warpgroup.
        load_heads: (int32[pairs] in memory) -> int32[padded], padded with zeros to a multiple of
            the warpgroup's threads.
    """

    product: Callable[..., Any]
    add_product: Callable[..., Any]
    add_bias: Callable[..., Any]
    over_tokens: Callable[..., Any]
    store_weights: Callable[..., None]
    store_columns: Callable[..., None]
    store_column: Callable[..., None]
    add_by_warp: Callable[..., None]
    load_heads: Callable[..., Any]


def operations(p: Problem) -> Operations:
    """Returns the operations for a GPU or for the interpreter."""
    if not p.interpret:
        return Operations(
            *(_wgmma, _add_wgmma, _bias_adder(p), _over_tokens, _store_weights),
            *(_store_columns, _store_column, _add_by_warp, _heads_loader(p)),
        )

    def product(k_s, q_s):  # [tokens, H], [queries, H]
        return jnp.dot(k_s[...], q_s[...].T, preferred_element_type=jnp.float32)

    def add_product(acc, v_s, weights_s):  # [H, queries], [tokens, H], [queries, tokens]
        return acc + jnp.dot(v_s[...].T, weights_s[...].T, preferred_element_type=jnp.float32)

    def add_bias(bias_s, logits):  # [pages_a_tile, ≥ P], [tokens, queries]
        return logits + LOG2_E * bias_s[:, : p.page_size].reshape(-1, 1)

    def over_tokens(how, x, _):  # [tokens, queries]
        return {"max": jnp.max, "add": jnp.sum}[how](x, axis=0)

    def store_weights(weights_s, x):  # [queries, tokens], [tokens, queries]
        weights_s[...] = x.T

    def columns(run_s, x):
        return lax.dynamic_slice_in_dim(x, run_s[FIRST_ROW], p.queries, axis=-1)

    def store_columns(o_ref, lse_ref, run_s, x, y):  # [queries, H], [queries], [8], [H, queries], …
        o_ref[...], lse_ref[...] = columns(run_s, x).T, columns(run_s, y)

    def store_column(row_ref, run_s, x):  # [tokens], [8], [tokens, queries]
        row_ref[...] = columns(run_s, x)[:, 0]

    def add_by_warp(sums_s, *vectors):  # [≥ n, warps], n times [padded]
        for i, x in enumerate(vectors):
            sums_s[i] = jnp.zeros(sums_s.shape[1:], jnp.int32).at[0].set(jnp.sum(x))

    def load_heads(ref):  # [pairs]
        return jnp.pad(ref[...], (0, p.padded_pairs - p.pairs))

    return Operations(
        *(product, add_product, add_bias, over_tokens, store_weights),
        *(store_columns, store_column, add_by_warp, load_heads),
    )


def _wgmma(k_s, q_s):  # [tokens, H], [queries, H]
    def product(acc):
        plgpu.wgmma(acc, k_s, q_s.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((k_s.shape[0], q_s.shape[0]), jnp.float32))


def _add_wgmma(acc, v_s, weights_s):  # [H, queries], [tokens, H], [queries, tokens]
    def add(ref):
        plgpu.wgmma(ref, v_s.transpose((1, 0)), weights_s.transpose((1, 0)))

    return pl.run_state(add)(plgpu.ACC.init(acc))


def _bias_adder(p: Problem):
    shape = plgpu.ShapeDtypeStruct((TOKENS, p.columns), jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=shape)
    def add_bias(_, bias_ref, logits):
        def biased(value, at):  # the row, page · P + token, and the column
            bias = memref.load(bias_ref, divided(at[0], p.page_size))
            return arith.addf(value, arith.mulf(bias, arith.constant(value.type, LOG2_E)))

        return logits.foreach(biased, create_array=True)

    return add_bias


def _over_tokens(how, x, reduced_s):  # [tokens, queries], [warps, queries]
    layout = WGMMA.reduce(0)
    result = plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=result)
    def over(_, x, reduced_s):
        combined = partial(reduce, arith.maximumf if how == "max" else arith.addf)
        (warp, _), (_, column) = divided(remainder(mgpu.thread_idx(), THREADS), 32), position()
        columns = [index(plus(column, 8 * i)) for i in range(x.shape[1] // 8)]
        for i, at in enumerate(columns):
            value = combined(_registers(x)[:, i].flat)
            for distance in (4, 8, 16):  # lanes with other rows of the same columns
                value = combined((value, utils.shfl_bfly(value, distance)))
            vector.store(value, reduced_s, [index(warp), at])  # all of them store the same value
        utils.warpgroup_barrier()
        kind = ir.VectorType.get((2,), ir.F32Type.get())
        first = arith.constant(ir.IndexType.get(), 0)
        values = [
            combined(
                vector.load(kind, reduced_s, [arith.addi(first, constant(first, nth)), at])
                for nth in range(WARPS)
            )
            for at in columns
        ]
        own = layout.to_mgpu()
        registers = np.array(values, dtype=object).reshape(own.registers_shape(x.shape[1:]))
        return mgpu.FragmentedArray(_registers=registers, _layout=own, _is_signed=None)

    return over(x, reduced_s)


def _store_weights(weights_s, x):  # [queries, tokens], [tokens, queries]
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(storage()), WGMMA))
    def store(_, weights_s, x):
        to = utils.memref_ptr(weights_s)
        tokens, (row, column) = x.shape[0] // LANE, position()
        for (m, i, half), two in np.ndenumerate(_registers(x)):
            # the token's index in its tile of 8 queries; 16 bytes are swizzled together
            of_eight, rest = divided(plus(row, 8 * half), 8)
            for nth in range(2):
                query = plus(column, nth)
                start = arith.addi(times(query, LANE), times(arith.xori(of_eight, query), 8))
                at = plus(arith.addi(start, rest), (i * tokens + m) * 8 * LANE)
                value = vector.extract(two, [], [nth])
                llvm.store(value, utils.getelementptr(to, [at], value.type))

    store(weights_s, x)


@plgpu.inline_mgpu(
    arg_types=(
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(),
        WGMMA,
        WGMMA.reduce(0),
    ),
)
def _store_columns(_, o_ref, lse_ref, run_s, x, y):  # [queries, H], [queries], [8], [H, queries], …
    channel, query = _position(run_s)
    registers, scalars = _registers(x), y.registers.reshape(-1)
    for i, nth in np.ndindex(registers.shape[1], 2):
        own = plus(query, 8 * i + nth)
        with mgpu.when(below(own, o_ref.type.shape[0])):
            for (m, half), two in np.ndenumerate(registers[:, i]):
                to = index(plus(channel, LANE * m + 8 * half))
                memref.store(vector.extract(two, [], [nth]), o_ref, [index(own), to])
            # threads that share a column store the same lse
            memref.store(vector.extract(scalars[i], [], [nth]), lse_ref, [index(own)])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), WGMMA))
def _store_column(_, row_ref, run_s, x):  # [tokens], [8], [tokens, queries]
    token, query = _position(run_s)  # a head's first query is one of the first 8
    for nth in range(2):
        with mgpu.when(below(plus(query, nth), 1)):
            for (m, half), two in np.ndenumerate(_registers(x)[:, 0]):
                to = index(plus(token, LANE * m + 8 * half))
                memref.store(vector.extract(two, [], [nth]), row_ref, [to])


def _registers(x):
    """Returns registers of [64 m, 8 n] by m, n and one of two rows, 8 apart.

    Each register has two columns.
    """
    return x.registers.reshape(x.shape[0] // LANE, x.shape[1] // 8, 2)


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
            memref.store(part, sums_s, [constant(warp, i), warp])  # all lanes store the same value
        utils.warpgroup_barrier()

    add(sums_s, *vectors)


def _position(run_s):
    """Returns this thread's first row and column; columns count from the head's first."""
    row, column = position()
    first = memref.load(run_s, [arith.constant(ir.IndexType.get(), FIRST_ROW)])
    return row, arith.subi(column, first)


def _heads_loader(p: Problem):
    shape = (p.padded_pairs,)
    layout = plgpu.Layout.WG_STRIDED(shape, 1)
    strided = mgpu.WGStridedFragLayout(shape, 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout),
    )
    def load_heads(_, ref):  # [pairs]
        # unmasked loads: indices past the end read the last head, and 0 replaces it
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
