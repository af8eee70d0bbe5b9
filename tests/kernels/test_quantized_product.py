"""Tests quantized_product against numpy: the reference, and the Mosaic kernel interpreted."""

from dataclasses import replace
from functools import partial
from itertools import product as product_of

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from jsparse.pallas_kernels.quantized_product import (
    mosaic,
    mosaic_few,
    mosaic_few_problem,
    mosaic_many,
    quantized_product,
)
from jsparse.pallas_kernels.quantized_product.mosaic_integers import Digits, fixed_point
from jsparse.pallas_kernels.quantized_product.mosaic_many_problem import (
    ROW_TILES,
    Problem,
    best_split,
)
from jsparse.pallas_kernels.quantized_product.mosaic_widening import Bytes, block_registers
from jsparse.pallas_kernels.weight_blocks import FORMS, Form, out_axis
from jsparse.parts import total
from tests.kernels.cases.quantized_product import ALL_FORMS, CASES, OF_FORMS, OTHERS, Case
from tests.support import mlir_threads
from tests.support.block_numbers import in_bfloat16, numbers_of
from tests.support.marks import slow_except, slow_except_named

product = jax.jit(quantized_product, static_argnames="dtype")


def is_close(got, x, case, matrix, rounding):
    """Whether sums are at most as far off as with terms rounded by these errors."""
    (numbers, sizes), x = numbers_of(matrix, ALL_FORMS[case.form]), np.asarray(x, np.float64)
    off = np.abs(np.asarray(got, np.float64) - x @ numbers.T)
    return (off <= rounding * (np.abs(x) @ sizes.T)).all()


ALL = [*CASES, *OTHERS, *OF_FORMS]


@pytest.mark.parametrize("case", slow_except_named(ALL, "few", "odd_sizes", "mixed"), ids=str)
def test_reference_is_a_product_with_the_blocks_numbers(case):
    x, matrix = case.build()
    got = product(x, matrix, dtype=jnp.float32)
    assert got.dtype == jnp.float32
    assert got.shape == (*case.batch, case.out)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[case.dtype]
    assert is_close(got, x, case, matrix, rounding)
    assert product(x, matrix).dtype == x.dtype


FEW = [case for case in CASES if case.name != "groups"]
HOW = {
    "": {},
    # a program with several units, with chunks that do not divide evenly among warpgroups
    "one_block": {"columns": 128, "turns": 3, "stages": 6, "blocks": 1, "parts": 1},
    "one_turn": {"columns": 128, "turns": 1, "stages": 3, "parts": 2},
}


def in_fixed_point(x):
    """The integers of x and the units of its blocks: the largest and its 128th stay below 2^15."""
    blocks = np.asarray(x, np.float64).reshape(len(x), -1, 32)
    top = np.abs(blocks).max(-1)
    power = 2.0 ** np.floor(np.log2(top))
    unit = np.where(top + power / 128 < 2 * power, power, 2 * power) / 2**14
    return np.round(blocks / unit[..., None]), unit


def test_fixed_point_numbers_have_two_digits_of_a_byte():
    x = np.asarray(Case("given", batch=(8,), width=640).build()[0], np.float64)
    x[0, 5], x[3, 100], x[4, 3] = jnp.finfo(jnp.bfloat16).max, 255, -255
    x[1, 32:64], x[2, :32], x[2, 7] = 2.0**-60, 0, 1.9921875 * 2.0**-90
    given = jnp.asarray(x, jnp.bfloat16)
    digits, units, _ = fixed_point(given, Digits(8))
    integers, unit = in_fixed_point(given)
    got = 256 * np.asarray(digits[:8], np.int32) + digits[8:]
    np.testing.assert_array_equal(got.reshape(integers.shape), integers)
    np.testing.assert_array_equal(units.T, unit)
    digits, units, _ = fixed_point(given.at[1].set(0), Digits(8))
    assert not digits[1].any()
    assert not digits[9].any()
    assert np.isfinite(units).all()
    lost = fixed_point(given.at[1, 32].set(np.nan).at[2, 65].set(-np.inf), Digits(8))[1]
    assert np.argwhere(np.isnan(lost)).tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize("how", slow_except(HOW, ""))
@pytest.mark.parametrize("case", slow_except_named(FEW, "chunks_left_over"), ids=str)
def test_few_rows_in_fixed_point_round_only_sums(case, how):
    x, matrix = case.build()
    x = x.reshape(-1, case.width)
    got = total(mosaic_few.few_rows(x, matrix, interpret=True, **HOW[how]), 2, jnp.float32)
    integers, unit = in_fixed_point(x)
    assert is_close(got, (integers * unit[..., None]).reshape(x.shape), case, matrix, 2.0**-20)


INTEGERS = [case for case in OF_FORMS if case.form != "fp8"]


def test_arrays_of_a_chunk_are_aligned_in_shared_memory():
    """TMA copies to multiples of 128 bytes."""
    for form, group in product_of(ALL_FORMS.values(), mosaic_few_problem.GROUPS):
        columns = mosaic_few_problem.chunk_columns(form, group)
        for spec in form.arrays(64, columns).values():
            assert spec.size * spec.dtype.itemsize % 128 == 0


def test_diagonal_products_have_whole_blocks():
    for form, rows in product_of(ALL_FORMS.values(), (1, 2, 3, 4)):
        group = mosaic_few_problem.group_of(rows, form)
        digits = Digits(group, min(form.group, 32))
        assert rows <= group
        assert digits.diagonal * digits.segment % 32 == 0


@pytest.mark.parametrize("segment", [16, 32])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_digits_of_few_rows_are_diagonal(rows, segment):
    """A product's columns 2 (rows · class + row) and the next are those of a class's segments."""
    x = Case("given", batch=(rows,), width=256).build()[0]
    digits, _, sums = fixed_point(x, Digits(rows, segment, sums=3))
    integers, unit = in_fixed_point(x)
    of_segments = integers.reshape(rows, -1, segment)
    wanted = 3 * of_segments.sum(-1) * np.repeat(unit, 32 // segment, -1)
    np.testing.assert_array_equal(sums.T, wanted)
    classes, wide = 4 // rows, np.asarray(digits, np.int32).reshape(4 // rows, rows, 2, -1, segment)
    for nth in range(256 // segment):
        for of_class in range(classes):
            got = 256 * wide[of_class, :, 0, nth] + wide[of_class, :, 1, nth]
            own = nth % classes == of_class
            np.testing.assert_array_equal(got, of_segments[:, nth] if own else 0 * got)


@pytest.mark.parametrize("rows", slow_except([1, 2, 3, 9], 1))
@pytest.mark.parametrize("case", slow_except_named(INTEGERS, "mixed"), ids=str)
def test_few_rows_of_all_forms_round_only_sums(case, rows):
    x, matrix = replace(case, batch=(rows,)).build()
    got = total(mosaic_few.few_rows(x, matrix, interpret=True), 2, jnp.float32)
    integers, unit = in_fixed_point(x)
    assert is_close(got, (integers * unit[..., None]).reshape(x.shape), case, matrix, 2.0**-20)


MANY = (
    Case("left_over", batch=(50,), out=192, width=576),
    Case("two_tiles", batch=(9, 13), out=128),
    Case("narrow", out=64, width=64),
)
MANY_HOW = {
    "": {},
    # a program with several units, and sums of parts
    "parts": {"row_tile": 64, "split": (0, 2), "blocks": 1, "stages": 2},
    "one_whole": {"row_tile": 64, "split": (1, 4), "blocks": 3, "stages": 2},
    "two_blocks": {"row_tile": 64, "blocks": 2, "stages": 3},
}


@pytest.mark.parametrize("how", slow_except(MANY_HOW, "parts"))
@pytest.mark.parametrize(
    "case", slow_except_named([*MANY, *OF_FORMS], "left_over", "q5_k"), ids=str
)
def test_many_rows_round_the_numbers_once(case, how):
    x, matrix = case.build()
    x = x.reshape(-1, case.width)
    numbers, apart = in_bfloat16(matrix, ALL_FORMS[case.form])
    wide = np.asarray(x, np.float64)
    allowed = np.abs(wide) @ (2.0**-20 * np.abs(numbers) + apart).T
    for dtype, step in ((jnp.float32, 0), (jnp.bfloat16, 2.0**-8)):
        given = {"dtype": dtype, "interpret": True, **MANY_HOW[how]}
        got = mosaic_many.many_rows(x, matrix, **given)
        assert (got.dtype, got.shape) == (dtype, (len(x), case.out))
        distance = np.abs(np.asarray(got, np.float64) - wide @ numbers.T)
        assert (distance <= allowed + step * np.abs(wide @ numbers.T)).all()


# products of Llama 3.1 8B, of half a 70B, of SmolLM2's MLP, of a 70B, and of the widest that the
# kernel for few rows supports
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (5120, 8192), (576, 1536), (8192, 28672)]
SHAPES += [(8448, 16384), (8448, 32768)]


@pytest.mark.parametrize("shape", slow_except(SHAPES, SHAPES[-1]), ids=str)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (2, "bfloat16"),
        pytest.param(16, "float16", marks=pytest.mark.slow),
        pytest.param(32, "bfloat16", marks=pytest.mark.slow),
        pytest.param(33, "bfloat16", marks=pytest.mark.slow),
        pytest.param(300, "float16", marks=pytest.mark.slow),
        (512, "bfloat16"),
    ],
)
def test_lowers_for_cuda(shape, rows, dtype):
    """Lowering checks layouts, alignment and shared memory, and needs no GPU."""
    assert_lowers(FORMS["q8_0"], shape, rows, dtype)


@pytest.mark.parametrize("rows", slow_except([3, 16, 32, 50, 512], 3, 32, 512))
@pytest.mark.parametrize("name", slow_except(ALL_FORMS, "q5_k", "fp8"))
def test_all_forms_lower_for_cuda(name, rows):
    assert_lowers(ALL_FORMS[name], (6144, 4096), rows, "bfloat16")


def assert_lowers(form, shape, rows, dtype):
    x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
    multiply = jax.jit(mosaic.quantized_product, static_argnames="dtype")
    traced = multiply.trace(x, form.arrays(*shape), dtype=dtype)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def problem_of(rows, out, width, cluster, blocks=132):
    row_tile = next((size for size in ROW_TILES if rows <= size), ROW_TILES[-1])
    rows = -(-rows // 8) * 8
    given = rows, out, width, row_tile, cluster, 4, blocks, jnp.dtype("bfloat16"), False
    return Problem(FORMS["q8_0"], *given)


def busiest(p):
    """The chunks of the busiest program, counted unit by unit."""
    chunks = [0] * p.clusters
    for unit in range(p.units):
        chunks[unit % p.clusters] += p.chunks if unit < p.whole_units else p.part_chunks
    return max(chunks)


def test_parts_are_worth_their_sums():
    shapes = *SHAPES, (64, 64), (192, 576)
    for (out, width), rows, cluster in product_of(shapes, (50, 128, 300, 512, 1000), (1, 2)):
        split = best_split(problem_of(rows, out, width, cluster))
        whole = replace(split, whole=split.tiles, parts=1)
        assert 0 <= split.whole <= split.tiles
        assert split == whole or (split.rest and split.parts > 1)
        assert split == whole or busiest(split) < busiest(whole)
        # no other small number of splits has a better estimate
        for parts in (2, 8):
            for first in {0, split.tiles // 2, split.tiles - 1}:
                assert split.cost <= replace(split, whole=first, parts=parts).cost


def test_last_tiles_of_many_rows_are_split_to_keep_programs_busy():
    # 112 tiles by two of x are 3.4 rounds of 66 pairs of programs
    split = best_split(problem_of(512, 28672, 4096, 2))
    assert (split.whole_units, split.parts) == (198, 2)
    assert busiest(split) <= 0.9 * busiest(replace(split, whole=112, parts=1))
    # 48 units fit into one round: parts would gain nothing
    assert best_split(problem_of(512, 6144, 4096, 2)).whole == 24


@pytest.mark.parametrize(("rows", "cluster"), [(50, 1), (600, 2)])
def test_programs_cover_the_product_exactly_once(rows, cluster, monkeypatch):
    for (out, width), whole, parts in ((SHAPES[0], 13, 4), ((192, 576), 1, 2), ((64, 64), 0, 8)):
        p = replace(problem_of(rows, out, width, cluster, blocks=10), parts=parts)
        p = replace(p, whole=min(whole, p.tiles - 1))
        done = np.zeros((p.tiles * cluster, p.row_tiles, p.chunks), int)
        for of_cluster, program in product_of(range(p.clusters), range(cluster)):
            index = {"cluster": jnp.int32(of_cluster), "program": jnp.int32(program)}
            monkeypatch.setattr(mosaic_many.lax, "axis_index", index.get)
            seen = []

            def note(unit, before, seen=seen, p=p, done=done):
                assert before == sum(seen)
                seen.append(int(unit.chunks))
                first, tile = int(unit.first_chunk), int(unit.out_row) // mosaic_many.TILE
                assert unit.whole == (int(unit.out_row) < p.first_of_rest)
                done[tile, int(unit.x_row) // p.row_tile, first : first + seen[-1]] += 1

            with jax.disable_jit():
                assert mosaic_many._each_unit(p, note) == sum(seen)
        assert (done == 1).all()


@pytest.mark.parametrize("name", ALL_FORMS)
def test_copies_begin_at_multiples_of_16_bytes(name):
    p = replace(problem_of(50, 128, 1024, 1), form=ALL_FORMS[name])
    for key, piece in p.pieces.items():
        axis, seen = out_axis(key), set()
        for chunk in range(p.chunks):
            place = mosaic_many._place(piece, axis, 0, jnp.int32(chunk))
            own, size = place[1 - axis], piece.shape[1 - axis]
            first = int(own.start)
            seen |= set(range(first, first + size))
            # it has the chunk's columns
            assert first * piece.columns <= 64 * chunk
            assert 64 * (chunk + 1) <= (first + size) * piece.columns
            assert axis == 1 or first * piece.dtype.itemsize % 16 == 0
        assert seen == set(range(1024 // piece.columns))


def in_shared_memory(name, array):
    """The first 64 columns of an array of 64 rows, as TMA copies them."""
    if out_axis(name) == 1:
        return array[: max(len(array) // 4, 1)]
    array = np.ascontiguousarray(array[:, : max(array.shape[1] // 4, 16)])
    if name == "high":
        return array
    # groups of 16 bytes change places by their address: the three bits above those of a line of
    # 128 bytes are added to the lowest, of those that a row has
    segments = array.shape[1] // 16
    place = np.arange(segments) ^ (np.arange(64) * segments // 8 % segments)[:, None]
    made = np.empty_like(array).reshape(64, segments, 16)
    np.put_along_axis(made, place[..., None], array.reshape(made.shape), 1)
    return made.reshape(array.shape)


@pytest.mark.parametrize("name", ALL_FORMS)
def test_kernels_instructions_widen_codes(name):
    form, (_, matrix) = ALL_FORMS[name], Case(name, out=64, form=name).build()
    matrix = {key: np.asarray(array) for key, array in matrix.items()}
    chunk = {key: in_shared_memory(key, array) for key, array in matrix.items()}

    def build(refs, block):
        for key in refs.keys() & {"values", "high"}:
            refs[key] = Bytes(mgpu.utils.memref_ptr(refs[key]), chunk[key].shape[1])
        return block_registers(form, refs, block)

    got, thread = np.zeros((64, 64)), np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for block in range(2):
        for nth, pair in enumerate(mlir_threads.run(partial(build, block=block), chunk)):
            at = 32 * block + nth // 2 * 8 + column
            got[row + 8 * (nth % 2), at], got[row + 8 * (nth % 2), at + 1] = pair.T
    wanted, apart = (numbers[:, :64] for numbers in in_bfloat16(matrix, form))
    assert (np.abs(got - wanted) <= apart).all()


def test_parts_keep_all_programs_busy():
    for (out, width), rows in product_of(SHAPES[:3], mosaic_few_problem.GROUPS):
        parts = mosaic_few_problem.best_parts(out, width, 256 if rows == 16 else 128, rows)
        blocks = 132 - 132 % parts
        units = out // 64 * parts
        assert units / blocks / -(-units // blocks) > 0.9  # of the programs' time


def test_wrong_calls_are_refused():
    rows, blocks = np.zeros((4097, 256), np.float32), Case("given").build()[1]
    mosaic_alone, triton = {"implementation": "mosaic"}, {"implementation": "triton"}
    narrow, odd = (Case("narrow", (5,), width=width).build() for width in (608, 576))
    five = {name: np.zeros(x.shape, x.dtype) for name, x in Form(5, 32).arrays(192, 320).items()}
    floats = Case("floats", (4,), form="fp8").build()
    for x, matrix, options, message in (
        (
            rows[:2],
            blocks | {"scales": np.zeros((7, 192), np.float16)},
            {},
            "matrix: 7 scales of a row must be one per 16, 32, 64 or 128 of 256 columns",
        ),
        (rows, blocks, mosaic_alone, "takes 2 to 4096 rows, not 4097"),
        (rows[:1], blocks, mosaic_alone, "takes 2 to 4096 rows, not 1"),
        (rows[:3], blocks, mosaic_alone, "takes bfloat16, not float32"),
        (rows[:5], blocks, triton, "takes 1 to 4 rows, not 5"),
        (narrow[0][:, :320], five, mosaic_alone, "a width that 128 divides, not 192 and 320"),
        (*floats, mosaic_alone, "more than 4 rows of a matrix of floats, not 4"),
        (*narrow, mosaic_alone, "that 64 divides and a width that 64 divides, not 192 and 608"),
        (
            odd[0][:4],
            odd[1],
            mosaic_alone,
            "more than 4 rows, or a width that 128 divides, not 576",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_product(jnp.asarray(x), matrix, **options)
