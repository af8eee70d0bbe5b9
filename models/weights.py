"""Converts a checkpoint's tensors to the decoder's tree.

Checkpoints store a linear map as [out, in] and q, k, v (gate, up) separately. The decoder needs
these joined and, except for 8-bit blocks, as [in, out]. All names and shapes are checked before the
first tensor is read. One weight at a time then goes to the device, where its tensors are joined,
transposed and cast; the host never has more than one weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.machine import memory
from jsparse.models.config import ModelConfig
from jsparse.models.families import Names
from jsparse.models.quantized import is_matrix, is_transposed, to_blocks
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import Weights
from jsparse.pallas_kernels.weight_blocks import BLOCK, FORMS, Blocks, Form

# bytes per number to convert a matrix to blocks: arguments, results, and intermediates
WHILE_CUT = 12
OnProgress = Callable[[int, int], None]


class Stored(NamedTuple):
    """A tensor as a checkpoint stores it, to be converted to blocks on the device.

    Attributes:
        arrays: its parts by name; the first axis of a GGUF tensor's is its rows.
        convert: a function that jax.jit made, from these arrays to `Blocks`. It belongs to a
            module, so that tensors of one shape share a compiled program.
    """

    arrays: dict[str, np.ndarray]
    convert: Callable[[dict[str, jax.Array]], Blocks]


@runtime_checkable
class TensorStore(Protocol):
    """A checkpoint's tensors by name, already checked to be inside their files."""

    path: Path
    shapes: dict[str, tuple[int, ...]]

    def nbytes(self, name: str) -> int:
        """Returns the tensor's size in its file, in bytes."""
        ...

    def kind(self, name: str) -> str:
        """Returns the tensor's type in its file for messages, such as "q2_k" or "bfloat16"."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads the tensor's values as float32, float16 or bfloat16 into a new array."""
        ...

    def form(self, name: str) -> Form | None:
        """Returns the format of blocks that the tensor can stay in, or None, from its header."""
        ...

    def blocks(self, name: str) -> Stored | None:
        """Reads a tensor that has a format of blocks as it is stored; None for others."""
        ...


class TensorSource(NamedTuple):
    """A tensor to read; `interleaved_heads` > 0 if its rows are in llama.cpp's order."""

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int


class Weight(NamedTuple):
    """One array of the tree by its path below "params", and tensors joined along the first axis."""

    path: str
    sources: tuple[TensorSource, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, which may be stored in 8-bit blocks."""
        return is_matrix(self.path)

    @property
    def transposed(self) -> bool:
        """Whether it is a linear map, which the decoder needs as [in, out]."""
        return is_transposed(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its numbers in the tree; `shapes` also gives those of blocks."""
        return self.joined_shape[::-1] if self.transposed else self.joined_shape

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of its joined tensors."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    def shapes(self, *, quantized: bool) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of its arrays in the tree by path; a matrix in blocks has two."""
        if not (quantized and self.is_matrix):
            return {self.path: self.shape}
        out, width = self.joined_shape
        return {f"{self.path}/values": (out, width), f"{self.path}/scales": (width // BLOCK, out)}

    def nbytes(self, dtype: Any, *, quantized: bool) -> int:
        """Returns its size in bytes, as numbers of a type or in 8-bit blocks."""
        count = math.prod(self.shape)
        if quantized and self.is_matrix:
            return count + 2 * count // BLOCK
        return count * np.dtype(dtype).itemsize


def list_weights(
    path: Path, num_tensors: int, config: ModelConfig, names: Names, *, interleaved: bool = False
) -> list[Weight]:
    """Lists a decoder's weights and their source tensors; the largest come first.

    `num_tensors` is the number of tensors in the checkpoint at `path`. `interleaved`: whether q and
    k rows are in llama.cpp's order.

    Raises:
        ValueError: there are fewer tensors than layers.
    """
    if config.num_layers > num_tensors:
        raise ValueError(
            f"{path} holds {num_tensors} tensors: too few for num_layers={config.num_layers}"
        )
    weights = []
    for template, shapes in _tensor_shapes(config).items():
        is_interleaved = interleaved and template.endswith("qkv/kernel")
        heads = (config.num_heads, config.num_kv_heads, 0) if is_interleaved else (0,) * len(shapes)
        for i in range(config.num_layers if "{i}" in template else 1):
            source_names = (name.format(i=i) for name in names[template])
            weights.append(
                Weight(template.format(i=i), tuple(map(TensorSource, source_names, shapes, heads)))
            )
    return weights


def _tensor_shapes(c: ModelConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns the shapes of each weight's tensors, without allocating: any size is safe."""
    d, f, q, kv = (
        c.hidden_size,
        c.intermediate_size,
        c.num_heads * c.head_dim,
        c.num_kv_heads * c.head_dim,
    )
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {"embed": ((c.vocab_size, d),)}
    if not c.tie_word_embeddings:
        shapes["lm_head"] = ((c.vocab_size, d),)
    shapes |= {
        "final_norm/scale": ((d,),),
        "layers_{i}/attention_norm/scale": ((d,),),
        "layers_{i}/attention/qkv/kernel": ((q, d), (kv, d), (kv, d)),
        "layers_{i}/attention/o/kernel": ((d, q),),
        "layers_{i}/mlp_norm/scale": ((d,),),
        "layers_{i}/mlp/gate_up/kernel": ((f, d), (f, d)),
        "layers_{i}/mlp/down/kernel": ((d, f),),
    }
    if c.qkv_bias:
        shapes["layers_{i}/attention/qkv/bias"] = ((q,), (kv,), (kv,))
    if c.qk_norm:
        shapes |= {f"layers_{{i}}/attention/{which}_norm/scale": ((c.head_dim,),) for which in "qk"}
    return shapes


def read_weights(
    weights: list[Weight],
    store: TensorStore,
    dtype: Any,
    on_progress: OnProgress | None,
    spreading: Spreading | None = None,
    *,
    quantized: bool = False,
) -> Weights:
    """Reads every tensor and returns the tree on the default device, or spread over several.

    The host has one tensor at a time, and so does the default device in addition to its part. With
    `quantized`, matrices are in 8-bit blocks, either as stored or converted.

    Raises:
        ValueError: they do not fit in the device's memory, or cannot be stored in blocks.
    """
    if quantized:
        for weight in weights:
            require_blocks(weight, 1 if spreading is None else spreading.mesh.size)
    kept = needed = 0
    for weight in weights:  # memory to keep, plus the temporary memory of making one weight
        size = weight.nbytes(dtype, quantized=quantized)
        beside = 0 if spreading is None else size
        if quantized and weight.is_matrix:
            beside = max(beside, WHILE_CUT * math.prod(weight.shape))
        kept += size if spreading is None else spreading.own_size(weight.path, size)
        needed = max(needed, kept + beside)
    if needed > (there := memory.available_bytes()):
        raise ValueError(
            f"{store.path} takes {memory.size(needed)} in "
            f"{'q8_0' if quantized else np.dtype(dtype).name}: "
            f"must fit in the {memory.size(there)} that are free"
        )
    sources = [source for weight in weights for source in weight.sources]
    total, done = sum(store.nbytes(source.name) for source in sources), 0
    arrays: dict[str, jax.Array] = {}
    for weight in weights:
        parts, of_blocks = [], quantized and weight.is_matrix
        for source in weight.sources:
            parts.append(_read(source, store, of_blocks=of_blocks))
            done += store.nbytes(source.name)
            if on_progress is not None:
                on_progress(done, total)
        # Wait, so that the host does not run ahead of the copies with many tensors in memory.
        if of_blocks:
            whole = _join_blocks(tuple(parts))
        else:
            whole = _join(tuple(parts), weight.transposed, dtype)
        whole = jax.block_until_ready(whole)
        for path, array in by_path(weight.path, whole):
            if spreading is not None:
                array = jax.block_until_ready(spreading.place(path, array))
            arrays[path] = array
    return tree(arrays)


def require_blocks(weight: Weight, ranks: int) -> None:
    """Raises ValueError if a matrix, or a rank's part of it, cannot be stored in blocks."""
    if not weight.is_matrix:
        return
    size = weight.sources[0].shape[-1]
    parts = ranks if weight.path.split("/")[-2:-1] in (["o"], ["down"]) else 1
    if size % (BLOCK * parts):
        among = f" on each of {parts} devices" if parts > 1 else ""
        raise ValueError(
            f"weights='q8_0': {weight.path} sums over {size} numbers: must be a multiple of "
            f"{BLOCK}{among}"
        )


def by_path(path: str, array: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yields the arrays of a weight with their paths: a matrix in blocks has two."""
    if not isinstance(array, dict):
        yield path, array
        return
    for name, part in array.items():
        yield f"{path}/{name}", part


def tree(leaves: Mapping[str, Any]) -> Weights:
    """Builds the decoder's tree from leaves by path."""
    params: Weights = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return {"params": params}


def in_blocks(weights: Weights) -> Weights:
    """Returns the decoder's tree, or a part of it, with its matrices in 8-bit blocks."""
    leaves = jax.tree.leaves_with_path(weights["params"])
    made = {}
    for path, leaf in leaves:
        weight = Weight("/".join(entry.key for entry in path), ())
        if weight.is_matrix:
            leaf = to_blocks(leaf.T if weight.transposed else leaf)
        made |= dict(by_path(weight.path, leaf))
    return tree(made)


def _read(source: TensorSource, store: TensorStore, *, of_blocks: bool) -> Any:
    if of_blocks and store.form(source.name) == FORMS["q8_0"]:
        stored = store.blocks(source.name)
        assert stored is not None
        arrays = {name: _in_order(source, array) for name, array in stored.arrays.items()}
        return stored.convert(jax.device_put(arrays))
    return jax.device_put(_in_order(source, store.read(source.name)))


def _in_order(source: TensorSource, tensor: np.ndarray) -> np.ndarray:
    if not source.interleaved_heads:
        return tensor
    # llama.cpp stores a head's rows as 0, H/2, 1, H/2 + 1, ...
    pairs = tensor.reshape(source.interleaved_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


@jax.jit
def _join_blocks(parts: tuple[Any, ...]) -> Blocks:
    """Returns a matrix in blocks: the file's own, or converted from its numbers in float32."""
    of_parts = [part if isinstance(part, dict) else to_blocks(part) for part in parts]
    return {
        "values": jnp.concatenate([part["values"] for part in of_parts]),
        "scales": jnp.concatenate([part["scales"] for part in of_parts], axis=1),
    }


@partial(jax.jit, static_argnames=("transposed", "dtype"))
def _join(parts: tuple[jax.Array, ...], transposed: bool, dtype: Any) -> jax.Array:
    whole = jnp.concatenate(parts)
    return (whole.T if transposed else whole).astype(dtype)
