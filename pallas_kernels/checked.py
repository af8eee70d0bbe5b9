"""Checks arguments against their annotations: array shapes, dtypes, and literals."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from jaxtyping import AbstractArray, Shaped


def checked[**P, R](*, nonempty: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check its arguments, and their fields, against the annotations.

    An axis must have the same size everywhere in a call. If N and K are axes (jsparse.shapes), K
    must divide N, and G = N / K. Only shapes and dtypes are read: under jit, while tracing.

    The function raises ValueError for an array of a wrong shape or dtype, and for a value that is
    not in its Literal.

    Args:
        nonempty: the axes that must have a size of at least 1, separated by spaces.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # the wrapper's closure must have a fingerprint (jsparse.runtime.fingerprint)
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            axes, signature = _Axes(nonempty.split()), _signature(function)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                axes.check(name, value, signature.parameters[name].annotation)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def check_dtypes(**arrays: Any) -> None:
    """Raises ValueError if an array that is not None has a different dtype from the first."""
    (first, model), *others = arrays.items()
    for name, array in others:
        if array is not None and array.dtype != model.dtype:
            raise ValueError(f"{name}.dtype={array.dtype}: must be that of {first}, {model.dtype}")


# relations of an axis to another one, if that one is known
_RULES = {
    "N": ("K", ", N a multiple of K"),
    "K": ("N", ", K a divisor of N"),
    "G": ("N", ", G · K equal to N"),
}
_hints, _signature = functools.cache(get_type_hints), functools.cache(inspect.signature)


def _fields(value: Any, kinds: tuple[Any, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and annotation of the fields of a NamedTuple, dataclass or TypedDict."""
    if isinstance(value, Mapping):
        for kind in filter(is_typeddict, kinds):
            hints = _hints(kind).items()
            yield from ((name, value[name], hint) for name, hint in hints if name in value)
    elif hasattr(value, "_fields") or is_dataclass(value):
        hints = _hints(type(value))
        yield from ((name, getattr(value, name), hint) for name, hint in hints.items())


@dataclass
class _Axes:
    """The axes of one call: the size of each, and the argument that set it."""

    nonempty: list[str]
    sizes: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, value: Any, annotation: Any) -> None:
        """Raises ValueError if a value does not match its annotation."""
        union = get_origin(annotation) in (Union, UnionType)
        kinds = get_args(annotation) if union else (annotation,)
        if NoneType in kinds and isinstance(value, NoneType):
            return
        for literal in (kind for kind in kinds if get_origin(kind) is Literal):
            if value not in get_args(literal):
                none = "None or " if NoneType in kinds else ""
                one = list(get_args(literal))
                raise ValueError(f"{name}={value!r}: must be {none}one of {one}")
        arrays = [x for x in kinds if isinstance(x, type) and issubclass(x, AbstractArray)]
        if (
            arrays
            and hasattr(value, "shape")
            and not any(self._fits(name, value, x) for x in arrays)
        ):
            must = " or ".join(map(self._described, arrays))
            raise ValueError(f"{name}={value.dtype}{list(value.shape)}: must be {must}")
        for part, inner, hint in _fields(value, kinds):
            self.check(f"{name}.{part}", inner, hint)

    def _fits(self, name: str, array: Any, kind: Any) -> bool:
        """Returns whether an array is of this kind; if so, records the sizes of its axes."""
        axes, shape, sizes = kind.dim_str.split(), array.shape, dict(self.sizes)
        for i, axis in enumerate(axes):
            # any number of axes; a single one is like an axis without the star
            if axis.startswith("*"):
                end = max(i, len(shape) - len(axes) + i + 1)
                some = shape[i:end]
                shape = (*shape[:i], some[0] if len(some) == 1 else some, *shape[end:])
        fits = len(shape) == len(axes)
        fits &= kind.dtype is Shaped or str(array.dtype) in kind.dtypes
        for axis, size in zip(axes, shape, strict=False):
            if axis.isdigit():
                fits &= size == int(axis)
            elif not (axis.startswith("#") and size == 1):  # an axis that may be broadcast
                fits &= size == sizes.setdefault(axis.lstrip("#*"), size)
            fits &= size != 0 or axis not in self.nonempty
        if fits and sizes.get("N") and sizes.get("K"):
            group, rest = divmod(sizes["N"], sizes["K"])
            fits = rest == 0 and sizes.get("G", group) == group
        if fits:
            self.sizes, self.owners = sizes, dict.fromkeys(sizes, name) | self.owners
        return fits

    def _described(self, kind: Any) -> str:
        """Returns an annotation as text, with the required sizes of its axes."""
        axes, rule = [], ""
        for axis in kind.dim_str.split():
            name = axis.lstrip("#*")
            if name in self.sizes:
                axis += self._size(name)
            elif name in self.nonempty:
                axis += ">0"
            other, text = _RULES.get(name, ("", ""))
            if name not in self.sizes and other in self.sizes:
                rule = text + self._size(other)
            axes.append(axis)
        return f"{kind.dtype.__name__.lower()}[{', '.join(axes)}]{rule}"

    def _size(self, axis: str) -> str:
        return f"={self.sizes[axis]} ({self.owners[axis]})"
