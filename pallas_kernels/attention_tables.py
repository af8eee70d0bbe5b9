"""Checks tables of past attention, over slots and over distances, for the ops that take them."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16


def check_tables(
    vertical: BFloat16[Array, "B K S"], distance: BFloat16[Array, "B K S"], lengths: Any, sink: Any
) -> None:
    """Checks that both tables belong to heads of these lengths, and that `sink` counts slots.

    Raises:
        ValueError: naming the argument, its value and the rule.
    """
    heads = lengths.shape
    for name, table in (("vertical", vertical), ("distance", distance)):
        if table.ndim != 3 or table.shape[:2] != heads or table.shape != vertical.shape:
            raise ValueError(
                f"{name}.shape={table.shape}: must be [B, K, S] like the other table's, where "
                f"[B, K] is {heads}"
            )
        if table.dtype != jnp.bfloat16:
            raise ValueError(f"{name}.dtype={table.dtype}: must be bfloat16")
    if type(sink) is not int or sink < 0:
        raise ValueError(f"sink={sink!r}: must be an integer of at least 0")
