"""Reads safetensors checkpoints, in one file or in shards with an index.

Every number is checked before it is used.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


class _Tensor(NamedTuple):
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """Offset in the file at which the values begin, in bytes."""

    nbytes: int


class SafetensorsFolder:
    """Gives access to the tensors in model.safetensors, or else in an index and its shards.

    Attributes:
        path: the folder.
        shapes: the shapes by tensor name.
    """

    def __init__(self, folder: Path):
        """Reads the headers, not the values.

        Raises:
            FileNotFoundError: the file or a shard is missing.
            ValueError: a header is malformed or lies, or the index names tensors that are not in
                the shards.
        """
        self.path = folder
        single = folder / "model.safetensors"
        is_sharded = not single.is_file() and (folder / _INDEX).is_file()
        self._tensors = _read_sharded(folder) if is_sharded else _read_header(single)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def nbytes(self, name: str) -> int:
        """Returns the tensor's size in its file, in bytes."""
        return self._tensors[name].nbytes

    def blocks(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def read(self, name: str) -> np.ndarray:
        """Reads the tensor's values, in the dtype they are stored in."""
        tensor = self._tensors[name]
        # Read, not mapped: with a copy, a file that changes later cannot change or crash a loaded
        # model.
        raw = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.start)
        if raw.size != tensor.nbytes:
            raise ValueError(
                f"{tensor.file}: {name} ends after {raw.size} of {tensor.nbytes} bytes"
            )
        return raw.view(tensor.dtype).reshape(tensor.shape)


def read_json(file: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, or does not hold an object.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    return _json_object(file, file.read_bytes())


def _json_object(file: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}: must be an object")
    return value


def _read_sharded(folder: Path) -> dict[str, _Tensor]:
    """Returns all tensors of the index, each from the shard that the index names."""
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ValueError(
            f"{index}: weight_map must be an object that maps tensor names to file names"
        )
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if shard in ("", ".", "..") or any(c in shard for c in "/\\\0"):
            raise ValueError(
                f"{index}: shard {shard!r} must be the name of a file in the same folder"
            )
        shards[shard] = _read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{index}: {name} should be in {shard}, which does not hold it")
    for shard, tensors in shards.items():
        if unlisted := sorted(name for name in tensors if weight_map.get(name) != shard):
            raise ValueError(
                f"{index}: {shard} holds {unlisted[0]}, which the index does not place there"
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Reads the header of one file: 8 bytes of length and a JSON object, before the values."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if file_size < 8 or length > min(file_size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: a header of {length} bytes does not fit a file of {file_size} bytes"
            )
        header = _json_object(file, stream.read(length))
    header.pop("__metadata__", None)
    tensors = {
        name: _tensor(file, name, entry, 8 + length, file_size) for name, entry in header.items()
    }
    end, last = 8 + length, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise ValueError(f"{file}: {name} overlaps {last}")
        end, last = tensor.start + tensor.nbytes, name
    return tensors


def _tensor(file: Path, name: str, entry: Any, data_start: int, file_size: int) -> _Tensor:
    """Checks one header entry and returns its tensor."""
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{file}: {name} must state its shape and two data_offsets as lists of integers from 0 "
            "on"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{file}: {name} has dtype {dtype!r}: must be one of {list(_DTYPES)}")
    start, end = offsets
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - start != nbytes:
        raise ValueError(
            f"{file}: {name} has {end - start} bytes: {dtype} of shape {tuple(shape)} takes "
            f"{nbytes}"
        )
    if data_start + end > file_size:
        raise ValueError(
            f"{file}: {name} ends at byte {data_start + end}, but the file has {file_size}: "
            "truncated?"
        )
    return _Tensor(file, _DTYPES[dtype], tuple(shape), data_start + start, nbytes)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
