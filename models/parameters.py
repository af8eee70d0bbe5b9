"""Takes parameters out of a model's weights without tracing how they would be made.

Hence a linear map of our own: that of flax traces it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array

from jsparse.pallas_kernels.skinny_product import skinny_product


def parameter(module: nn.Module, name: str, make: Callable[..., Any], *given: Any) -> Any:
    """Returns what `module.param` does.

    For a parameter that is there, flax traces `make` to compare shapes, in each layer anew. What a
    loader brings has been checked before.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, make, *given)


class Dense(nn.Module):
    """Computes what `nn.Dense` does: x · W + b, W [in, out]."""

    features: int
    param_dtype: Any
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = x.shape[-1], self.features
        of_kind = nn.initializers.lecun_normal()
        kernel = parameter(self, "kernel", of_kind, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, shape[1:], self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias)
        return skinny_product(x, kernel, bias)
