"""Makes a model of random weights over several GPUs."""

from dataclasses import replace
from typing import Any

from bench.engine_speed import random_model


def spread_model(shape: Any, ranks: int) -> Any:
    """Returns a model of random weights over so many GPUs, none of which ever has the whole."""
    import jax
    import jax.numpy as jnp

    from jsparse.models.checkpoint import Params
    from jsparse.models.spreading import Spreading
    from jsparse.models.transformer import random_weight, weight_shapes

    if ranks == 1:
        return random_model(shape)
    spreading = Spreading(shape, ranks)
    found, tree = jax.tree.flatten_with_path(weight_shapes(shape, jnp.bfloat16)["params"])
    leaves = []
    for nth, (path, leaf) in enumerate(found):
        whole = random_weight(jax.random.key(nth), leaf.shape, leaf.dtype)
        name = "/".join(entry.key for entry in path)
        leaves.append(jax.block_until_ready(spreading.place(name, whole)))
    weights = {"params": jax.tree.unflatten(tree, leaves)}
    params = Params(weights, spreading.config, None, {}, "random")
    return replace(params, mesh=spreading.mesh)
