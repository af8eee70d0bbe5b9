"""Implements HardKuma gates: a Kumaraswamy distribution of learned shape, stretched and clipped.

Stretching and clipping give 0 and 1 positive probability. LycheeDecode (Lin et al.,
arXiv:2602.04541), section 3.2 and appendix A; the distribution is that of Bastings et al.,
arXiv:1905.08160. The clamp is ours. x^a and (1 - x^a)^b are computed through log(1 - e^-y), so that
values and gradients stay finite in float32 for all a and b within the clamp.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log1mexp
from jax.scipy.special import betaln
from jaxtyping import Array, Float32

from jsparse.train import stretch_and_rectify

CLAMP = 1e-6, 100.0


class Kuma(NamedTuple):
    """The shapes a and b of F(x) = 1 - (1 - x^a)^b."""

    a: Float32[Array, "*gates"]
    b: Float32[Array, "*gates"]


def init(shape: tuple[int, ...]) -> Kuma:
    """Starts gates with uniform s: a = b = 1."""
    return Kuma(jnp.ones(shape, jnp.float32), jnp.ones(shape, jnp.float32))


def project(kuma: Kuma) -> Kuma:
    """Clamps a and b to [1e-6, 100]."""
    return jax.tree.map(lambda shape: jnp.clip(shape, *CLAMP), kuma)


def sample(kuma: Kuma, u: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns the gate z for noise u on (0, 1), in section 3.2's three steps."""
    return stretch_and_rectify.rectify(quantile(kuma, u))


def quantile(kuma: Kuma, u: Float32[Array, "*gates"]) -> Float32[Array, "*gates"]:
    """Returns the solution of F(s) = u: s = (1 - (1 - u)^(1/b))^(1/a)."""
    return jnp.exp(log1mexp(-jnp.log1p(-u) / kuma.b) / kuma.a)


def tail(kuma: Kuma, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns 1 - F(x) = P(s > x), with F of equation 11, for x on (0, 1)."""
    return jnp.exp(kuma.b * log1mexp(-kuma.a * jnp.log(x)))


def pdf(kuma: Kuma, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns F's density, equation 9: a b x^(a-1) (1 - x^a)^(b-1), for x on (0, 1)."""
    a, b = kuma
    return a * b * jnp.exp((a - 1) * jnp.log(x) + (b - 1) * log1mexp(-a * jnp.log(x)))


def active(kuma: Kuma) -> Float32[Array, "*gates"]:
    """Returns P(z ≠ 0), a gate's term of E[L0] in equation 8; it is 11/12 at the start."""
    return tail(kuma, jnp.float32(stretch_and_rectify.ZERO))


def mean(kuma: Kuma) -> Float32[Array, "*gates"]:
    """Returns E[z]."""
    return stretch_and_rectify.mean(partial(tail, kuma))


def score(kuma: Kuma) -> Float32[Array, "*gates"]:
    """Returns E[s] = b B(1 + 1/a, b): above 0.5 a head is a retrieval head, in the paper."""
    a, b = kuma
    return jnp.exp(jnp.log(b) + betaln(1 + 1 / a, b))
