"""Tests skinny_product against numpy, and what a step does with it."""

import jax
import jax.numpy as jnp
import pytest
from marks import slow_except_named

from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.skinny_product.cases import CASES, OTHERS
from tests.kernels.product_checks import assert_is_the_product

product = jax.jit(skinny_product, static_argnames="implementation")


@pytest.mark.parametrize(
    "case", slow_except_named((*CASES, *OTHERS), "bias", "many_rows"), ids=lambda case: case.name
)
def test_rows_are_multiplied(case):
    x, matrix, bias = case.build()
    assert_is_the_product(product(x, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (4, 8), None), r"matrix=float32\[4, 8\]: must be \[in, out\] .* float32\[2, 8\]"),
        (((2, 8), (8,), None), r"matrix=float32\[8\]: must be \[in, out\]"),
        (((2, 8), (8, 4), (8,)), r"bias=float32\[8\]: must be \[out\] .* float32\[4\]"),
    ],
)
def test_wrong_shapes_are_refused(shapes, message):
    given = [None if shape is None else jnp.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        skinny_product(*given)


def test_a_large_matrix_is_xla_s():
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096), (4096, 4097)))
    with pytest.raises(ValueError, match=r"at most 33554432 bytes, not \[4096, 4097\]"):
        jax.eval_shape(lambda x, w: skinny_product(x, w, implementation="triton"), *shapes)


@pytest.mark.parametrize(
    ("case", "reason"),
    [("many_rows", r"takes one row, not \[3, 5\]"), ("float32", "takes bfloat16 or float16")],
)
def test_what_the_kernel_cannot_run_is_said(case, reason):
    x, matrix, bias = next(one for one in OTHERS if one.name == case).build()
    with pytest.raises(ValueError, match=reason):
        skinny_product(x, matrix, bias, implementation="triton")
