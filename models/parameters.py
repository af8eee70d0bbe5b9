"""Takes parameters out of a model's weights without tracing how they would be made.

Hence linear maps of our own (jsparse.models.linear): those of flax trace it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn


def parameter(module: nn.Module, name: str, make: Callable[..., Any], *given: Any) -> Any:
    """Returns what `module.param` does.

    For an existing parameter flax would trace `make` to compare shapes, in each layer anew.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, make, *given)
