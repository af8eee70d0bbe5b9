"""Checks new weights for a running engine, and converts them to the types of its old ones."""

import dataclasses

import jax
import jax.core as jax_core
import jax.numpy as jnp

from jsparse.models.checkpoint import Params, require_params, spread


def converted_to(old: Params, new: Params) -> Params:
    """Returns a model with new weights, in the dtypes and on the devices of the old one.

    Arrays that have these already are not copied. The result has no constants.

    Raises:
        ValueError: the model has another configuration or other formats of matrices, or its arrays
            have other names or shapes, are integers in place of floats, were deleted or are traced.
    """
    require_params(new)
    if old.mesh is not None and new.mesh is None:
        new = spread(new, old.mesh.size)
    if new.config != old.config:
        raise ValueError(f"params={new!r}: must have the configuration of the engine's model")
    if new.forms != old.forms:
        raise ValueError(
            f"params={new!r}: must have weights in {old.types}, as the engine's model; load both "
            "with weights='plain' to train them"
        )
    wanted, given = (dict(jax.tree.leaves_with_path(each.weights)) for each in (old, new))
    for path in {**wanted, **given}:
        if path not in wanted or path not in given:
            rule = "have" if path in wanted else "not have"
            raise ValueError(f"params: must {rule} {_name(path)}, as the engine's model")
        _require_like(_name(path), given[path], wanted[path])

    def converted(leaf: jax.Array, own: jax.Array) -> jax.Array:
        return jax.device_put(own.astype(leaf.dtype), leaf.sharding)

    weights = jax.tree.map(converted, old.weights, new.weights)
    return dataclasses.replace(old, weights=weights, constants={})


def _require_like(name: str, own: jax.Array, leaf: jax.Array) -> None:
    """Raises ValueError unless an array can take the place of another."""
    if not isinstance(own, jax.Array) or isinstance(own, jax_core.Tracer) or own.is_deleted():
        raise ValueError(f"params{name}: must be an array, neither traced nor deleted")
    floats = all(jnp.issubdtype(each.dtype, jnp.floating) for each in (leaf, own))
    if own.shape != leaf.shape or (own.dtype != leaf.dtype and not floats):
        raise ValueError(
            f"params{name} is {own.dtype}{[*own.shape]}: must be {leaf.dtype}{[*leaf.shape]}, as "
            "in the engine"
        )


def _name(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    return jax.tree_util.keystr(path)
