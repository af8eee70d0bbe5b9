"""Computes fingerprints of a program's inputs, which identify stored programs.

One digest of the package's source files covers all code of jsparse, so its functions are identified
by name. A policy is identified by its expression, which builds the same object again, and by the
files that the expression names. User code has no fingerprint.
"""

import ast
import functools
import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from jsparse.policies import expressions
from jsparse.policy import Policy

PACKAGE = Path(__file__).parents[1]
# packages that `environment` lists with versions, so that a name identifies their functions
KNOWN = frozenset({PACKAGE.name, "jax", "numpy", "flax"})


class NoFingerprint(Exception):
    """Raised for a value that has no fingerprint."""


def of_files(folder: Path) -> str:
    """Returns a digest of the source files and gates in a folder, in hexadecimal."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for file in sorted(files):
            if file.endswith((".py", ".safetensors")):
                path = Path(place, file)
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# computed at import: files may change while the process runs
SOURCES = of_files(PACKAGE)


def of(*values: Any) -> str:
    """Returns the fingerprint of jsparse's sources and of values, in hexadecimal.

    Raises:
        NoFingerprint: a value contains an unknown object.
    """
    return hashlib.sha256(f"{SOURCES} {_text(values)}".encode()).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, Policy):
        return _of_policy(value)
    if isinstance(value, Mapping):
        return f"{{{_text(sorted(value.items()))}}}"
    if isinstance(value, tuple | list):
        return f"{type(value).__qualname__}({', '.join(map(_text, value))})"
    if isinstance(value, partial):
        return f"{_text(value.func)} with {_text((value.args, value.keywords))}"
    if isinstance(value, FunctionType | type):
        name = f"{value.__module__}.{value.__qualname__}"
        # a nested function may close over any value
        if name.partition(".")[0] not in KNOWN or "<" in name:
            raise NoFingerprint(name)
        return name
    if hasattr(value, "made_from"):
        return f"{_text(type(value))} from {_text(value.made_from())}"
    # a repr with an address, or an array that numpy abbreviates
    if " at 0x" in (text := repr(value)) or "..." in text:
        raise NoFingerprint(text)
    return text


@functools.cache
def _of_policy(policy: Policy) -> str:
    """Returns a registered policy's expression, and the digests of the files that it names."""
    try:
        built = expressions.is_own(policy.name) or expressions.parse(policy.name)
    except ValueError:
        built = None
    if built is not policy:
        raise NoFingerprint(f"policy {policy}")
    nodes = ast.walk(ast.parse(policy.name))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    files = [Path(text) for text in texts if isinstance(text, str) and Path(text).is_file()]
    return " ".join([policy.name, *(hashlib.sha256(x.read_bytes()).hexdigest() for x in files)])
