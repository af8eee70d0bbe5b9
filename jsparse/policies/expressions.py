"""Builds policies from expressions such as "keep(oracle_top_k(budget=256), sink=4, recent=64)"."""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jsparse import deprecated
from jsparse.policies import POLICIES
from jsparse.policy import Policy

RENAMED = {"full": "all_pages"}
EXAMPLE = "streaming(sink=4, recent=512)"
# package.module:function or folder/file.py:function, with or without arguments
REFERENCE = re.compile(
    r"(?P<source>[\w./\\~ -]+):(?P<name>[A-Za-z_]\w*)(?P<arguments>\(.*\))?", re.DOTALL
)


def parse(expression: str) -> Policy:
    """Build the policy that an expression names.

    The expression is a registered name, or a call of one with literals and further expressions as
    arguments. It is read as a syntax tree and never evaluated as code.

    A policy of your own is named `module:function` or `path.py:function`, with literals and
    expressions as arguments if it takes any. That module is imported, so its code runs.

    Raises:
        ValueError: the expression does not parse, names an unknown policy or argument, or an
            argument's value is refused.
    """
    expression = expression.strip()
    reference = REFERENCE.fullmatch(expression)
    if reference is not None:
        return _refer(expression, **reference.groupdict(default="()"))
    return _build(_tree(expression, expression), expression)


def as_policy(policy: Policy | str) -> Policy:
    """Return a policy as it is, or the one that an expression names."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return parse(policy)
    raise ValueError(f"policy={policy!r}: must be a policy or an expression such as {EXAMPLE!r}")


@functools.cache
def _refer(expression: str, source: str, name: str, arguments: str) -> Policy:
    """Build a user's own policy, with the expression as its name."""
    found = getattr(_module(expression, source), name, None)
    if not isinstance(found, Policy):
        if not callable(found):
            raise ValueError(f"policy={expression!r}: {source} has no function {name!r}")
        call = _tree(f"{name}{arguments}", expression)
        found = _call(name, found, call, expression)
    if not isinstance(found, Policy):
        raise ValueError(
            f"policy={expression!r}: {name} must return a jsparse.Policy, not {found!r}"
        )
    return found._replace(name=expression)


def _module(expression: str, source: str) -> ModuleType:
    """Import the module that a reference names, looking in the working directory as well."""
    try:
        if source.endswith(".py"):
            return _import_file(str(Path(source).expanduser().resolve()))
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(source)
        finally:
            sys.path.remove(os.getcwd())
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"policy={expression!r}: {source} cannot be imported ({reason})"
        ) from error


@functools.cache
def _import_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tree(text: str, expression: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"policy={expression!r}: must be an expression such as {EXAMPLE}"
        ) from error


def _build(node: ast.expr, expression: str) -> Policy:
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ValueError(
            f"policy={expression!r}: {_source(expression, function)} must be the plain name of a "
            "policy"
        )
    name = function.id
    if name in RENAMED:
        deprecated.warn(f"the policy {name}", RENAMED[name])
        name = RENAMED[name]
    if name not in POLICIES:
        raise ValueError(
            f"policy={expression!r}: unknown policy {name!r}, must be one of {', '.join(POLICIES)}"
        )
    return _call(name, POLICIES[name], node, expression)


def _call(name: str, function: Callable[..., Any], node: ast.expr, expression: str) -> Any:
    """Call a function with the literals and policies that a call's arguments spell."""
    arguments, keywords = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    if any(keyword.arg is None for keyword in keywords):
        raise ValueError(
            f"policy={expression!r}: arguments of {name} must be written out, without **"
        )
    names = [keyword.arg for keyword in keywords]
    if len(set(names)) < len(names):
        raise ValueError(f"policy={expression!r}: an argument of {name} is given twice")
    args = [_value(arg, expression) for arg in arguments]
    kwargs = {str(keyword.arg): _value(keyword.value, expression) for keyword in keywords}
    translate = getattr(function, "translate", None)
    if translate is not None:
        kwargs = translate(kwargs)
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"policy={expression!r}: {error}; the arguments are {name}{signature}"
        ) from error
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"policy={expression!r}: {error}") from error


def _value(node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Call) or (
        isinstance(node, ast.Name) and node.id in {*POLICIES, *RENAMED}
    ):
        return _build(node, expression)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"policy={expression!r}: {_source(expression, node)} must be a literal or one of "
            f"{', '.join(POLICIES)}"
        ) from error


def _source(expression: str, node: ast.expr) -> str:
    """Quote the part of the expression that a node stands for.

    Unlike `ast.unparse` it takes any depth.
    """
    return repr(ast.get_source_segment(expression, node))
