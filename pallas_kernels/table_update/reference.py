"""Implements `api.table_update` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jsparse.selection.partials import ListedLogits, group_weights
from jsparse.shapes import Lengths


def table_update(
    vertical: BFloat16[Array, "B K S"],
    distance: BFloat16[Array, "B K S"],
    listed: ListedLogits,
    lengths: Lengths,
    scale: Float32[Array, "B"],
    *,
    sink: int,
    penalty: float,
) -> tuple[BFloat16[Array, "B K S"], BFloat16[Array, "B K S"]]:
    """Implements `api.table_update` in plain jnp."""
    nth = jnp.arange(listed.ids.shape[-1], dtype=jnp.int32)
    counted = (nth < listed.count[..., None]) & (listed.ids >= sink)
    number = jnp.maximum(jnp.sum(counted, -1, keepdims=True), 1)
    weights = group_weights(listed.logits, listed.lse, counted)
    added = scale[:, None, None] * (weights - penalty / number)
    past = lengths[..., None] - 1 - listed.ids
    return (
        _added(vertical, listed.ids, added, counted),
        _added(distance, past, added, counted),
    )


def _added(
    table: BFloat16[Array, "B K S"],
    at: Int32[Array, "B K n"],
    added: Float32[Array, "B K n"],
    counted: Bool[Array, "B K n"],
) -> BFloat16[Array, "B K S"]:
    row, head = (i[..., None] for i in jnp.indices(table.shape[:2]))
    at = jnp.where(counted, at, table.shape[-1])  # out of range: neither read nor written
    old = table.at[row, head, at].get(mode="fill", fill_value=0).astype(jnp.float32)
    return table.at[row, head, at].set((old + added).astype(table.dtype), mode="drop")
