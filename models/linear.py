"""A model's linear maps, fused with the op before them where possible.

Their weights are matrices [in, out], or [out, in] in blocks
(jsparse.pallas_kernels.weight_blocks). Maps have methods for a preceding norm or gate, since some
kernels fuse both.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from jsparse.heads import rms_norm
from jsparse.models.parameters import parameter
from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.linear import Matrix, product
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.parts import total

# a sublayer's output, to be added to the residual stream, or its parts (jsparse.parts)
Delta = Float[Array, "B T D"] | Float[Array, "parts B T D"]


def add_and_norm(
    x: Float[Array, "B T D"],
    delta: Delta | None,
    scale: Float[Array, "D"],
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Returns x + delta, and its RMSNorm; in one launch for the tokens of a decode step."""
    if delta is not None and x.shape[1] == 1:
        whole, normed = residual_norm(x[:, 0], delta[..., 0, :], scale, eps=eps)
        return whole[:, None], normed[:, None]
    whole = x if delta is None else x + total(delta, x.ndim, x.dtype)
    return whole, rms_norm(whole, scale, eps=eps)


@dataclass(frozen=True)
class Linear:
    """The map x · W + b, in parts for the caller to add if `in_parts` (jsparse.parts).

    W is [in, out], or [out, in] in blocks.
    """

    matrix: Matrix
    bias: Float[Array, "out"] | None

    def __call__(
        self, x: Float[Array, "B T in"], *, in_parts: bool = False
    ) -> Float[Array, "*parts B T out"]:
        return product(x, self.matrix, self.bias, in_parts=in_parts)

    def after_norm(
        self,
        x: Float[Array, "B T in"],
        delta: Delta | None,
        scale: Float[Array, "in"],
        eps: float,
        *,
        in_parts: bool = False,
    ) -> tuple[Float[Array, "B T in"], Float[Array, "*parts B T out"]]:
        """Returns x + delta, and the map of its RMSNorm."""
        if delta is not None and x.shape[1] == 1:
            given = x, delta, scale, self.matrix, self.bias
            return norm_product(*given, eps=eps, in_parts=in_parts)
        whole, normed = add_and_norm(x, delta, scale, eps)
        return whole, self(normed, in_parts=in_parts)

    def after_gate(
        self, gate_up: Float[Array, "B T two_in"], *, in_parts: bool = False
    ) -> Float[Array, "*parts B T out"]:
        """Returns the map of silu(gate) · up."""
        return gated_product(gate_up, self.matrix, self.bias, in_parts=in_parts)


class Dense(nn.Module):
    """The weights of a linear map, of `dtype` or in blocks."""

    features: int
    dtype: Any
    use_bias: bool = False

    @nn.compact
    def __call__(self, width: int) -> Linear:
        """Returns the map for rows of this width."""
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,), self.dtype)
        of_kind, shape = nn.initializers.lecun_normal(), (width, self.features)
        matrix = parameter(self, "kernel", of_kind, shape, self.dtype)
        return Linear(matrix, bias)
