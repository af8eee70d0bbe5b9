"""Tests norm_product against numpy, and against the ops that it fuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.models.quantized import to_blocks
from jsparse.pallas_kernels import dispatch
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.quantized_product import api as quantized
from jsparse.pallas_kernels.weight_blocks import dequantized
from jsparse.parts import total
from tests.kernels.cases.norm_product import CASES, EPS, OTHERS, build
from tests.support.marks import slow_except_named
from tests.support.product_checks import assert_is_the_product_of_a_norm

BLOCKS = {"values": jnp.zeros((3, 32), jnp.int8), "scales": jnp.zeros((1, 3), jnp.float16)}
product = jax.jit(partial(norm_product, eps=EPS), static_argnames="implementation")


@pytest.mark.parametrize(
    "case", slow_except_named((*CASES, *OTHERS), "bias", "many_rows", "delta_in_parts"), ids=str
)
@pytest.mark.parametrize("implementation", ["separate", "reference"])
def test_norm_is_multiplied(case, implementation):
    given = build(case)
    made = product(*given, implementation=implementation)
    assert_is_the_product_of_a_norm(made, given, EPS)


def test_matrix_may_be_in_blocks():
    x, delta, scale, matrix, bias = build(CASES[1])
    blocks = to_blocks(matrix.T)
    given = x, delta, scale, dequantized(blocks, matrix.dtype).T, bias
    for name in ("separate", "reference"):
        made = product(x, delta, scale, blocks, bias, implementation=name)
        assert_is_the_product_of_a_norm(made, given, EPS)


@pytest.mark.parametrize(("in_parts", "biased"), [(True, False), (True, True), (False, True)])
def test_bias_is_added_once_to_products_of_blocks(in_parts, biased, monkeypatch):
    """It is not added to each of the parts that a kernel returns."""
    x, delta, scale, matrix, _ = build(CASES[1])
    blocks, bias = to_blocks(matrix.T), jnp.arange(matrix.shape[1]).astype(x.dtype)
    given = x, delta, scale, blocks, bias if biased else None
    wanted = norm_product(*given, eps=EPS, implementation="reference")[1]

    def halves(x, matrix, *, dtype):
        y = quantized.reference.quantized_product(x, matrix, dtype=jnp.float32)
        return jnp.stack([y / 2, y / 2])

    backend = dispatch.Backend("halves", lambda: halves)
    monkeypatch.setattr(quantized, "BACKENDS", (backend, *quantized.BACKENDS))
    made = norm_product(*given, eps=EPS, in_parts=in_parts, implementation="separate")[1]
    assert made.shape == ((2,) if in_parts and not biased else ()) + wanted.shape
    close = partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-2)
    close(np.asarray(total(made, x.ndim, x.dtype), "f4"), np.asarray(wanted, "f4"))


def test_unsupported_arguments_give_the_reason():
    with pytest.raises(ValueError, match=r"on this backend takes one row, not \[3, 5\]"):
        product(*build(OTHERS[0]), implementation="triton")


def test_zero_rows_give_an_empty_product():
    rows, scale = jnp.zeros((0, 32)), jnp.zeros(32)
    for name in ("separate", "reference"):
        total, y = norm_product(rows, rows, scale, BLOCKS, eps=EPS, implementation=name)
        assert (total.shape, y.shape) == ((0, 32), (0, 3))
