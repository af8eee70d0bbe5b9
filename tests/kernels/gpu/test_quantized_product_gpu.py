"""Tests the Mosaic kernel of quantized_product on a GPU, next to a product in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.quantized_product.cases import CASES, Case

pytestmark = pytest.mark.gpu
# products of Llama 3.1 8B, SmolLM2 and of a 70B's half
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (8192, 14336)]
LARGE = [Case(f"{out}x{width}", (rows,), out, width) for out, width in SHAPES for rows in (1, 16)]

product = partial(jax.jit(quantized_product, static_argnames=("dtype", "implementation")))


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: f"{case.name}-{case.batch}")
def test_does_what_the_numbers_say(case):
    x, matrix = case.build()
    got = product(x, matrix, dtype=jnp.float32, implementation="mosaic")
    values, scales = (np.asarray(matrix[name], np.float64) for name in ("values", "scales"))
    numbers = values * np.repeat(scales, 32, axis=0).T
    x = np.asarray(x, np.float64)
    terms = np.abs(x) @ np.abs(numbers).T
    assert (np.abs(np.asarray(got, np.float64) - x @ numbers.T) <= 2.0**-20 * terms).all()


def test_rows_have_the_same_bits_alone_and_among_others():
    x, matrix = Case("many", (16,), 4096, 4096).build()
    together = np.asarray(product(x, matrix, implementation="mosaic").astype(jnp.float32))
    for rows in (slice(0, 1), slice(3, 8), slice(5, 16)):
        alone = product(x[rows], matrix, implementation="mosaic").astype(jnp.float32)
        np.testing.assert_array_equal(alone, together[rows])
