"""Reads safetensors checkpoints, in one file or in shards with an index."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors in model.safetensors, or else in an index and its shards."""

    def __init__(self, folder: Path):
        """Reads the headers, not the values.

        Raises:
            FileNotFoundError: the file or a shard is missing.
            ValueError: a file is damaged, a tensor's dtype is not float32, float16 or bfloat16, or
                the index names tensors that are not in the shards.
        """
        self.path = folder
        single = folder / "model.safetensors"
        if not single.is_file() and (folder / _INDEX).is_file():
            self._files: dict[str, Any] = _shards(folder / _INDEX)
        else:
            file = _opened(single)
            self._files = dict.fromkeys(file.keys(), file)
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        self._dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
        for name, dtype in self._dtypes.items():
            if dtype not in _ITEM_BYTES:
                raise ValueError(
                    f"{folder}: {name} has dtype {dtype!r}: must be one of {list(_ITEM_BYTES)}"
                )

    def nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * _ITEM_BYTES[self._dtypes[name]]

    def kind(self, name: str) -> str:
        """Returns the tensor's dtype."""
        return _KINDS[self._dtypes[name]]

    def form(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def blocks(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def read(self, name: str) -> np.ndarray:
        """Copies the tensor's values, in their stored dtype."""
        return self._files[name].get_tensor(name)


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


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _shards(index: Path) -> dict[str, Any]:
    """Returns the open shard of each tensor of the index."""
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
        shards[shard] = _opened(index.parent / shard)
    held = {shard: set(file.keys()) for shard, file in shards.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise ValueError(f"{index}: {name} should be in {shard}, which does not hold it")
    for shard, names in held.items():
        if unlisted := sorted(name for name in names if weight_map.get(name) != shard):
            raise ValueError(
                f"{index}: {shard} holds {unlisted[0]}, which the index does not place there"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}
