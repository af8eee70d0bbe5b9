"""Registers the methods of sparse prefill, and builds them from expressions: one file per pattern.

A method's name and a policy's may be equal: an expression of one is never part of the other.
"""

import ast
from collections.abc import Callable
from difflib import get_close_matches

from jsparse.policies.prefill_methods.auto import auto
from jsparse.policies.prefill_methods.streaming import streaming
from jsparse.policies.prefill_methods.vertical_slash import vertical_slash
from jsparse.policies.prefill_methods.xattention import xattention
from jsparse.policy import PrefillMethod

DENSE = "dense"
METHODS: dict[str, Callable[..., PrefillMethod]] = {
    build.__name__: build for build in (auto, xattention, vertical_slash, streaming)
}


def as_method(prefill: PrefillMethod | str) -> PrefillMethod | None:
    """Returns a method, or the one that an expression such as "xattention(0.9)" names.

    None: "dense". Arguments are literals; nothing is evaluated.

    Raises:
        ValueError: the expression does not parse, or names an unknown method or argument, or a
            value is refused.
    """
    if isinstance(prefill, PrefillMethod):
        return prefill
    if not isinstance(prefill, str):
        raise ValueError(
            f"prefill={prefill!r}: must be a PrefillMethod or an expression such as "
            "'xattention(threshold=0.9)'"
        )
    name, args, kwargs = _call(prefill)
    if name == DENSE:
        if args or kwargs:
            raise ValueError(f"prefill={prefill!r}: {DENSE} takes no arguments")
        return None
    if name not in METHODS:
        known = ", ".join([DENSE, *METHODS])
        near = get_close_matches(name, METHODS, 1)
        rule = f"did you mean {near[0]}?" if near else f"must be one of {known}"
        raise ValueError(f"prefill={prefill!r}: unknown method {name!r}, {rule}")
    try:
        return METHODS[name](*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"prefill={prefill!r}: {error}") from None


def is_registered(method: PrefillMethod) -> bool:
    """Returns whether a method's name builds the same object again."""
    return method.name.partition("(")[0] in METHODS and as_method(method.name) is method


def _call(text: str) -> tuple[str, list[object], dict[str, object]]:
    """Returns the name, arguments and keyword arguments of a call, or of a plain name."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name):
            raise ValueError("no plain name")
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return call.func.id, [ast.literal_eval(arg) for arg in call.args], kwargs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"prefill={text!r}: must be {DENSE!r} or a call with literals such as "
            "'xattention(threshold=0.9)'"
        ) from None
