"""Joins matrices in blocks along their rows.

q, k and v are one matrix, and so are gate and up. llama.cpp's mixtures store v in more bits than q
and k; a common format of K-quants has all their values exactly. It has codes of the most bits, the
smallest groups, and mins: a code of Q6_K has the offset 32 once 32 is added to it, whose min is the
scale itself and whose factor is 32 times the scale's.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jsparse.pallas_kernels.weight_blocks import (
    Blocks,
    Form,
    codes_of,
    form_of,
    out_axis,
    packed,
)


def common_form(forms: Collection[Form]) -> Form | None:
    """Returns a format that has all values of matrices in these formats, or None."""
    first, *others = dict.fromkeys(forms)
    if not others:
        return first
    if not all(form.supers for form in (first, *others)):
        return None
    bits, group = max(form.bits for form in forms), min(form.group for form in forms)
    return Form(bits, group, "int8", supers=True, mins=True)


@partial(jax.jit, static_argnames="form")
def joined(parts: tuple[Blocks, ...], form: Form) -> Blocks:
    """Joins matrices in a format that `common_form` returned for theirs, or in their own."""
    made = [in_form(part, form) for part in parts]
    whole: Any = {
        name: jnp.concatenate([part[name] for part in made], out_axis(name)) for name in made[0]
    }
    return whole


def in_form(matrix: Any, form: Form) -> Blocks:
    """Returns the same numbers in another format of `common_form`.

    Factors of Q6_K above 2,047, which no model has, become infinite.
    """
    own = form_of(matrix)
    if own == form:
        return matrix
    codes = (codes_of(matrix, own) + own.half).astype(jnp.uint8)
    scales, factors = matrix["scales"], matrix["super_scales"]
    mins, of_mins = matrix.get("mins"), matrix.get("super_mins")
    if mins is None or of_mins is None:
        mins, of_mins = scales, own.half * factors
    repeats = own.group // form.group
    made: Any = packed(codes, form.bits) | {
        "scales": jnp.repeat(scales, repeats, 0),
        "mins": jnp.repeat(mins, repeats, 0),
        "super_scales": factors,
        "super_mins": of_mins,
    }
    return made
