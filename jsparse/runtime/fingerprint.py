"""Computes fingerprints of a program's ingredients, so that a stored one can be recognised.

A value's fingerprint is that of its type and content. A function's is that of its code, its
defaults and its closure; the globals of its module, such as other functions and constants, are
covered by the fingerprints of modules, which are taken of the code as it is loaded, so that a
function replaced at run time changes them. Code that is neither jsparse's nor that of a library
with a known version has no fingerprint, and neither has a value that holds such a function.
"""

import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

PACKAGE = __name__.partition(".")[0]
# packages whose versions an environment names, so that a name identifies their functions
KNOWN = frozenset({PACKAGE, "jax", "jaxlib", "numpy", "flax", "optax"}) | sys.stdlib_module_names
SCALARS = (type(None), bool, int, float, complex, str, bytes)


class NoFingerprint(Exception):
    """Says that a value has no fingerprint."""


def of(*values: Any) -> str:
    """Returns the fingerprint of values, in hexadecimal.

    Raises:
        NoFingerprint: one holds something unknown.
    """
    digest = hashlib.sha256()
    for part in _parts(values, {}):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def of_modules() -> dict[str, tuple[str, str]]:
    """Returns the fingerprints of the code and of the file of each loaded module of jsparse.

    Of one that another thread is importing, there is the file's alone.
    """
    return {name: (_of_loaded(name), _of_file(file)) for name, file in _loaded()}


def still_hold(modules: Mapping[str, tuple[str, str]]) -> bool:
    """Returns whether modules, as loaded or else as files, are the same as for `of_modules`."""
    folder = Path(sys.modules[PACKAGE].__path__[0])
    for name, (code, text) in modules.items():
        if code and name in sys.modules:
            if _of_loaded(name) != code:
                return False
            continue
        stem = folder.joinpath(*name.split(".")[1:])
        files = [file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
        if not files or _of_file(files[0]) != text:
            return False
    return True


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yields the parts that identify a value; one that comes again is identified by its number.

    `seen` keeps the values alive, or another could come to lie at the same address.
    """
    kind = type(value)
    if isinstance(value, SCALARS):
        yield f"{kind.__name__} {value!r}".encode()
        return
    if id(value) in seen:
        yield f"again {seen[id(value)][0]}".encode()
        return
    seen[id(value)] = len(seen), value
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, Enum):
        yield value.name.encode()
    elif isinstance(value, TypeVar):
        yield value.__name__.encode()
    elif isinstance(value, np.dtype | Mesh | PartitionSpec):
        yield str(value).encode()
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | np.ufunc):
        yield _known(value)
    elif isinstance(value, Mapping):
        yield from _all(sorted(value.items(), key=lambda item: repr(item[0])), seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(of(each).encode() for each in value)
    elif isinstance(value, tuple | list):
        yield from _all(value, seen)
    elif isinstance(value, types.FunctionType):
        yield _known(value)
        yield _of_code(value.__code__)
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        yield from _all([value.__defaults__, value.__kwdefaults__, *closed], seen)
    elif isinstance(value, types.MethodType):
        yield from _all([value.__func__, value.__self__], seen)
    elif isinstance(value, functools.partial):
        yield from _all([value.func, value.args, value.keywords], seen)
    elif hasattr(value, "__wrapped__"):
        yield from _parts(value.__wrapped__, seen)
    elif hasattr(value, "made_from"):
        yield from _all(value.made_from(), seen)
    elif dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
        yield from _all([(name, getattr(value, name)) for name in fields], seen)
    else:
        raise NoFingerprint(f"{kind.__module__}.{kind.__qualname__}")


def _all(values: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    yield str(len(values)).encode()
    for value in values:
        yield from _parts(value, seen)


def _known(value: Any) -> bytes:
    """Returns the name of something that a module holds, if the module is known."""
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    name = getattr(value, "__qualname__", value.__name__)
    if str(module).partition(".")[0] not in KNOWN:
        raise NoFingerprint(f"{module}.{name}")
    return f"{module}.{name}".encode()


@functools.cache
def _of_code(code: types.CodeType) -> bytes:
    constants = [_of_constant(constant) for constant in code.co_consts]
    told = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(told).encode()).digest()


def _of_constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _of_code(value)
    # the order of a frozenset differs between processes
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _loaded() -> list[tuple[str, Path]]:
    modules = [
        (name, Path(file))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == PACKAGE and (file := module.__file__)
    ]
    return sorted(modules)


# by module: the ids of its globals at the last look, and the fingerprint
_looked: dict[str, tuple[tuple[int, ...], str]] = {}


def _of_loaded(name: str) -> str:
    module = sys.modules[name]
    if getattr(module.__spec__, "_initializing", False):
        return ""
    held = vars(module)
    ids = tuple(map(id, held.values()))
    before = _looked.get(name)
    if before is None or before[0] != ids:
        # with lazy imports, the names imported so far are a matter of chance
        lazy = "__getattr__" in held
        own = {
            key: value
            for key, value in held.items()
            if not lazy or getattr(value, "__module__", name) == name
        }
        told = [(key, _of_global(key, value)) for key, value in sorted(own.items())]
        text = repr([(key, part) for key, part in told if part is not None])
        before = _looked[name] = ids, hashlib.sha256(text.encode()).hexdigest()
    return before[1]


def _of_global(name: str, value: Any) -> Any:
    """Returns the parts that identify a module's global, or None if it does not matter."""
    if name.isupper() and isinstance(value, SCALARS):
        return repr(value)
    if isinstance(value, type):
        members = sorted(vars(value).items()) if value.__module__.startswith(PACKAGE) else []
        parts = [(key, _of_member(member)) for key, member in members]
        return value.__qualname__, [(key, part) for key, part in parts if part is not None]
    if name.isupper() and isinstance(value, tuple | frozenset | list | dict):
        # functions and objects within have no stable text
        text = repr(sorted(value, key=repr) if isinstance(value, frozenset) else value)
        return text if " at 0x" not in text else None
    return _of_member(value)


def _of_member(value: Any) -> bytes | None:
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return _of_code(value.__code__) if isinstance(value, types.FunctionType) else None


@functools.cache
def _of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
