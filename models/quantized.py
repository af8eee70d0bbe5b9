"""Makes matrices in blocks (jsparse.pallas_kernels.weight_blocks): converted to Q8_0, or random.

Activations keep their type.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16

from jsparse.pallas_kernels.weight_blocks import (
    BLOCK,
    FORMS,
    SUPER,
    Blocks,
    Form,
    form_of,
    width_of,
)

FormAt = Callable[[str], Form | None]
"""The format of the matrix at a path, or None if it has numbers of the model's dtype."""

LARGEST, TRIED = 127, 32
LEAST = 2.0**-24  # the smallest scale in float16


@jax.jit
def to_blocks(rows: Float[Array, "out in"]) -> Blocks:
    """Returns a matrix as blocks along its rows, whose length must be a multiple of 32.

    A block's largest number becomes the integer from 127 down to 96 with the least sum of squared
    errors. llama.cpp always uses 127.
    """
    blocks = rows.astype(jnp.float32).reshape(rows.shape[0], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)

    def with_largest(integer: Array) -> tuple[Array, Array]:
        """Returns the scales that map the largest number to this integer, and the errors."""
        scales = jnp.where(largest > 0, jnp.maximum(largest / integer, LEAST), largest)
        scales = scales.astype(jnp.float16)
        found = jnp.sum((_rounded(blocks, scales) * _wide(scales) - blocks) ** 2, axis=-1)
        return scales, found

    def tried(nth: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scales, found = with_largest(jnp.float32(LARGEST) - nth)
        better = found < best[1]
        return jnp.where(better, scales, best[0]), jnp.where(better, found, best[1])

    # blocks that are not finite keep these, which are not finite either
    first = with_largest(jnp.float32(LARGEST))
    scales, _ = jax.lax.fori_loop(1, TRIED, tried, first)
    values = _rounded(blocks, scales).astype(jnp.int8).reshape(rows.shape)
    return {"values": values, "scales": scales.T}


def _rounded(blocks: Float[Array, "*n 32"], scales: Float16[Array, "*n"]) -> Float[Array, "*n 32"]:
    steps = blocks / jnp.where(scales == 0, 1.0, _wide(scales)[..., 0])[..., None]
    return jnp.clip(jnp.round(steps), -LARGEST, LARGEST)


def _wide(scales: Float16[Array, "*n"]) -> Float[Array, "*n 1"]:
    return scales.astype(jnp.float32)[..., None]


def plain(path: str) -> Form | None:
    """Returns None: a `FormAt` for weights without blocks."""


def all_q8_0(path: str) -> Form | None:
    """Returns the format of matrices in Q8_0; a `FormAt`."""
    return FORMS["q8_0"] if is_matrix(path) else None


def is_matrix(path: str) -> bool:
    """Returns whether the weight at a path is a matrix, which may be stored in blocks."""
    return path == "embed" or is_transposed(path)


def is_transposed(path: str) -> bool:
    """Returns whether the weight at a path is a linear map, which is [in, out] unless in blocks."""
    return path.endswith("kernel") or path == "lm_head"


def name_of(form: Form) -> str:
    """Returns the name of a format for messages, such as "q4_k", "int4" or "fp8"."""
    if form.supers:
        return f"q{form.bits}_k"
    named = (name for name, known in FORMS.items() if known == form)
    return next(named, f"{'fp' if form.floats else 'int'}{form.bits}")


def formats_in(weights: Any) -> dict[str, tuple[Form, int]]:
    """Returns the formats and widths of the matrices in blocks of a decoder's tree, by path.

    The arrays may have ranks as their first axis.
    """
    found = {}
    for path, leaf in jax.tree.leaves_with_path(weights["params"], is_leaf=_in_blocks):
        if _in_blocks(leaf):
            own: Any = {
                name: jax.ShapeDtypeStruct(x.shape[-2:], x.dtype) for name, x in leaf.items()
            }
            found["/".join(entry.key for entry in path)] = form_of(own), width_of(own)
    return found


def num_numbers(weights: Any) -> int:
    """Returns the number of weights that a decoder's arrays represent."""
    leaves = jax.tree.leaves(weights, is_leaf=_in_blocks)
    return sum(
        leaf["values"].size * width_of(leaf) // leaf["values"].shape[-1]
        if _in_blocks(leaf)
        else leaf.size
        for leaf in leaves
    )


def _in_blocks(node: Any) -> bool:
    """Returns whether a node of the tree is a matrix in blocks."""
    return isinstance(node, dict) and "values" in node


def spec_at(path: str, leaf: Any, form_at: FormAt) -> Any:
    """Returns the spec of the weight at a path, or of its arrays by name if it is in blocks."""
    form = form_at(path) if is_matrix(path) else None
    return leaf if form is None else form.arrays(*leaf.shape[:: -1 if is_transposed(path) else 1])


@partial(jax.jit, static_argnames=("name", "shape", "form"))
def random_part(key: Array, name: str, shape: tuple[int, ...], form: Form) -> Array:
    """Returns a random array of a matrix in blocks, for numbers with a deviation of about 0.02."""
    spec, codes = form.arrays(BLOCK, SUPER)[name], 1 << form.bits
    if name in ("values", "high"):
        bits = jax.random.bits(key, shape, jnp.uint8)
        if form.floats:  # in [-1.875, 1.875], without subnormal numbers
            return jax.lax.bitcast_convert_type((bits & 0x87) | 0x38, spec.dtype)
        return jax.lax.bitcast_convert_type(bits, spec.dtype)
    integers = {"scales": 32, "mins": 32} if form.supers else {"mins": codes // 2}
    if name in integers:
        return jnp.full(shape, integers[name], spec.dtype)
    deviation = 1.4 if form.floats else codes / 12**0.5
    scale = 0.02 / deviation / (integers["scales"] if form.supers else 1)
    if name == "super_mins":  # half the codes' range
        scale *= codes / 2
    return jnp.full(shape, scale, spec.dtype)
