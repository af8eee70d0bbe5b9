# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Holds what the kernels in Mosaic GPU for few and for many rows have in common."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref, vector

from jsparse.pallas_kernels.mosaic_registers import below, index, plus, position

ROWS = 64  # of the matrix, the least that a product in tensor cores has
BLOCKS_OF_H100 = 132  # multiprocessors; also those of an H200


def tiled(width: int, nbytes: int) -> tuple[Any, ...]:
    """Returns how shared memory keeps tiles of 8 rows, swizzled over their width."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * nbytes)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
def store_registers(_, out, sums) -> None:  # [rows, ROWS], [ROWS, padded]
    """Stores the rows of x that count, which are columns of the sums."""
    row, column = position()
    # parts[i, half]: columns 8 i + column and the next, of the row that lies 8 · half below
    for i, parts in enumerate(sums.registers.reshape(-1, 2)):
        for half, part in enumerate(parts):
            at = index(plus(row, 8 * half))
            for one in range(2):
                own = plus(column, 8 * i + one)
                with mgpu.when(below(own, out.type.shape[0])):
                    memref.store(vector.extract(part, [], [one]), out, [index(own), at])
