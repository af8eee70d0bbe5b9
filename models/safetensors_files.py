"""Reads safetensors checkpoints, in one file or in shards with an index."""

import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""The supported dtypes by their names in the format."""
PLAIN = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors in model.safetensors, or else in an index and its shards."""

    def __init__(self, folder: Path, also: Iterable[str] = ()):
        """Reads the headers, not the values.

        Args:
            folder: the folder.
            also: dtypes of tensors, by their names in the format, that are allowed in addition to
                float32, float16 and bfloat16.

        Raises:
            FileNotFoundError: the file or a shard is missing.
            ValueError: a file is damaged, a tensor's dtype is not allowed, or the index names
                tensors that are not in the shards.
        """
        self.path = folder
        single = folder / "model.safetensors"
        if not single.is_file() and (folder / _INDEX).is_file():
            self._files = _shards(folder / _INDEX)
        else:
            file = _File(single)
            self._files = dict.fromkeys(file.names, file)
        slices = {name: file.opened.get_slice(name) for name, file in self._files.items()}
        self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        self.dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
        allowed = [*PLAIN, *also]
        for name, dtype in self.dtypes.items():
            if dtype not in allowed:
                raise ValueError(f"{folder}: {name} has dtype {dtype!r}: must be one of {allowed}")

    def nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * DTYPES[self.dtypes[name]].itemsize

    def kind(self, name: str) -> str:
        """Returns the tensor's dtype."""
        return str(DTYPES[self.dtypes[name]])

    def form(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def blocks(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def read(self, name: str) -> np.ndarray:
        """Copies the tensor's values, in their stored dtype."""
        file = self._files[name]
        if self.dtypes[name] != "F8_E4M3":
            return file.opened.get_tensor(name)
        return file.raw(name).view(DTYPES["F8_E4M3"]).reshape(self.shapes[name])


class _File:
    """One file of tensors, whose header the format's library has checked."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            self.opened: Any = safe_open(path, "numpy")
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        self.names: list[str] = list(self.opened.keys())
        self._path = path

    def raw(self, name: str) -> np.ndarray:
        """Reads the tensor's bytes; the library cannot read types that numpy itself lacks."""
        start, end = self._offsets[name]
        return np.fromfile(self._path, np.uint8, end - start, offset=start)

    @cached_property
    def _offsets(self) -> dict[str, tuple[int, int]]:
        """The first byte of each tensor and the one after its last."""
        with self._path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        starts = {name: header[name]["data_offsets"] for name in self.names}
        return {name: (8 + length + a, 8 + length + b) for name, (a, b) in starts.items()}


def read_json(file: Path) -> dict[str, Any]:
    """Reads the object in a JSON file; raises ValueError if there is none."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}: must be an object")
    return value


def _shards(index: Path) -> dict[str, _File]:
    """Returns the shard of each tensor of the index."""
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
        shards[shard] = _File(index.parent / shard)
    held = {shard: set(file.names) for shard, file in shards.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise ValueError(f"{index}: {name} should be in {shard}, which does not hold it")
    for shard, names in held.items():
        if unlisted := sorted(name for name in names if weight_map.get(name) != shard):
            raise ValueError(
                f"{index}: {shard} holds {unlisted[0]}, which the index does not place there"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}
