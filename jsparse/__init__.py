"""Sparse-attention decoding of long contexts for Llama and Qwen models, in JAX.

params = jsparse.load("smollm2")
out = jsparse.generate(params, "Gravity is", max_new_tokens=40)
print(out.text)
"""

import ast
import importlib
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
for _name in ("models", "train", "pallas_kernels"):
    if not (_FOLDER / _name).is_dir():
        raise ImportError(
            f"{_FOLDER / _name} must be a link to the folder {_name} of the checkout, which was "
            "made without symbolic links: clone again with `git clone -c core.symlinks=true`, or "
            "install a wheel"
        )


def _listed(stub: str) -> dict[str, tuple[str, str]]:
    """Returns the module and the name of each public name, as the stub imports it."""
    imports = (node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom))
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in imports
        for alias in node.names
    }


# jax takes seconds to import, and `jsparse --help` does not need it: names are imported on first
# use
_HOMES = _listed(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
__all__ = sorted({*_HOMES, "__version__"})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'jsparse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # names that this file imports for itself are not part of the library
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jsparse")
    except PackageNotFoundError:  # a bare checkout on PYTHONPATH
        return "0.0.0+checkout"
