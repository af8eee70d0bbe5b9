"""Divides the work of `mosaic_few` among the programs of its launch."""

from dataclasses import dataclass
from typing import Any

from jsparse.pallas_kernels.quantized_product.mosaic_integers import Digits
from jsparse.pallas_kernels.quantized_product.mosaic_shared import BLOCKS_OF_H100, ROWS
from jsparse.pallas_kernels.weight_blocks import BLOCK, Form

# maximum rows of x per launch; the division of the work depends only on these
GROUPS = (1, 2, 4, 16, 32)
PARTS = (1, 2, 4, 8)
MEMORY = 232_448  # bytes of shared memory per program
DIGIT_BYTES = 2**16  # target bytes of it for a part of x
UNIT_CHUNKS = 1  # overhead of a unit, in chunks


@dataclass(frozen=True)
class Problem:
    """Sizes of one launch; the key of compiled kernels.

    Attributes:
        form: the format of the matrix.
        rows: rows of x.
        padded: rows of x in a product: 1, 2, 4 or a multiple of 8.
        out, width: the sizes of the matrix.
        columns: columns per chunk.
        stages: chunks in shared memory, a multiple of `turns`.
        turns: multiplying warpgroups.
        parts: parts of the columns.
        blocks: programs.
        interpret: whether the kernel runs in the interpreter.
    """

    form: Form
    rows: int
    padded: int
    out: int
    width: int
    columns: int
    stages: int
    turns: int
    parts: int
    blocks: int
    interpret: bool

    @property
    def tiles(self) -> int:
        return self.out // ROWS

    @property
    def units(self) -> int:
        return self.tiles * self.parts

    @property
    def chunks(self) -> int:
        """The number of chunks per part."""
        return -(-self.width // (self.columns * self.parts))

    @property
    def part_columns(self) -> int:
        return self.chunks * self.columns

    @property
    def at_once(self) -> int:
        """The number of blocks with their products in registers at once."""
        return (4 if self.padded <= 16 else 2) // (2 if self.halves and self.padded > 8 else 1)

    @property
    def halves(self) -> bool:
        """Whether a block's halves have their own scales."""
        return self.form.group < BLOCK

    @property
    def digits(self) -> Digits:
        """The arrangement of x.

        With factors of scales and mins, its sums are multiplied by half of the codes' range.
        """
        form = self.form
        sums = (form.half if form.supers else 1) if form.mins else 0
        return Digits(self.padded, min(form.group, BLOCK), 8 - form.bits, sums)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, int], Any]]:
        """The shapes and dtypes of a chunk's arrays of the matrix."""
        chunk = self.form.arrays(ROWS, self.columns)
        return {name: (spec.shape, spec.dtype) for name, spec in chunk.items()}

    @property
    def others(self) -> int:
        """The multiplying warpgroups after the first; at least 1, since no buffer may be empty."""
        return max(self.turns - 1, 1)


def chunk_columns(form: Form, group: int) -> int:
    """Returns the columns of a chunk.

    32 rows of x leave room for fewer, but arrays of a chunk must fill the 128 bytes to which TMA
    aligns them, which those of smaller codes then would not.
    """
    return 128 if group == GROUPS[-1] and form.bits == 8 else 256


def group_of(rows: int, form: Form) -> int:
    """Returns the size in GROUPS that a launch of `rows` rows uses.

    Four rows of digits leave no room for two halves of a block.
    """
    return next(most for most in GROUPS if rows <= most and (most, form.group) != (4, 16))


def best_turns(form: Form, group: int) -> int:
    """Returns the number of multiplying warpgroups.

    Unpacking small codes for several rows leaves tensor cores idle, which twice as many fill.
    """
    return 4 if form.bits == 4 and group in (4, 16) else 2


def best_parts(out: int, width: int, columns: int, rows: int) -> int:
    """Returns the number of parts that minimises the work of the busiest program.

    The bits of a row of x depend on this number, so it depends on the size in GROUPS instead of the
    actual number of rows.
    """

    def cost(parts: int) -> tuple[int, int]:
        chunks = -(-width // (columns * parts))
        blocks = BLOCKS_OF_H100 - BLOCKS_OF_H100 % parts
        units = -(-out // ROWS * parts // blocks)
        digits = 2 * rows * chunks * columns
        return max(digits, DIGIT_BYTES), units * (chunks + UNIT_CHUNKS)

    return min(PARTS, key=cost)


def most_stages(form: Form, padded: int, columns: int, chunks: int, turns: int) -> int:
    """Returns the number of chunks that fit in shared memory: a multiple of `turns`, at most 8."""
    digits = Digits(padded, min(form.group, BLOCK))
    numbers = 4 / BLOCK + (4 / digits.segment if form.mins else 0)  # units, and sums of x
    of_x = chunks * columns * (digits.rows + padded * numbers)
    others = 4 * ROWS * max(padded, 8) * turns + 8192  # sums, and alignment of all of these
    room = int((MEMORY - of_x - others) / form.nbytes(ROWS, columns))
    return max(min(room, 8) // turns, 1) * turns
