"""Tests the triton kernels that a decode step launches beside attention, against references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.models.quantized import to_blocks
from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.new_token_attention import new_token_attention
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.pallas_kernels.rope_append import rope_append
from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.weight_blocks import dequantized
from jsparse.parts import total
from tests.kernels.cases import gated_product as gated_cases
from tests.kernels.cases import new_token_attention as new_token_cases
from tests.kernels.cases import norm_product as norm_product_cases
from tests.kernels.cases import residual_norm as norm_cases
from tests.kernels.cases import rope_append as rope_cases
from tests.kernels.cases import skinny_product as product_cases
from tests.support.product_checks import (
    assert_is_the_product,
    assert_is_the_product_of_a_gate,
    assert_is_the_product_of_a_norm,
)

pytestmark = pytest.mark.gpu
# products of SmolLM2, of Llama 3.1 8B, and of a quarter of it
SHAPES = [(576, 960), (576, 3072), (1536, 576), (4096, 4096), (4096, 1536), (3584, 4096)]
PRODUCTS = [
    product_cases.Case(f"{width}x{out}", width=width, out=out, bias=out == 1536)
    for width, out in SHAPES
]
WIDE = norm_cases.Case("widest", rows=5, width=16384, dtype="bfloat16")


def close(got, want, ulps=2, halfway=0.0):
    """Roundings may differ by `ulps` units of the largest number.

    One in a thousand may differ by that share of it, as do numbers that were halfway between two
    integers.
    """
    assert got.dtype == want.dtype
    got, want, step = (
        *(np.asarray(x, np.float64) for x in (got, want)),
        float(jnp.finfo(want.dtype).eps),
    )
    size = np.abs(want).max(axis=-1, keepdims=True)
    apart = np.abs(got - want)
    assert (apart <= max(ulps * step, halfway) * size).all()
    assert (apart > ulps * step * size).sum() <= max(apart.size / 1000, 1)


@pytest.mark.parametrize("case", [*norm_cases.CASES, WIDE], ids=str)
def test_norm_matches_the_reference(case):
    given = case.build()
    made = {
        name: jax.jit(partial(residual_norm, eps=case.eps, implementation=name))(*given)
        for name in ("triton", "reference")
    }
    for got, want in zip(made["triton"], made["reference"], strict=True):
        close(got, want)
    alone = jax.jit(partial(residual_norm, eps=case.eps, implementation="triton"))(
        *(x[..., -1:, :] for x in given[:2]), given[2]
    )
    for row, all_rows in zip(alone, made["triton"], strict=True):
        np.testing.assert_array_equal(row[0], all_rows[-1])


@pytest.mark.parametrize("case", new_token_cases.CASES, ids=str)
def test_new_token_attention_matches_the_reference(case):
    given = case.build()
    with jax.default_matmul_precision("highest"):  # of the reference's products
        made = {
            name: jax.jit(partial(new_token_attention, implementation=name))(*given)
            for name in ("triton", "reference")
        }
    close(made["triton"], made["reference"], ulps=4)
    alone = jax.jit(partial(new_token_attention, implementation="triton"))(*(x[-1:] for x in given))
    np.testing.assert_array_equal(alone[0], made["triton"][-1])


@pytest.mark.parametrize("case", rope_cases.CASES, ids=str)
def test_rope_append_matches_the_reference(case):
    heads, layer, positions, valid = case.build()

    def run(qkv, layer, implementation):
        given = heads._replace(qkv=qkv)
        return rope_append(given, layer, positions, valid, implementation=implementation)

    run = jax.jit(run, static_argnames="implementation", donate_argnames="layer")
    want = run(heads.qkv, jax.tree.map(jnp.copy, layer), "reference")
    got = run(heads.qkv, jax.tree.map(jnp.copy, layer), "triton")
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.floating):
            close(ours, theirs, halfway=0.05 if case.kept == "int8" else 0.0)
        elif ours.dtype == jnp.int8:  # numbers halfway between two integers
            apart = np.abs(np.asarray(ours, int) - np.asarray(theirs, int))
            assert apart.max() <= 1
            assert apart.mean() < 1e-4
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", [*product_cases.CASES, *PRODUCTS], ids=str)
def test_product_of_one_row(case):
    x, matrix, bias = case.build()
    multiply = jax.jit(partial(skinny_product, implementation="triton"))
    assert_is_the_product(multiply(x, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize(("width", "out"), [(4096, 6144), (1536, 576)])
def test_product_of_rows_in_parts(width, out, rows):
    x, matrix, _ = product_cases.Case("parts", (rows, 1), width, out).build()
    multiply = jax.jit(partial(skinny_product, in_parts=True, implementation="parts"))
    parts = multiply(x, matrix)
    assert (parts.dtype, parts.ndim) == (jnp.float32, 4)
    assert_is_the_product(total(parts, 3, x.dtype), x, matrix, None)


WIDE_ROWS = [product_cases.Case(f"{width}x320", width=width, out=320) for width in (5120, 8192)]
BLOCKED = [
    case for case in (*norm_product_cases.CASES, *PRODUCTS, *WIDE_ROWS) if case.width % 32 == 0
]


def in_blocks(matrix):
    """Returns the matrix in 8-bit blocks, and the numbers that they represent."""
    blocks = to_blocks(matrix.T)
    return blocks, dequantized(blocks, jnp.float32).T


@pytest.mark.parametrize("case", [*norm_product_cases.CASES, *PRODUCTS], ids=str)
def test_product_of_a_norm(case):
    given, eps = norm_product_cases.build(case), norm_product_cases.EPS
    multiply = jax.jit(partial(norm_product, eps=eps), static_argnames="implementation")
    made = multiply(*given, implementation="triton")
    assert_is_the_product_of_a_norm(made, given, eps)
    total, _ = multiply(*given, implementation="separate")
    np.testing.assert_array_equal(made[0], total)


@pytest.mark.parametrize("case", BLOCKED, ids=str)
def test_product_of_a_norm_with_blocks(case):
    (x, delta, scale, matrix, bias), eps = norm_product_cases.build(case), norm_product_cases.EPS
    blocks, numbers = in_blocks(matrix)
    multiply = jax.jit(partial(norm_product, eps=eps, implementation="triton"))
    total, y = multiply(x, delta, scale, blocks, bias)
    assert y.dtype == x.dtype
    given = x, delta, scale, numbers, bias
    assert_is_the_product_of_a_norm((total, y), given, eps, dtype=x.dtype)


def test_infinity_is_kept():
    x, delta, scale, matrix, bias = norm_product_cases.build(norm_product_cases.CASES[0])
    x = jnp.asarray(x).at[..., 3].set(jnp.inf)
    for kept in (matrix, in_blocks(matrix)[0]):
        total, y = norm_product(x, delta, scale, kept, bias, eps=1e-5, implementation="triton")
        assert np.isinf(np.asarray(total, np.float32)[..., 3]).all()
        assert np.isnan(np.asarray(y, np.float32)).all()


@pytest.mark.parametrize("case", [*gated_cases.CASES, *PRODUCTS], ids=str)
def test_product_of_a_gate(case):
    gate_up, matrix = gated_cases.build(case)
    multiply = jax.jit(partial(gated_product, implementation="triton"))
    assert_is_the_product_of_a_gate(multiply(gate_up, matrix), gate_up, matrix)
    if case in BLOCKED:
        blocks, numbers = in_blocks(matrix)
        y = multiply(gate_up, blocks)
        assert_is_the_product_of_a_gate(y, gate_up, numbers, dtype=gate_up.dtype)
