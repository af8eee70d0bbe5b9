"""Reads parameters from a model's weights without tracing their initialisers.

This is why we have our own linear maps (jsparse.models.linear): those of flax trace initialisers.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn


def parameter(module: nn.Module, name: str, make: Callable[..., Any], *given: Any) -> Any:
    """Returns `module.param(...)`, but faster to trace.

    For an existing parameter, flax would trace `make` in every layer just to compare shapes.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, make, *given)
