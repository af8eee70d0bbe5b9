"""Loads policies from user code, named `path.py:function` or `module:function`.

Only the command line resolves such names, which imports the code that a user names there. Policy
expressions are parsed and never import anything.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jsparse.names import unknown
from jsparse.policies import expressions
from jsparse.policy import AnyPolicy, Policy, StandIn

# folder/file.py:function or package.module:function, with or without arguments
REFERENCE = re.compile(
    r"(?P<source>[^()'\"]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?P<arguments>\(.*\))?",
    re.DOTALL,
)


def resolve(text: str) -> AnyPolicy:
    """Builds the policy that an expression names, or one from user code, and imports its module.

    A policy in user code is an object, or a function marked `@builder` that takes literals and
    policies as arguments. Afterwards `expressions` resolves it from the same text.

    Raises:
        ValueError: the expression is refused, or the reference leads to no policy.
    """
    reference = REFERENCE.fullmatch(text.strip())
    if reference is None:
        return expressions.as_policy(text)
    expression = text.strip()
    source, name, arguments = reference.group("source", "name", "arguments")
    module = _module(expression, source)
    if not hasattr(module, name):
        raise ValueError(f"policy={expression!r}: {unknown(source, name, _policies(module))}")
    found = getattr(module, name)
    if callable(found) and getattr(found, "builds_policy", False):
        found = expressions.call(name, found, arguments or "()", expression)
    if not isinstance(found, Policy | StandIn):
        raise ValueError(
            f"policy={expression!r}: {name} must be a policy in {source}, or a function marked "
            f"@builder, not {found!r}"
        )
    return expressions.remember(expression, found)


def with_budget(text: str, budget: int, *, instead: bool = True) -> AnyPolicy | None:
    """Builds the policy of `resolve(text)`, but with another budget.

    Args:
        text: an expression, or a reference to user code.
        budget: the number of tokens.
        instead: whether to replace a budget that the text gives.

    Returns:
        The policy. None if the outermost policy has no `budget` in tokens, gives another one with
        instead=False, or refuses this one.
    """
    source, node = parts(text)
    build = builder_of(source, node)
    names = list(inspect.signature(build).parameters) if callable(build) else []
    if "budget" not in names or not _counts_tokens(inspect.signature(build).parameters["budget"]):
        return None
    args, keywords = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    others = [word for word in keywords if word.arg != "budget"]
    at = names.index("budget")
    if not instead and (len(others) < len(keywords) or at < len(args)):
        return None
    number = ast.Constant(budget)
    if at < len(args):
        args = [*args[:at], number, *args[at + 1 :]]
    else:
        others.append(ast.keyword("budget", number))
    name = node.func if isinstance(node, ast.Call) else node
    try:
        return resolve(source + ast.unparse(ast.Call(name, args, others)))
    except ValueError:  # the other arguments do not fit this budget
        return None


def parts(text: str) -> tuple[str, ast.expr]:
    """Returns the source of user code with its colon, "" for an expression, and the parsed call."""
    call, reference = text.strip(), REFERENCE.fullmatch(text.strip())
    source = "" if reference is None else f"{reference['source']}:"
    return source, ast.parse(call[len(source) :], mode="eval").body


def builder_of(source: str, node: ast.expr) -> Any:
    """Returns the builder or policy that a name or call from `parts` names, once `resolve` has."""
    name = node.func if isinstance(node, ast.Call) else node
    assert isinstance(name, ast.Name)
    if not source:
        return expressions.builder_of(name)
    return getattr(_module(source, source[:-1]), name.id)


def _counts_tokens(parameter: inspect.Parameter) -> bool:
    return type(parameter.default) is int or parameter.annotation in (int, "int")


def _policies(module: ModuleType) -> list[str]:
    """Returns the names of the policies in a module, and of the functions marked @builder."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Policy | StandIn) or getattr(value, "builds_policy", False)
    ]


def _module(expression: str, source: str) -> ModuleType:
    try:
        if not source.endswith(".py"):
            with _searched(os.getcwd()):
                return importlib.import_module(source)
        return _import_file(Path(source).expanduser().resolve())
    except Exception as error:  # user code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if "importlib" in last.filename else f", {last.filename}:{last.lineno}"
        raise ValueError(
            f"policy={expression!r}: {source} cannot be imported ({reason}{where})"
        ) from error


def _import_file(path: Path) -> ModuleType:
    """Imports a file once, under a unique name; it can import modules from its folder."""
    name = f"jsparse_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    try:
        with _searched(str(path.parent)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _searched(folder: str) -> Iterator[None]:
    """Adds a folder to the front of the module search path."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
