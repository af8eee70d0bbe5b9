"""Cases of `quantized_product`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jsparse.pallas_kernels.weight_blocks import FORMS, Blocks, Form, out_axis
from tests.kernels.cases.named import Named, put

ALL_FORMS = FORMS | {
    "awq": Form(4, 128, "float16", mins=True),
    "w4a16": Form(4, 128, "bfloat16"),
    "w8a16": Form(8, 128, "bfloat16"),
    "fp8": Form(8, 128, "float32", floats=True),
    "mixed": Form(6, 16, "int8", supers=True, mins=True),  # of several K-quants
}


@dataclass(frozen=True)
class Case(Named):
    """A call of `quantized_product`.

    Attributes:
        batch: the axes of x except the last.
        out, width: the sizes of the matrix.
        size: the magnitude of x.
        form: the name of the matrix's format.
    """

    batch: tuple[int, ...] = (3,)
    out: int = 192
    width: int = 256
    size: float = 1.0
    dtype: str = "bfloat16"
    form: str = "q8_0"

    def inputs(self, rng: np.random.Generator) -> tuple[Float[Array, "*batch in"], Blocks]:
        """Draws x and the matrix; in some of its blocks, all bits of the codes are 0."""
        zero = rng.random((self.out, self.width // 32, 1)) < 0.1
        matrix: Any = {}
        for name, spec in ALL_FORMS[self.form].arrays(self.out, self.width).items():
            dtype = np.dtype(spec.dtype)
            if out_axis(name) == 0:
                drawn = rng.integers(0, 256, spec.shape, np.uint8).reshape(*zero.shape[:2], -1)
                if dtype.kind not in "iu":  # NaN has all bits but the sign
                    drawn = np.where(drawn & 127 == 127, 0, drawn)
                drawn = np.where(zero, 0, drawn).astype(np.uint8).reshape(spec.shape).view(dtype)
            elif dtype.kind == "i":
                drawn = rng.integers(-128, 128, spec.shape)
            else:
                drawn = rng.uniform(1e-4, 1e-2, spec.shape)
            matrix[name] = put(drawn, dtype)
        x = self.size * rng.normal(size=(*self.batch, self.width))
        return put(x, self.dtype), matrix


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
OF_FORMS = tuple(Case(form, form=form) for form in ALL_FORMS if form != "q8_0")
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
