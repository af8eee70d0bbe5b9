"""Reads and writes the weights of an indexer, a small model that scores blocks of tokens.

A checkpoint may hold them beside the decoder's weights, or a safetensors file of their own. Names
and shapes are those of the attention gates that the authors of SeerAttention-R (arXiv:2506.08889)
publish. In layer i, below "model.layers.{i}.self_attn.attn_gate.":

    attngate_linear_q.weight  [K, G, H, D]  from a group's queries to one gate query
    attngate_linear_k.weight  [K, 3H, D]    from a block's maximum, minimum and mean key
    attngate_qnorm.weight, attngate_knorm.weight  [D]  scales of RMS norms; both may be absent

The gate dimension D is the model's head dimension H, so that RoPE has the model's frequencies. The
authors' files are pickles, which are never loaded: docs/train_gates.md shows the conversion.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

PREFIX = "model.layers.{}.self_attn.attn_gate."
LINEAR = ("attngate_linear_q.weight", "attngate_linear_k.weight")
NORMS = ("attngate_qnorm.weight", "attngate_knorm.weight")
BLOCK = 64  # tokens; the published gates' size, if a file states none
TYPES = tuple(np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16))
_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.self_attn\.attn_gate\.(.+)")


class Indexer(NamedTuple):
    """The weights of all layers, in float32, bfloat16 or float16.

    Attributes:
        q: the projections of a group's queries.
        k: the projections of a block's maximum, minimum and mean key, in this order.
        norms: the scales of the gate query's and the gate key's RMS norm; zeros: no norm.
    """

    q: Float[np.ndarray | jax.Array, "L K G H D"]
    k: Float[np.ndarray | jax.Array, "L K 3*H D"]
    norms: Float[np.ndarray | jax.Array, "L 2 D"]


# the names of an indexer's arrays among a model's constants
INDEXER = tuple(f"indexer_{name}" for name in Indexer._fields)


class IndexerFile(NamedTuple):
    """The content of a file: the weights, the tokens of a block, and how it was trained."""

    indexer: Indexer
    block: int = BLOCK
    record: Mapping[str, Any] = {}


def mean_indexer(layers: int, heads: int, kv_heads: int, head_dim: int) -> Indexer:
    """Returns an untrained indexer, which scores blocks by the mean query times the mean key."""
    group, same = heads // kv_heads, np.eye(head_dim, dtype=np.float32)
    q = np.broadcast_to(same / group, (layers, kv_heads, group, head_dim, head_dim))
    k = np.concatenate([0 * same, 0 * same, same])
    norms = np.zeros((layers, 2, head_dim), np.float32)
    return Indexer(q, np.broadcast_to(k, (layers, kv_heads, *k.shape)), norms)


def constants_at(path: str) -> tuple[str, ...]:
    """Returns the names under which a policy needs the indexer of a file, not of the model."""
    return tuple(f"{name}@{path}" for name in INDEXER)


def file_of(constant: str) -> str | None:
    """Returns the file that a constant is read from; None: it belongs to the model."""
    name, _, path = constant.partition("@")
    return path if path and name in INDEXER else None


def read_constants_at(path: str) -> dict[str, jax.Array]:
    """Returns the arrays of `constants_at`, on the default device."""
    arrays = load_indexer(path).indexer
    return dict(zip(constants_at(path), map(jnp.asarray, arrays), strict=True))


def is_of_indexer(tensor: str) -> bool:
    """Returns whether a checkpoint's tensor belongs to an indexer."""
    return _NAME.fullmatch(tensor) is not None


def save_indexer(file: IndexerFile, path: str | os.PathLike[str]) -> None:
    """Writes an indexer to a file, replacing any that exists."""
    q, k, norms = map(np.asarray, file.indexer)
    tensors = {}
    for layer in range(len(q)):
        prefix = PREFIX.format(layer)
        tensors |= dict(zip((prefix + name for name in LINEAR), (q[layer], k[layer]), strict=True))
        if norms.any():
            tensors |= dict(zip((prefix + name for name in NORMS), norms[layer], strict=True))
    metadata = {"block": str(file.block), "record": json.dumps(file.record, sort_keys=True)}
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    Path(path).write_bytes(to_bytes(contiguous, metadata=metadata))


def load_indexer(path: str) -> IndexerFile:
    """Reads the indexer in a safetensors file, one that `save_indexer` wrote or another.

    Raises:
        ValueError: the file cannot be read, or has other content.
    """
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        block = int(metadata.get("block", BLOCK))
        record = json.loads(metadata.get("record", "{}"))
    # AttributeError: numpy lacks a tensor's type; ValueError: of the metadata
    except (OSError, SafetensorError, AttributeError, ValueError) as error:
        raise ValueError(
            f"gates={path!r}: must be a safetensors file of an indexer that can be read ({error})"
        ) from None
    indexer = read_indexer(tensors.__getitem__, tensors.keys(), f"gates={path!r}")
    if block < 1 or not isinstance(record, dict):
        raise ValueError(f"gates={path!r}: its metadata must be a block of tokens and a record")
    return IndexerFile(indexer, block, record)


def read_indexer(read: Callable[[str], np.ndarray], names: Collection[str], where: str) -> Indexer:
    """Stacks the tensors of an indexer.

    Args:
        read: returns the tensor of a name.
        names: all names, of which those of other tensors are ignored.
        where: the place of the tensors, for messages.

    Raises:
        ValueError: there is no indexer, a layer lacks a tensor, a gate has other tensors, or shapes
            or types do not fit.
    """
    layers = {int(found[1]) for name in names if (found := _NAME.fullmatch(name))}
    if not layers:
        raise ValueError(f"{where}: must hold {PREFIX.format(0)}{LINEAR[0]}, an indexer's weights")
    given = {found[2] for name in names if (found := _NAME.fullmatch(name))}
    if other := sorted(x for x in given - {*LINEAR, *NORMS} if x.startswith("attngate_")):
        raise ValueError(f"{where}: must not hold {other[0]}, which gates have no place for")
    kinds = (*LINEAR, *NORMS) if given & {*NORMS} else LINEAR
    of_layers: list[list[np.ndarray]] = []
    for layer in range(max(layers) + 1):
        wanted = [PREFIX.format(layer) + kind for kind in kinds]
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"{where}: must hold {missing[0]}, as of the other layers")
        of_layers.append([read(name) for name in wanted])
        _require_like(of_layers[0][0], wanted, of_layers[layer], where)
    q, k, *norms = (np.stack(each) for each in zip(*of_layers, strict=True))
    none = np.zeros((len(q), 2, q.shape[-1]), q.dtype)
    return Indexer(q, k, np.stack(norms, axis=1) if norms else none)


def _require_like(
    first: np.ndarray, names: list[str], tensors: list[np.ndarray], where: str
) -> None:
    """Raises ValueError unless a layer's tensors have the sizes of layer 0's first, and a type."""
    if first.ndim != 4:
        raise ValueError(f"{where}: {names[0]} must be [K, G, H, D], not {list(first.shape)}")
    heads, _, head_dim, size = first.shape
    wanted = first.shape, (heads, 3 * head_dim, size), (size,), (size,)
    for name, tensor, shape in zip(names, tensors, wanted, strict=False):
        if tensor.shape != shape:
            raise ValueError(f"{where}: {name} must be {list(shape)}, not {list(tensor.shape)}")
        if tensor.dtype not in TYPES:
            raise ValueError(
                f"{where}: {name} must be in {', '.join(map(str, TYPES))}, not {tensor.dtype}"
            )


def require_fit(
    indexer: Indexer, where: str, layers: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Raises ValueError if an indexer is for a model of other sizes."""
    found, wanted = indexer.q.shape, (layers, kv_heads, heads // kv_heads, head_dim, head_dim)
    if found != wanted:
        names = "layers × KV heads × heads of a group × channels × gate channels"
        raise ValueError(
            f"{where}: is for {_times(found)} {names}: must be for the model's {_times(wanted)}"
        )


def _times(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes))
