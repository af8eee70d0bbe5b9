"""Reads a checkpoint's tensors into the decoder's tree.

All names and shapes are checked, and all formats chosen, before the first tensor is read. One
weight at a time then goes to the device, where its tensors are converted and joined; the host never
has more than one tensor. Numbers of large weights, such as an embedding, go there in slices, so
that a small model with a large vocabulary needs little more memory than it has weights.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.machine import memory
from jsparse.models.joined_blocks import common_form, joined
from jsparse.models.quantized import to_blocks
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import Weights
from jsparse.models.weight_plan import Planned, forms_of, named_types
from jsparse.models.weights import (
    AT_ONCE,
    OnProgress,
    TensorSource,
    TensorStore,
    Weight,
    by_path,
    tree,
)
from jsparse.pallas_kernels.weight_blocks import (
    FORMS,
    Blocks,
    Form,
    dequantized,
    is_blocks,
)

# bytes per number for temporary arrays: to convert numbers to blocks, to join tensors of numbers,
# and to convert stored blocks or those of another format
TO_BLOCKS, TO_JOIN, TO_COMMON = 12, 4, 4
SLICE = 1 << 25
"""Numbers of a slice."""


def read_weights(
    planned: Sequence[Planned],
    store: TensorStore,
    dtype: Any,
    on_progress: OnProgress | None,
    spreading: Spreading | None = None,
) -> Weights:
    """Reads every tensor and returns the tree on the default device, or spread over several.

    Raises:
        ValueError: the weights do not fit in the device's memory.
    """
    needed = memory_needed(planned, store, dtype, spreading)
    if needed > (there := memory.available_bytes()):
        raise ValueError(
            f"{store.path} takes {memory.size(needed)} in "
            f"{named_types(dtype, 'auto', forms_of(planned))}: "
            f"must fit in the {memory.size(there)} that are free"
        )
    sources = [source for each in planned for source in each.weight.sources]
    total, done = sum(store.nbytes(source.name) for source in sources), 0
    arrays: dict[str, jax.Array] = {}

    def parts(each: Planned) -> Iterator[Any]:
        nonlocal done
        for source, stored in zip(each.weight.sources, each.stored, strict=True):
            part = _read(source, store, in_blocks=_from_blocks(each, stored))
            stay = stays(stored, each.form)
            yield _numbers(part, dtype) if is_blocks(part) and not stay else part
            done += store.nbytes(source.name)
            if on_progress is not None:
                on_progress(done, total)

    for each in planned:
        # Wait, so that the host does not run ahead of the copies with many tensors in memory.
        if each.form is not None:
            whole = _join_blocks(parts(each), each.form)
        elif _is_large(each.weight):
            whole = _filled(parts(each), each.weight, dtype)
        else:
            on_device = tuple(map(jax.device_put, parts(each)))
            whole = _join(on_device, each.weight.transposed, dtype, each.weight.experts)
        whole = jax.block_until_ready(whole)
        for path, array in by_path(each.weight.path, whole):
            if spreading is not None:
                array = jax.block_until_ready(spreading.place(path, array))
            arrays[path] = array
    return tree(arrays)


def memory_needed(
    planned: Sequence[Planned], store: TensorStore, dtype: Any, spreading: Spreading | None = None
) -> int:
    """Returns the bytes that a device needs to read weights in this order.

    These are its part of the weights so far and the temporary arrays of the next one: the tensors
    as stored or a slice of them, their blocks before they are joined, and, for several devices, the
    whole weight.
    """
    kept = needed = 0
    for each in planned:
        size, temporary, pieces = each.nbytes(dtype), 0, 0
        for source, stored in zip(each.weight.sources, each.stored, strict=True):
            count = math.prod(source.shape)
            if stays(stored, each.form):
                at_once = min(count, AT_ONCE) if stored == each.form else count
                temporary += store.nbytes(source.name) + TO_COMMON * at_once
                pieces += 1
            elif _from_blocks(each, stored):  # they are widened whole
                temporary += store.nbytes(source.name) + TO_COMMON * min(count, AT_ONCE)
                temporary += TO_JOIN * count
            else:
                in_slices = each.form is not None or _is_large(each.weight)
                at_once = min(count, SLICE) if in_slices else count
                temporary += (TO_JOIN if each.form is None else TO_BLOCKS) * at_once
                pieces += -(-count // SLICE)
        if each.form is not None and pieces > 1:
            temporary += size
        kept += size if spreading is None else spreading.own_size(each.weight.path, size)
        needed = max(needed, kept + temporary + (0 if spreading is None else size))
    return needed


def stays(stored: Form | None, form: Form | None) -> bool:
    """Returns whether a tensor's blocks are kept in a weight of another format, or the same."""
    return stored is not None and form is not None and common_form((stored, form)) == form


def _from_blocks(each: Planned, stored: Form | None) -> bool:
    """Returns whether a tensor's blocks are converted on the device, to stay or to be widened.

    The host widens Q8_0, and experts, which are not matrices.
    """
    if stays(stored, each.form):
        return True
    widened = each.form is None and not each.weight.experts
    return widened and stored not in (None, FORMS["q8_0"])


def converted(matrix: Any, weight: Weight, form: Form | None, dtype: Any) -> Any:
    """Returns a matrix of the tree as numbers of a dtype, or else in Q8_0, the only other form."""
    if is_blocks(matrix):
        rows = _numbers(matrix, dtype if form is None else jnp.float32)
    else:
        rows = matrix.T if weight.transposed else matrix
    if form is not None:
        return to_blocks(rows)
    return rows.T if weight.transposed else rows


@partial(jax.jit, static_argnames="dtype")
def _numbers(matrix: Blocks, dtype: Any) -> jax.Array:
    return dequantized(matrix, dtype)


def _read(source: TensorSource, store: TensorStore, *, in_blocks: bool) -> Any:
    """Returns a tensor's numbers on the host, or its blocks on the device."""
    stored = store.blocks(source.name) if in_blocks else None
    if stored is None:
        return in_order(source, store.read(source.name).reshape(source.shape))
    arrays = {name: in_order(source, array) for name, array in stored.arrays.items()}
    return stored.convert(jax.device_put(arrays))


def in_order(source: TensorSource, tensor: np.ndarray) -> np.ndarray:
    """Returns a tensor with the rows of each head in Hugging Face's order."""
    if not source.interleaved_heads:
        return tensor
    # llama.cpp stores a head's rows as 0, H/2, 1, H/2 + 1, ...
    pairs = tensor.reshape(source.interleaved_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _is_large(weight: Weight) -> bool:
    """Returns whether the numbers of a weight go to the device in slices."""
    return not weight.experts and math.prod(weight.shape) > SLICE


def _slices(part: np.ndarray | jax.Array) -> Iterator[jax.Array]:
    """Puts the rows of a tensor on the device in slices; one already on a device stays whole."""
    if isinstance(part, jax.Array):
        yield part
        return
    rows = max(SLICE // max(math.prod(part.shape[1:]), 1), 1)
    for first in range(0, len(part), rows):
        yield jax.block_until_ready(jax.device_put(part[first : first + rows]))


def _join_blocks(parts: Iterable[Any], form: Form) -> Blocks:
    """Returns a matrix in blocks: the file's own, or converted from its numbers in float32."""
    made: list[Blocks] = []
    for part in parts:
        if is_blocks(part):
            made.append(part)
        else:
            made += [jax.block_until_ready(to_blocks(some)) for some in _slices(part)]
    return joined(tuple(made), form) if len(made) > 1 else made[0]


def _filled(parts: Iterable[Any], weight: Weight, dtype: Any) -> jax.Array:
    """Returns a weight's numbers, written slice by slice."""
    whole, first = jnp.zeros(weight.shape, dtype), 0
    for part in parts:
        for some in _slices(part):
            whole = jax.block_until_ready(_with_rows(whole, some, first, weight.transposed))
            first += len(some)
    return whole


@partial(jax.jit, static_argnames="transposed", donate_argnames="whole")
def _with_rows(whole: jax.Array, rows: jax.Array, first: int, transposed: bool) -> jax.Array:
    rows = (rows.T if transposed else rows).astype(whole.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, axis=1 if transposed else 0)


@partial(jax.jit, static_argnames=("transposed", "dtype", "experts"))
def _join(
    parts: tuple[jax.Array, ...], transposed: bool, dtype: Any, experts: int = 0
) -> jax.Array:
    if experts:
        whole = jnp.concatenate(parts, axis=-2)
        return whole.reshape(experts, -1, whole.shape[-1]).swapaxes(1, 2).astype(dtype)
    whole = jnp.concatenate(parts)
    return (whole.T if transposed else whole).astype(dtype)
