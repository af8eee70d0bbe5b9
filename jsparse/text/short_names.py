"""Shortens the names of policies for readers."""

import ast
import inspect
from collections.abc import Collection
from typing import Any, Protocol

SHOWN = ("budget",)  # arguments that policies are compared by
AMOUNTS = ("budget", "recent", "value", "p")  # arguments that set how much a policy attends to


class HasName(Protocol):
    """An object with a policy's name: a Policy, which this module does not import."""

    @property
    def name(self) -> str: ...


def short_name(policy: HasName | str) -> str:
    """Returns a policy's name without the arguments that have their default values, for readers.

    The result is an expression of the same policy, and always has the budget. Stored results keep
    the full name, since a default may change. Names of the user's own code stay as they are.
    """
    return _shortened(policy if isinstance(policy, str) else policy.name)


def method_name(policy: str) -> str:
    """Returns a policy's short name without the arguments that set how much it attends to.

    It is the same for one method at several budgets; without arguments it has no parentheses.
    """
    return _shortened(policy, AMOUNTS)


def _shortened(name: str, left_out: Collection[str] = ()) -> str:
    try:
        return _short(ast.parse(name, mode="eval").body, name, left_out)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return name


def _short(node: ast.expr, source: str, left_out: Collection[str]) -> str:
    from jsparse.policies import POLICIES  # imports jax, which not every command needs

    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in POLICIES
    ):
        return str(ast.get_source_segment(source, node))
    parameters = inspect.signature(POLICIES[node.func.id]).parameters
    arguments = [
        *zip(parameters, node.args, strict=False),
        *((str(k.arg), k.value) for k in node.keywords),
    ]
    shown = []
    for name, value in arguments:
        if name in left_out:
            continue
        text = _short(value, source, left_out)
        default = parameters[name].default if name in parameters else None
        if default is inspect.Parameter.empty:  # these come first and are positional
            shown.append(text)
        elif name in SHOWN or not _is(value, default):
            shown.append(f"{name}={text}")
    return node.func.id if left_out and not shown else f"{node.func.id}({', '.join(shown)})"


def _is(node: ast.expr, default: Any) -> bool:
    """Returns whether an argument is spelled like its default; True, 1 and 1.0 differ."""
    try:
        return repr(ast.literal_eval(node)) == repr(default)
    except ValueError:
        return False
