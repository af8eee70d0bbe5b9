"""Tests gated_product against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.models.quantized import to_blocks
from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.weight_blocks import dequantized
from tests.kernels.cases.gated_product import CASES, OTHERS, build
from tests.support.marks import slow_except_named
from tests.support.product_checks import assert_is_the_product_of_a_gate

product = jax.jit(gated_product, static_argnames="implementation")


@pytest.mark.parametrize(
    "case", slow_except_named((*CASES, *OTHERS), "one_row", "many_rows"), ids=str
)
@pytest.mark.parametrize("implementation", ["separate", "reference"])
def test_gated_row_is_multiplied(case, implementation):
    gate_up, matrix = build(case)
    y = product(gate_up, matrix, implementation=implementation)
    assert_is_the_product_of_a_gate(y, gate_up, matrix)


def test_matrix_may_be_in_blocks():
    gate_up, matrix = build(CASES[0])
    blocks = to_blocks(matrix.T)
    for name in ("separate", "reference"):
        y = product(gate_up, blocks, implementation=name)
        assert_is_the_product_of_a_gate(y, gate_up, dequantized(blocks, matrix.dtype).T)


def test_bias_is_added():
    gate_up, matrix = build(CASES[0])
    bias = jnp.arange(matrix.shape[1], dtype=matrix.dtype)
    for kept in (matrix, to_blocks(matrix.T)):
        with_bias, without = product(gate_up, kept, bias), product(gate_up, kept)
        np.testing.assert_array_equal(with_bias, without + bias)


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match=r"gate_up.shape=\(2, 8\): the last axis must be 2 · 8"):
        gated_product(jnp.zeros((2, 8)), jnp.zeros((8, 4)))
    with pytest.raises(ValueError, match="matrix.dtype=float32: must be that of gate_up, bfloat16"):
        gated_product(jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"gated_product on this backend takes one row"):
        product(*build(OTHERS[0]), implementation="triton")
