"""Cases of `quantized_product`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import BLOCK, Blocks
from tests.kernels.cases.named import Named, put


@dataclass(frozen=True)
class Case(Named):
    """A call of `quantized_product`.

    Attributes:
        batch: the axes of x except the last.
        out, width: the sizes of the matrix.
        size: the magnitude of x.
    """

    batch: tuple[int, ...] = (3,)
    out: int = 192
    width: int = 256
    size: float = 1.0
    dtype: str = "bfloat16"

    def inputs(self, rng: np.random.Generator) -> tuple[Float[Array, "*batch in"], Blocks]:
        """Draws x and the matrix; some of its blocks are 0."""
        blocks = self.width // BLOCK
        values = rng.integers(-128, 128, (self.out, blocks, BLOCK), np.int8)
        values *= rng.random((self.out, blocks, 1)) > 0.1
        scales = rng.uniform(1e-4, 1e-2, (blocks, self.out))
        x = self.size * rng.normal(size=(*self.batch, self.width))
        return put(x, self.dtype), {
            "values": put(values.reshape(self.out, -1)),
            "scales": put(scales, np.float16),
        }


CASES = (
    Case("one_row", batch=(1,)),
    Case("few", batch=(2, 1, 3)),
    Case("eight", batch=(8,)),
    Case("sixteen", batch=(16,), out=128),
    Case("thirty", batch=(5, 6), out=128),
    Case("groups", batch=(2, 17), out=64),
    Case("chunks_left_over", width=640),
    Case("many_columns", batch=(2,), out=64, width=2048),
    Case("loud", size=1e6),
)
# shapes that the kernels of few rows do not support, or no kernel does
OTHERS = (
    Case("columns_left_over", width=576),
    Case("one_block", width=32, out=64),
    Case("parts", batch=(2,), out=64, width=4160),
    Case("many_rows", batch=(7, 7)),
    Case("many_rows_left_over", batch=(100,), out=128, width=576),
    Case("pairs_of_programs", batch=(200,), out=320, width=576),  # the last one is past the end
    Case("one_tile", batch=(200,), out=64),  # three more are past the end
    Case("one_chunk", batch=(40,), width=64),
    Case("no_rows", batch=(0,)),
    Case("float32", dtype="float32"),
    Case("float16", dtype="float16"),
    Case("odd_sizes", out=37, width=96),
)
