"""One quantized matrix of a safetensors checkpoint: its headers, its numbers and its blocks."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jsparse.models.quantization_config import Scheme
from jsparse.models.quantized_layouts import (
    SUFFIXES,
    bytes_of,
    codes_of,
    scales_of,
    scales_shape,
    shape_of,
    zeros_of,
    zeros_shape,
)
from jsparse.models.safetensors_files import DTYPES, PLAIN, SafetensorsFolder
from jsparse.models.weights import Stored
from jsparse.pallas_kernels.weight_blocks import Blocks, Form, packed

GROUPS = (128, 64, 32)
"""Numbers of a row with one scale in blocks, best first."""
_NAN, _NEGATIVE_NAN = 0x7F, 0xFF  # of float8_e4m3fn


class QuantizedMatrix:
    """The tensors of one module.

    Attributes:
        names: the names of its tensors.
        shape: (out, in).
    """

    def __init__(self, files: SafetensorsFolder, module: str, scheme: Scheme):
        """Reads the headers, and the order of columns if the file has it.

        Raises:
            ValueError: a tensor is missing, has another shape or dtype, or groups are not of
                successive columns.
        """
        self._files, self._scheme, suffixes = files, scheme, SUFFIXES[scheme.layout]
        self._codes = f"{module}.{suffixes.codes}"
        self._scales, *others = (f"{module}.{suffix}" for suffix in suffixes.scales)
        for name in others:
            if name in files.shapes:
                self._scales = name
        self._zeros = f"{module}.{suffixes.zeros}"
        shape, groups = (
            suffix and f"{module}.{suffix}" for suffix in (suffixes.shape, suffixes.groups)
        )
        stored = self._codes, self._scales, self._zeros, shape, groups
        self.names = [name for name in stored if name in files.shapes]
        self.shape = self._checked_shape(shape)
        self._area = self._checked_area()
        self._areas = _areas(self.shape, self._area)
        if scheme.zeros or self._zeros in self.names:
            self._require(self._zeros, "I8" if scheme.layout == "values" else "I32")
            self._require_shape(self._zeros, zeros_shape(self._areas, scheme))
        if groups in self.names:
            self._require_order(groups)

    @property
    def form(self) -> Form | None:
        """The format of its blocks, or None.

        None: 32 columns of a block would have several scales; or zero points of 8 bits, for which
        the mins of blocks have too few bits.
        """
        scheme = self._scheme
        group = next((size for size in GROUPS if self._span % size == 0), None)
        if group is None or (scheme.zeros and scheme.bits == 8):
            return None
        scales = str(DTYPES[self._files.dtypes[self._scales]])
        return Form(scheme.bits, group, scales, mins=scheme.zeros, floats=scheme.floats)

    @property
    def _span(self) -> int:
        """The largest number of columns that divides both a row and an area."""
        return math.gcd(self._area[1], self.shape[1])

    def stored(self) -> Stored | None:
        """Reads it as blocks whose codes are unpacked on the device; None without a `form`."""
        form = self.form
        if form is None:
            return None
        arrays = {"codes": self._read_codes()}
        arrays["scales"] = self._per_group(self._read_scales(), form.group)
        zeros = self._read_zeros()
        if zeros is not None:
            arrays["mins"] = self._per_group(zeros, form.group)
        return Stored(arrays, partial(_to_blocks, scheme=self._scheme, width=self.shape[1]))

    def numbers(self) -> np.ndarray:
        """Reads its numbers as float32."""
        codes = codes_of(self._read_codes(), self._scheme, self.shape[1])
        numbers = codes.astype(np.float32).reshape(self.shape[0], -1, self._span)
        zeros = self._read_zeros()
        if zeros is None:
            numbers -= self._scheme.middle
        else:
            numbers -= self._per_group(zeros, self._span).T[..., None]
        numbers *= self._per_group(self._read_scales(), self._span).T[..., None]
        return numbers.reshape(self.shape)

    def _read_codes(self) -> np.ndarray:
        """Reads the codes, or the bytes of the integers that have them."""
        codes = self._files.read(self._codes)
        if self._scheme.layout != "values":
            return bytes_of(codes)
        if self._scheme.floats:
            # maxima as signed and unsigned integers: far faster than a comparison of every code
            raw = codes.view(np.uint8)
            if raw.view(np.int8).max() == _NAN or raw.max() == _NEGATIVE_NAN:
                raise ValueError(f"{self._files.path}: {self._codes} has NaN among its numbers")
        return codes

    def _read_scales(self) -> np.ndarray:
        scales = self._files.read(self._scales)
        return scales_of(scales.reshape(scales_shape(self._areas, self._scheme)), self._scheme)

    def _read_zeros(self) -> np.ndarray | None:
        """Reads the zero points; None for a symmetric scheme."""
        if self._zeros not in self.names:
            return None
        stored = self._files.read(self._zeros).reshape(zeros_shape(self._areas, self._scheme))
        zeros = zeros_of(stored, self._scheme, self._areas[0])
        if self._scheme.zeros:
            return zeros
        if (zeros != self._scheme.middle).any():
            raise ValueError(
                f"{self._files.path}: {self._zeros} has zero points other than the middle of the "
                "codes, but config.json states a symmetric scheme"
            )
        return None

    def _per_group(self, array: np.ndarray, group: int) -> np.ndarray:
        """Repeats the items of areas for each group of columns and each row: [groups, out]."""
        array = np.repeat(array, self._area[0], 0)[: self.shape[0]]
        array = np.repeat(array, self._area[1] // group, 1)[:, : self.shape[1] // group]
        return np.ascontiguousarray(array.T)

    def _checked_shape(self, stated: str | None) -> tuple[int, int]:
        """Returns (out, in); `stated`: the name of a tensor with it."""
        codes = self._files.shapes[self._codes]
        if len(codes) != 2 or 0 in codes:
            raise self._misshapen(self._codes, "must be two positive numbers")
        shape = shape_of((codes[0], codes[1]), self._scheme)
        if stated is None:
            return shape
        self._require(stated, "I64", "I32")
        self._require_shape(stated, (2,))
        out, width = map(int, self._files.read(stated))
        if out != shape[0] or not 0 <= shape[1] - width < self._scheme.per_integer:
            raise self._misshapen(self._codes, f"{stated} is ({out}, {width})")
        return out, width

    def _checked_area(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns with one scale."""
        self._require(self._scales, *PLAIN)
        out, width = self.shape
        areas = [
            (min(rows or out, out), min(columns or width, width))
            for rows, columns in self._scheme.areas
        ]
        shapes = [scales_shape(_areas(self.shape, area), self._scheme) for area in areas]
        for area, shape in zip(areas, shapes, strict=True):
            if _same(shape, self._files.shapes[self._scales]):
                return area
        raise self._misshapen(self._scales, f"must be {' or '.join(map(str, shapes))}")

    def _require_order(self, name: str) -> None:
        """Raises ValueError unless the groups of columns are in order."""
        width = self.shape[1]
        self._require(name, "I32")
        self._require_shape(name, (width,))
        if not np.array_equal(self._files.read(name), np.arange(width) // self._area[1]):
            raise ValueError(
                f"{self._files.path}: {name} is not in order (act-order, desc_act): groups must "
                "be of successive columns"
            )

    def _require(self, name: str, *dtypes: str) -> None:
        """Raises ValueError unless the file has a tensor of one of these dtypes."""
        if name not in self._files.shapes:
            raise ValueError(f"{self._files.path} lacks {name}, which belongs to {self._codes}")
        if (dtype := self._files.dtypes[name]) not in dtypes:
            raise ValueError(
                f"{self._files.path}: {name} has dtype {dtype!r}: must be one of {list(dtypes)}"
            )

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not _same(shape, self._files.shapes[name]):
            raise self._misshapen(name, f"must be {shape}")

    def _misshapen(self, name: str, rule: str) -> ValueError:
        shape = self._files.shapes[name]
        return ValueError(f"{self._files.path}: {name} has shape {shape}: {rule}")


def _areas(shape: tuple[int, int], area: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of areas below and beside each other in a matrix."""
    return -(-shape[0] // area[0]), -(-shape[1] // area[1])


def _same(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two shapes are the same but for axes of length 1."""
    return [n for n in shape if n != 1] == [n for n in other if n != 1]


@partial(jax.jit, static_argnames=("scheme", "width"))
def _to_blocks(arrays: dict[str, Array], scheme: Scheme, width: int) -> Blocks:
    """Returns a matrix in blocks: unpacks its codes."""
    codes = codes_of(arrays["codes"], scheme, width)
    made: Any = {name: array for name, array in arrays.items() if name != "codes"}
    return made | (packed(codes, 4) if scheme.bits == 4 else {"values": codes})
