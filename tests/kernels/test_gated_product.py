"""Tests gated_product against numpy."""

import jax
import jax.numpy as jnp
import pytest
from marks import slow_except_named

from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.gated_product.cases import CASES, OTHERS, build
from tests.kernels.product_checks import assert_is_the_product_of_a_gate

product = jax.jit(gated_product, static_argnames="implementation")


@pytest.mark.parametrize(
    "case", slow_except_named((*CASES, *OTHERS), "one_row", "many_rows"), ids=lambda case: case.name
)
@pytest.mark.parametrize("implementation", ["separate", "reference"])
def test_the_gated_row_is_multiplied(case, implementation):
    gate_up, matrix = build(case)
    y = product(gate_up, matrix, implementation=implementation)
    assert_is_the_product_of_a_gate(y, gate_up, matrix)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ((2, 8), (8, 4)),
            r"matrix=float32\[8, 4\]: must be .* of gate_up, float32\[2, 8\]",
        ),
        (((2, 8), (4,)), r"matrix=float32\[4\]: must be \[in, out\]"),
    ],
)
def test_wrong_shapes_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        gated_product(*(jnp.zeros(shape) for shape in shapes))


def test_what_the_kernel_cannot_run_is_said():
    with pytest.raises(ValueError, match=r"gated_product on this backend takes one row"):
        product(*build(OTHERS[0]), implementation="triton")
