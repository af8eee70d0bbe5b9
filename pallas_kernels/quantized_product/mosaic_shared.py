# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAbstractUsage=false
"""Code shared by the Mosaic GPU kernels for few and for many rows."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref, vector

from jsparse.pallas_kernels.mosaic_registers import below, index, plus, position

ROWS = 64  # of the matrix: the minimum of a tensor core product
BLOCKS_OF_H100 = 132  # SMs; also of an H200


def tiled(width: int, nbytes: int) -> tuple[Any, ...]:
    """Returns the shared memory layout: tiles of 8 rows, swizzled over their width."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * nbytes)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
def store_registers(_, out, sums) -> None:  # [rows, ROWS], [ROWS, padded]
    """Stores the actual rows of x, which are columns of the sums."""
    row, column = position()
    # parts[i, half]: columns 8 i + column and the next, of the row 8 · half below
    for i, parts in enumerate(sums.registers.reshape(-1, 2)):
        for half, part in enumerate(parts):
            at = index(plus(row, 8 * half))
            for one in range(2):
                own = plus(column, 8 * i + one)
                with mgpu.when(below(own, out.type.shape[0])):
                    memref.store(vector.extract(part, [], [one]), out, [index(own), at])
