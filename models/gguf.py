"""Reads GGUF files: metadata, and tensors in every quantisation that the `gguf` package supports.

The header is parsed here because the package's reader trusts counts, lengths and offsets, and takes
seconds to read a vocabulary. Here every number is checked against the file's size before use.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

if TYPE_CHECKING:
    from jsparse.models.weights import Stored
    from jsparse.pallas_kernels.weight_blocks import Form

_VERSIONS = (2, 3)
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
# The minimum bytes of one metadata entry and of one tensor's description.
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_KNOWN = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4 "
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
)
# Older releases of the package lack the newest of them.
QUANTISATIONS = tuple(kind for kind in GGML_QUANT_SIZES if kind.name in _KNOWN.split())
"""Supported tensor types; the others are integers, doubles or intermediate results."""

_VALUES_AT_ONCE = 1 << 22
"""Values to dequantise at a time: the package needs several times their size in addition."""


_Info = tuple[str, GGMLQuantizationType, tuple[int, ...], int]  # name, kind, shape, offset


class _GGUFTensor(NamedTuple):
    """A tensor's location in a file."""

    path: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile:
    """Access to the metadata and tensors of a GGUF file, or of a model split into several.

    Attributes:
        path: the file, the first of several.
        metadata: the first file's values by key, as Python numbers, strings and lists.
        shapes: the shapes by tensor name, [out, in] for a linear map.
    """

    def __init__(self, path: Path):
        """Reads the headers.

        Raises:
            FileNotFoundError: the file, or another of a split model, does not exist.
            ValueError: a header is malformed or inconsistent, or the file is not the first.
        """
        self.path = path
        self.metadata, self._tensors = _read_header(path)
        for other in _other_files(path, self.metadata):
            _, tensors = _read_header(other)
            if twice := self._tensors.keys() & tensors.keys():
                raise ValueError(f"{other} holds {min(twice)!r} again")
            self._tensors |= tensors
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def nbytes(self, name: str) -> int:
        """Returns the tensor's size in the file, in bytes."""
        return self._tensors[name].nbytes

    def read(self, name: str) -> np.ndarray:
        """Reads the tensor's values: plain types in their own dtype, quantised ones as float32."""
        tensor, raw = self._tensors[name], self._raw(name)
        if tensor.kind in _PLAIN:
            return raw.view(_PLAIN[tensor.kind]).reshape(tensor.shape)
        values = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), np.float32)
        rows = raw.reshape(len(values), -1)
        step = max(1, _VALUES_AT_ONCE // values.shape[1])
        for start in range(0, len(values), step):
            values[start : start + step] = dequantize(rows[start : start + step], tensor.kind)
        return values.reshape(tensor.shape)

    def kind(self, name: str) -> str:
        """Returns the tensor's type, such as "q4_k" or "bfloat16"."""
        kind = self._tensors[name].kind
        return str(_PLAIN[kind]) if kind in _PLAIN else kind.name.lower()

    def form(self, name: str) -> "Form | None":
        """Returns the format of blocks that the tensor can stay in, or None."""
        from jsparse.pallas_kernels.weight_blocks import FORMS

        return FORMS.get(self.kind(name))

    def blocks(self, name: str) -> "Stored | None":
        """Reads a tensor's blocks, to be converted on the device; None for other types."""
        from jsparse.models.gguf_blocks import CONVERT
        from jsparse.models.weights import Stored

        tensor = self._tensors[name]
        convert = CONVERT.get(self.kind(name))
        if convert is None:
            return None
        nbytes = GGML_QUANT_SIZES[tensor.kind][1]
        return Stored({"rows": self._raw(name).reshape(*tensor.shape[:-1], -1, nbytes)}, convert)

    def _raw(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        raw = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.start)
        if raw.size != tensor.nbytes:
            raise ValueError(
                f"{tensor.path}: {name} ends after {raw.size} of {tensor.nbytes} bytes"
            )
        return raw


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _GGUFTensor]]:
    """Returns a file's metadata and tensors."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.stat().st_size < 24:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: a GGUF file has at least 24")
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _Header(path, data).parse()


def _other_files(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """Returns the files of a split model after the first, as llama.cpp's gguf-split names them."""
    count, nth = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if count in (0, 1):
        return []
    found = _SPLIT_NAME.fullmatch(path.name)
    if found is None or int(found[2]) != nth + 1 or int(found[3]) != count:
        raise ValueError(
            f"{path} is file {nth + 1} of {count}: must be named *-{nth + 1:05}-of-{count:05}.gguf"
        )
    names = [f"{found[1]}-{one:05}-of-{count:05}.gguf" for one in range(1, count + 1)]
    if nth:
        raise ValueError(f"{path} is file {nth + 1} of {count}: must be the first, {names[0]}")
    return [path.with_name(name) for name in names[1:]]


class _Header:
    """A cursor over the header; each step checks that it stays inside the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path, self._data, self._size = path, data, len(data)
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, _GGUFTensor]]:
        if (magic := bytes(self._data[:4])) != b"GGUF":
            raise self._error(f"begins with {magic!r}: must begin with b'GGUF'")
        self._at = 4
        if (version := self._scalar("I")) not in _VERSIONS:
            raise self._error(
                f"is of version {version}: must be one of {list(_VERSIONS)}, little-endian"
            )
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_entries = self._count("metadata entries", _MIN_ENTRY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise self._error(f"states {key} twice")
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"has general.alignment={alignment!r}: must be a power of two")
        return metadata, self._place(infos, alignment)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self._path} {what}")

    def _take(self, nbytes: int) -> int:
        """Moves past `nbytes` bytes and returns their start."""
        start, self._at = self._at, self._at + nbytes
        if self._at > self._size:
            raise self._error(
                f"asks for {nbytes} bytes at {start}, but has {self._size}: truncated or damaged"
            )
        return start

    def _scalar(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))[0]

    def _count(self, of_what: str, min_bytes: int) -> int:
        """Reads a count and checks that the rest of the file has room for it."""
        count = self._scalar("Q")
        if count * min_bytes > self._size - self._at:
            raise self._error(
                f"claims {count} {of_what}: more than its {self._size} bytes can hold"
            )
        return count

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise self._error(f"has a string at {start} that is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._error(f"has a value of unknown type {kind} at {self._at}")
        item_kind = self._scalar("I")
        if item_kind == _STRING:
            return [self._string() for _ in range(self._count("strings in an array", 8))]
        if item_kind not in _SCALARS:
            raise self._error(
                f"has an array of type {item_kind} at {self._at}: must hold numbers or strings"
            )
        code = _SCALARS[item_kind]
        count = self._count("values in an array", struct.calcsize("<" + code))
        start = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self._data, start))

    def _tensor_info(self) -> _Info:
        """Reads the next tensor's description and checks its type and shape."""
        name = self._string()
        if not 1 <= (num_dims := self._scalar("I")) <= _MAX_DIMS:
            raise self._error(f"gives {name!r} {num_dims} dimensions: must be 1 to {_MAX_DIMS}")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in QUANTISATIONS:  # an int equals its enum member
            named = next((known.name for known in GGMLQuantizationType if known == kind), kind)
            allowed = ", ".join(known.name for known in QUANTISATIONS)
            raise self._error(f"stores {name!r} as type {named}: must be one of {allowed}")
        block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)][0]
        if 0 in shape or shape[-1] % block:
            raise self._error(
                f"gives {name!r} shape {shape}: must be positive, the last a multiple of {block}"
            )
        return name, GGMLQuantizationType(kind), shape, offset

    def _place(self, infos: list[_Info], alignment: int) -> dict[str, _GGUFTensor]:
        """Locates each tensor, checking that it is inside the file and overlaps no other."""
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, _GGUFTensor] = {}
        for name, kind, shape, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(shape) // block * block_bytes
            if name in tensors:
                raise self._error(f"holds {name!r} twice")
            if offset % alignment:
                raise self._error(
                    f"puts {name!r} at offset {offset}: must be a multiple of {alignment}"
                )
            if data_start + offset + nbytes > self._size:
                end = data_start + offset + nbytes
                raise self._error(
                    f"has {self._size} bytes, but {name!r} ends at {end}: truncated or damaged"
                )
            tensors[name] = _GGUFTensor(self._path, kind, shape, data_start + offset, nbytes)
        end, last = data_start, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self._error(f"lets {name!r} overlap {last!r}")
            end, last = tensor.start + tensor.nbytes, name
        return tensors
