"""Tests skinny_product against numpy, and its use in a step."""

import jax
import jax.numpy as jnp
import pytest

from jsparse.pallas_kernels.skinny_product import api, skinny_product, xla_parts
from jsparse.parts import total
from tests.kernels.cases.skinny_product import CASES, OTHERS, Case
from tests.support.marks import slow_except_named
from tests.support.product_checks import assert_is_the_product

product = jax.jit(skinny_product, static_argnames="implementation")


@pytest.mark.parametrize("case", slow_except_named((*CASES, *OTHERS), "bias", "many_rows"), ids=str)
def test_rows_are_multiplied(case):
    x, matrix, bias = case.build()
    assert_is_the_product(product(x, matrix, bias), x, matrix, bias)


def test_narrow_matrix_is_split_unless_parts_get_short():
    for width, out, parts in (
        (4096, 6144, 4),
        (2048, 2048, 8),
        (2048, 8192, 2),
        (4096, 28672, 1),
        (576, 960, 4),  # parts of 144
        (8960, 1536, 4),  # 1120 is not a multiple of 64
        (192, 960, 1),
        (1023, 960, 1),
    ):
        assert xla_parts.best_parts(width, out) == parts, (width, out)


def test_parts_add_up_to_the_product():
    x, matrix, _ = Case("long", batch=(3, 2), width=2048, out=96).build()
    parts = jax.jit(xla_parts.skinny_product)(x, matrix)
    assert (parts.shape, parts.dtype) == ((8, 3, 2, 96), jnp.float32)
    assert_is_the_product(total(parts, 3, x.dtype), x, matrix, None)
    rows = x[..., :256], matrix[:256]
    assert_is_the_product(parts[0].astype(x.dtype), *rows, None)


def test_single_row_is_padded_with_zeros():
    x, matrix, _ = Case("long", width=2048, out=96).build()
    parts = jax.jit(xla_parts.skinny_product)(x, matrix)
    assert parts.shape == (16, 1, 1, 96)
    assert_is_the_product(total(parts, 3, x.dtype), x, matrix, None)


def test_unsupported_arguments_give_the_reason(monkeypatch):
    monkeypatch.setattr(api, "compute_capability", lambda: None)
    many_rows, _, float32 = OTHERS
    for case, implementation, reason in (
        (many_rows, "triton", r"takes one row, not \[3, 5\]"),
        (float32, "triton", "takes bfloat16 or float16"),
        (Case("bias", batch=(2,), bias=True), "parts", "takes no bias"),
        (Case("no_rows", batch=(0,)), "parts", r"takes 1 to 32 rows, not \[0\]"),
        (Case("many", batch=(11, 3)), "parts", r"takes 1 to 32 rows, not \[11, 3\]"),
        (Case("short", batch=(2,), width=192), "parts", r"for matrices like \[192, 192\]"),
        (Case("here", batch=(2,), width=1024), "parts", "needs an NVIDIA GPU"),
    ):
        with pytest.raises(ValueError, match=reason):
            skinny_product(*case.build(), implementation=implementation)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096), (4096, 4097)))
    with pytest.raises(ValueError, match=r"at most 33554432 bytes, not \[4096, 4097\]"):
        jax.eval_shape(lambda x, w: skinny_product(x, w, implementation="triton"), *shapes)
