"""Implements Hard Concrete gates: a logistic variable through a sigmoid, stretched and clipped.

The sigmoid's temperature is 2/3. "Learning Sparse Neural Networks through L0 Regularization"
(Louizos et al., arXiv:1712.01312), section 2.3. There are two differences. A gate starts with
HardKuma's initial P(z ≠ 0), so that both start equally far from a target E[L0]. The decision is by
E[s], as for HardKuma; E[s] is above 0.5 where the paper's sigmoid(log α) is, and orders gates the
same way.
"""

from functools import partial

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.scipy.special import logit
from jaxtyping import Array, Float32

from jsparse.train import stretch_and_rectify

BETA = 2 / 3


def init(shape: tuple[int, ...]) -> Float32[Array, "*gates"]:
    """Starts gates at P(z ≠ 0) = 11/12: log α = (1 - β) log(-r/l) = 0.799."""
    return jnp.full(
        shape,
        (1 - BETA) * jnp.log(-stretch_and_rectify.HIGH / stretch_and_rectify.LOW),
        jnp.float32,
    )


def project(log_alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns log α unchanged: it has no bounds."""
    return log_alpha


def sample(
    log_alpha: Float32[Array, "*gates"], u: Float32[Array, "*gates"]
) -> Float32[Array, "*gates"]:
    """Returns the gate z for noise u on (0, 1)."""
    return stretch_and_rectify.rectify(sigmoid((logit(u) + log_alpha) / BETA))


def tail(log_alpha: Float32[Array, "..."], x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns P(s > x), for x on (0, 1)."""
    return sigmoid(log_alpha - BETA * logit(x))


def active(log_alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns P(z ≠ 0) = sigmoid(log α - β log(-l/r)), a gate's term of E[L0]."""
    return tail(log_alpha, jnp.float32(stretch_and_rectify.ZERO))


def mean(log_alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns E[z]."""
    return stretch_and_rectify.mean(partial(tail, log_alpha))


def score(log_alpha: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns E[s]."""
    return stretch_and_rectify.score(partial(tail, log_alpha))
