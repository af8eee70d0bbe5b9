"""Lists the decoder's weights and the tensors of a checkpoint that belong to them.

Checkpoints store a linear map as [out, in] and q, k, v (gate, up) separately. The decoder needs
these joined and, except for matrices in blocks, as [in, out].
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jsparse.models.config import ModelConfig
from jsparse.models.families import Names
from jsparse.models.quantized import is_matrix, is_transposed
from jsparse.models.transformer import Weights
from jsparse.pallas_kernels.weight_blocks import Blocks, Form

OnProgress = Callable[[int, int], None]
AT_ONCE = 1 << 22
"""Numbers to convert to blocks at a time, which limits temporary memory."""


class Stored(NamedTuple):
    """A tensor as a checkpoint stores it, to be converted to blocks on the device.

    Attributes:
        arrays: its parts by name; the first axis of a GGUF tensor's is its rows.
        convert: a function that jax.jit made, from these arrays to `Blocks`, `AT_ONCE` numbers at
            a time. It belongs to a module, so that tensors of one shape share a compiled program.
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
    """One array of the tree by its path below "params", and tensors joined along the first axis.

    If `experts` > 0, it holds their matrices [E, in, out]. Sources are [out, in], ordered by
    expert, or [E, out, in].
    """

    path: str
    sources: tuple[TensorSource, ...]
    experts: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, which may be stored in blocks."""
        return is_matrix(self.path)

    @property
    def transposed(self) -> bool:
        """Whether it is a linear map, which the decoder needs as [in, out]."""
        return is_transposed(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its numbers in the tree, unless it is in blocks."""
        if self.experts:
            rows = sum(math.prod(source.shape[:-1]) for source in self.sources)
            return (self.experts, self.sources[0].shape[-1], rows // self.experts)
        return self.joined_shape[::-1] if self.transposed else self.joined_shape

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of its joined tensors."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    def arrays(self, form: Form | None, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns its arrays in the tree by path; a matrix in blocks has several."""
        if form is None:
            return {self.path: jax.ShapeDtypeStruct(self.shape, dtype)}
        made = form.arrays(*self.joined_shape)
        return {f"{self.path}/{name}": array for name, array in made.items()}


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
            sources = tuple(map(TensorSource, source_names, shapes, heads))
            weights.append(Weight(template.format(i=i), sources))
    return _expert_weights(config, names) + weights


def _expert_weights(c: ModelConfig, names: Names) -> list[Weight]:
    """Lists the matrices of experts, of which a file has one tensor per expert, or one for all."""
    if c.experts is None:
        return []
    d, f, number, weights = c.hidden_size, c.experts.intermediate_size, c.experts.own, []
    for kind, rows, width in (("gate_up", 2 * f, d), ("down", d, f)):
        path = f"layers_{{i}}/mlp/experts/{kind}"
        shape = rows // len(names[path]), width
        for i in range(c.num_layers):
            sources = []
            if "{e}" in names[path][0]:
                for e in range(number):
                    sources += [TensorSource(n.format(i=i, e=e), shape, 0) for n in names[path]]
            else:
                whole = (number, *shape)
                sources += [TensorSource(n.format(i=i), whole, 0) for n in names[path]]
            weights.append(Weight(path.format(i=i), tuple(sources), number))
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
    }
    if c.experts is None:
        shapes |= {
            "layers_{i}/mlp/gate_up/kernel": ((f, d), (f, d)),
            "layers_{i}/mlp/down/kernel": ((d, f),),
        }
    else:
        shapes["layers_{i}/mlp/router/rows"] = ((c.experts.number, d),)
        if own := c.experts.shared_size:
            shapes |= {
                "layers_{i}/mlp/shared/gate_up/kernel": ((own, d), (own, d)),
                "layers_{i}/mlp/shared/down/kernel": ((d, own),),
                "layers_{i}/mlp/shared/gate/rows": ((1, d),),
            }
    if c.qkv_bias:
        shapes["layers_{i}/attention/qkv/bias"] = ((q,), (kv,), (kv,))
    if c.qk_norm:
        shapes |= {f"layers_{{i}}/attention/{which}_norm/scale": ((c.head_dim,),) for which in "qk"}
    return shapes


def by_path(path: str, array: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yields the arrays of a weight with their paths: a matrix in blocks has several."""
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
