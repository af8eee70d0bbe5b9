"""Writes and reads prefilled prompts: K, V and the policy's state, in one safetensors file."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jsparse.models.checkpoint import Params

KIND = "jsparse prompt 1"
IDS = "token_ids"
# numpy lacks the types of 2 bytes that jax has; their bits are stored
BITS = {2: np.uint16, 1: np.uint8}


class PromptFile(NamedTuple):
    """What a file says of its prompt.

    Attributes:
        model: the digest of the model.
        name: the name under which the model was loaded, for messages.
        policy: the policy's expression.
        page_size: the tokens per page.
        capacity: the slots per head that the cache had before it was compressed.
        pages: the pages per head that it has.
        room: the most tokens that may follow the prompt.
    """

    model: str
    name: str
    policy: str
    page_size: int
    capacity: int
    pages: int
    room: int


def digest(params: Params) -> str:
    """Returns a digest of the model: its sizes, its types, and the first row of every matrix."""
    found = hashlib.sha256(f"{params.config} {params.types}".encode())
    for path, leaf in jax.tree.leaves_with_path(params.weights):
        row = np.asarray(leaf[(0,) * (leaf.ndim - 1)])
        found.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode() + row.tobytes())
    return found.hexdigest()


def write(path: str | os.PathLike[str], file: PromptFile, ids: list[int], arrays: Any) -> None:
    """Writes a prompt to a file, replacing any that exists."""
    named = {name: _bits(np.asarray(leaf)) for name, leaf in _named(arrays)}
    named[IDS] = np.asarray(ids, np.int32)
    data = save(named, metadata={"kind": KIND, "prompt": json.dumps(file._asdict())})
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_header(path: str | os.PathLike[str]) -> tuple[PromptFile, list[int]]:
    """Returns what a file says of its prompt, and the prompt's tokens.

    Raises:
        ValueError: it cannot be read, or was not written by `write`.
    """
    try:
        with safe_open(os.fspath(path), "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise ValueError(f"its kind is {metadata.get('kind')!r}")
            ids = file.get_tensor(IDS).tolist()
        return PromptFile(**json.loads(metadata["prompt"])), ids
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"path={os.fspath(path)!r}: must be a file that CachedPrompt.save of this version "
            f"wrote ({error})"
        ) from None


def read_arrays(path: str | os.PathLike[str], like: Any) -> Any:
    """Returns the file's arrays as a tree of the shapes and types of `like`.

    Raises:
        ValueError: they differ.
    """
    with safe_open(os.fspath(path), "numpy") as file:
        names = {*file.keys()} - {IDS}
        wanted = dict(_named(like))
        if names != wanted.keys():
            raise ValueError(
                f"path={os.fspath(path)!r}: must hold the arrays {sorted(wanted)}, not "
                f"{sorted(names)}"
            )
        arrays = []
        for name, leaf in wanted.items():
            array = file.get_tensor(name)
            if array.dtype != leaf.dtype:
                array = array.view(leaf.dtype)
            if array.shape != leaf.shape:
                raise ValueError(
                    f"path={os.fspath(path)!r}: {name} has shape {array.shape}: must be "
                    f"{leaf.shape}"
                )
            arrays.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _bits(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array if array.dtype.isbuiltin == 1 else array.view(BITS[array.dtype.itemsize])
