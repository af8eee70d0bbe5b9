"""Tests the kernels of quantized_product on a GPU against a float64 product."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.dispatch import no_mosaic
from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.quantized_product.mosaic import takes_few
from jsparse.pallas_kernels.weight_blocks import out_axis
from jsparse.parts import total
from tests.kernels.cases.quantized_product import ALL_FORMS, CASES, OF_FORMS, OTHERS, Case
from tests.support.block_numbers import in_bfloat16, numbers_of

pytestmark = pytest.mark.gpu
# products of Llama 3.1 8B, SmolLM2 and half of a 70B
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (576, 1536)]
SHAPES += [(8192, 14336)]
LARGE = [
    Case(f"{out}x{width}", (rows,), out, width)
    for out, width in SHAPES
    for rows in (1, 4, 16, 32, 50, 256, 700)
]
LARGE += [
    Case(f"{case.form}_{out}x{width}", (rows,), out, width, form=case.form)
    for case in OF_FORMS
    for out, width in ((3072, 4096), (256, 14336))
    for rows in (1, 2, 3, 4, 16, 32, 50, 700)
]
LARGE += [Case(f"{case.form}_float16", (2,), dtype="float16", form=case.form) for case in OF_FORMS]
LARGE += [Case("long", (2500,), 4096, 4096), Case("longest", (4096,), 960, 576)]
TAKES = {
    "mosaic": lambda case, rows: (
        (
            (2 < rows <= 4 and case.width % 128 == 0 and not ALL_FORMS[case.form].floats)
            or 4 < rows <= 4096
        )
        and case.dtype == "bfloat16"
        and case.width % 64 == 0
        and case.out % 64 == 0
    ),
    "triton": lambda case, rows: 1 <= rows <= 4,
}
GIVEN = [
    pytest.param(case, name, id=f"{case.name}-{case.batch}-{name}")
    for case in (*CASES, *OTHERS, *OF_FORMS, *LARGE)
    for name, takes in TAKES.items()
    if takes(case, int(np.prod(case.batch)))
]
product = jax.jit(quantized_product, static_argnames=("dtype", "in_parts", "implementation"))


@pytest.mark.parametrize(("case", "implementation"), GIVEN)
def test_matches_the_float64_product(case, implementation):
    if implementation == "mosaic" and (reason := no_mosaic()):
        pytest.skip(reason)
    x, matrix = case.build()
    got = product(x, matrix, dtype=jnp.float32, implementation=implementation)
    assert np.isfinite(np.asarray(got)).all()
    # some rows of large matrices: those at the edges of programs, and others
    some = np.arange(0, case.out, max(case.out // 500, 1) | 1)
    form, rows = ALL_FORMS[case.form], x.reshape(-1, x.shape[-1])
    of_some = {name: np.asarray(matrix[name]).take(some, out_axis(name)) for name in matrix}
    numbers, sizes = numbers_of(of_some, form)
    # the kernel for many rows rounds the matrix to bfloat16, the others round x to fixed point
    many, apart = implementation == "mosaic" and not takes_few(rows, matrix), 0.0 * numbers
    if many:
        numbers, apart = in_bfloat16(of_some, form)
        sizes = np.abs(numbers)
    x = np.asarray(x, np.float64)
    terms = np.abs(x) @ sizes.T
    off = np.abs(np.asarray(got, np.float64)[..., some] - x @ numbers.T)
    allowed = 2.0**-20 * terms
    if many:  # tensor cores truncate sums: the more terms, the larger the error
        allowed *= max(case.width / 2**13, 1)
        # floats differ more in size, so that sums are larger beside their terms
        allowed *= 2 if form.floats else 1
        allowed += np.abs(x) @ apart.T
    else:  # by half a unit of each block
        blocks = np.abs(x).reshape(*x.shape[:-1], -1, 32).max(-1)
        unit = 2.0 ** (np.floor(np.log2(blocks)) - (22 if case.dtype == "float32" else 14))
        if implementation == "mosaic":
            full = blocks >= (2 - 2**-7) * 2**14 * unit
            unit = np.where(full, 2 * unit, unit)
        allowed += np.repeat(unit, 32, axis=-1) / 2 @ np.abs(numbers).T
    assert (off <= allowed).all()
    if many:
        rounded = product(*case.build(), implementation=implementation).astype(jnp.float32)
        np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_nan_and_infinities_are_kept(implementation):
    if implementation == "mosaic" and (reason := no_mosaic()):
        pytest.skip(reason)
    x, matrix = Case("three", width=640).build()
    made = partial(product, matrix=matrix, implementation=implementation)
    for lost in (np.inf, np.nan):
        got = made(x.at[1, 77].set(lost))
        assert np.isnan(np.asarray(got[1], np.float32)).all()
        np.testing.assert_array_equal(got[::2], made(x)[::2])


PARTS = [
    ("mosaic", 4, [(0, 3)]),
    ("mosaic", 16, [(3, 8), (5, 16)]),
    ("mosaic", 32, [(0, 17), (2, 25)]),
    ("triton", 4, [(0, 1), (1, 3)]),
]
OF_SHAPES = [(*shape, "q8_0") for shape in ((4096, 14336), (960, 576), (192, 96), (192, 640))]
OF_SHAPES += [(1536, 4096, name) for name in ("q4_k", "q5_k", "q6_k", "awq", "fp8")]
SAME = [
    pytest.param(*parts, shape, id=f"{parts[0]}-{parts[1]}-{shape}")
    for parts in PARTS
    for shape in OF_SHAPES
    # with few rows
    if parts[0] == "triton" or (shape[1] % 128 == 0 and not ALL_FORMS[shape[2]].floats)
]


@pytest.mark.parametrize(("implementation", "most", "parts", "shape"), SAME)
def test_rows_have_the_same_bits_alone_and_in_a_batch(implementation, most, parts, shape):
    if implementation == "mosaic" and (reason := no_mosaic()):
        pytest.skip(reason)
    out, width, form = shape
    x, matrix = Case("many", (most,), out, width, form=form).build()
    # blocks of zeros, of small numbers, and of the largest ones
    x = x.at[:, :32].set(0).at[:, 32:64].multiply(2.0**-110).at[2, 70].set(255.0)
    together = product(x, matrix, implementation=implementation).astype(jnp.float32)
    assert np.isfinite(np.asarray(together)).all()
    for first, end in parts:
        own = product(x[first:end], matrix, implementation=implementation).astype(jnp.float32)
        np.testing.assert_array_equal(own, together[first:end])


@pytest.mark.parametrize("rows", [3, 32])
def test_parts_add_up_to_the_product(rows):
    if reason := no_mosaic():
        pytest.skip(reason)
    x, matrix = Case("down", (rows,), 4096, 14336).build()
    parts = product(x, matrix, in_parts=True, implementation="mosaic")
    assert (parts.dtype, parts.shape[1:], len(parts) > 1) == (jnp.float32, (rows, 4096), True)
    whole = product(x, matrix, implementation="mosaic")
    np.testing.assert_array_equal(total(parts, 2, x.dtype), whole)


def test_largest_finite_number_stays_finite():
    if reason := no_mosaic():
        pytest.skip(reason)
    x, matrix = Case("three", width=128).build()
    x = x.at[1].set(0).at[1, 7].set(jnp.finfo(jnp.bfloat16).max)
    small = matrix | {"scales": jnp.full_like(matrix["scales"], 2.0**-12)}
    for implementation in ("mosaic", "triton"):
        got = product(x, small, dtype=jnp.float32, implementation=implementation)[1]
        wanted = float(x[1, 7]) * 2.0**-12 * np.asarray(matrix["values"][:, 7], np.float64)
        np.testing.assert_allclose(got, wanted, rtol=2**-7)
