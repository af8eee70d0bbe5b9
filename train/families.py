"""Families of gates z in [0, 1], one per KV head.

They make KV heads retrieval or sparse while the model's weights are frozen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Key

from jsparse.selection.threshold import top_k_mask
from jsparse.train import direct, hard_concrete, hard_kuma

GateParams = Any
NOISE = 1e-3, 1 - 1e-3


class Gates(NamedTuple):
    """A family of gates: pure float32 functions that preserve the gates' shape.

    Attributes:
        init: (shape) -> parameters, a pytree of arrays of that shape.
        sample: (parameters, noise u in (0, 1)) -> z in [0, 1]; differentiable in the parameters.
        project: a function applied after every step of the optimiser.
        active: P(z ≠ 0) of each gate, with the sum E[L0]; for `direct` α itself.
        mean: E[z] of each gate.
        score: E[s] of each gate, with s being z before stretch and clip: it ranks gates, and above
            0.5 means retrieval.
    """

    init: Callable[[tuple[int, ...]], GateParams]
    sample: Callable[[GateParams, Array], Array]
    project: Callable[[GateParams], GateParams]
    active: Callable[[GateParams], Array]
    mean: Callable[[GateParams], Array]
    score: Callable[[GateParams], Array]


FAMILIES = {
    name: Gates(*(getattr(module, function) for function in Gates._fields))
    for name, module in (
        ("hard_kuma", hard_kuma),
        ("hard_concrete", hard_concrete),
        ("direct", direct),
    )
}


def noise(key: Key[Array, ""], shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Draws u, uniform on (0.001, 0.999): the slope of an inverse CDF is unbounded at the ends."""
    return jax.random.uniform(key, shape, jnp.float32, *NOISE)


def one_in_eight(layers: int, heads: int) -> int:
    """Returns the usual number of retrieval heads: an eighth of all, but at least layer 0's."""
    return max(round(layers * heads / 8), heads)


def hardened(scores: Float32[Array, "L K"], count: int) -> Bool[Array, "L K"]:
    """Marks exactly `count` retrieval heads: all of layer 0, and the highest-scoring others.

    Ties go to the lowest index. ValueError: `count` is below layer 0's heads, or above all heads.
    """
    heads = scores.shape[1]
    if not heads <= count <= scores.size:
        raise ValueError(
            f"count={count}: must be from {heads}, layer 0's heads, to {scores.size}, all heads"
        )
    learned = top_k_mask(scores[1:].ravel(), count - heads)
    return jnp.concatenate([jnp.ones(heads, bool), learned]).reshape(scores.shape)
