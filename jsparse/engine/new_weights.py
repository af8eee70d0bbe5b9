"""Checks new weights for a running engine, and converts them to the types of its old ones."""

import dataclasses

import jax
import jax.numpy as jnp

from jsparse.models.checkpoint import Params


def like(old: Params, new: Params) -> Params:
    """Returns a model with new weights, in the dtypes and on the devices of the old one.

    Arrays that have these already are not copied. The result has no constants.

    Raises:
        ValueError: the arrays have other names or shapes, or are integers in place of floats.
    """
    wanted, given = (dict(jax.tree.leaves_with_path(each.weights)) for each in (old, new))
    for path in {**wanted, **given}:
        if path not in wanted or path not in given:
            rule = "have" if path in wanted else "not have"
            raise ValueError(f"params={new!r}: must {rule} {_name(path)}, as the engine's model")
    for path, leaf in wanted.items():
        own = given[path]
        floats = [jnp.issubdtype(each.dtype, jnp.floating) for each in (leaf, own)]
        if own.shape != leaf.shape or (own.dtype != leaf.dtype and not all(floats)):
            raise ValueError(
                f"params{_name(path)} is {own.dtype}{[*own.shape]}: must be "
                f"{leaf.dtype}{[*leaf.shape]}, as in the engine"
            )

    def converted(leaf: jax.Array, own: jax.Array) -> jax.Array:
        return jax.device_put(own.astype(leaf.dtype), leaf.sharding)

    weights = jax.tree.map(converted, old.weights, new.weights)
    return dataclasses.replace(old, weights=weights, constants={})


def _name(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    return jax.tree_util.keystr(path)
