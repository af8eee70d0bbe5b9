"""Reads names and arguments of the registered policies from their source, without importing jax.

`jsparse policies`, shell completion and the tables that show a policy need no more than that.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PACKAGE = Path(__file__).parent.parent
SHOWN = ("budget",)  # arguments that policies are compared by
REQUIRED: Any = object()  # stands for the default of an argument that has none


class Signature(NamedTuple):
    """Describes a policy's builder.

    Attributes:
        parameters: the default of each argument, or REQUIRED.
        summary: the first paragraph of its docstring, as one line.
        module: the module that defines it.
        texts: the texts of its entry in the registry, for the docs.
    """

    parameters: Mapping[str, Any]
    summary: str
    module: str
    texts: Mapping[str, str]


class HasName(Protocol):
    """Has a policy's name: a Policy, which this module does not import."""

    @property
    def name(self) -> str: ...


@functools.cache
def registered() -> Mapping[str, Signature]:
    """Returns the signatures of the registered policies, in the order of REGISTRY."""
    registry = _tree("policies/__init__.py")
    homes = {
        alias.name: str(node.module)
        for node in registry.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {
        name: _signature(homes[name], name)._replace(texts=texts)
        for name, texts in _entries(registry)
    }


def short_name(policy: HasName | str) -> str:
    """Returns a policy's name without the arguments that have their default values, for readers.

    The result is an expression of the same policy; its budget always shows. Results that are stored
    keep the whole name, since a default may change. A name that is no expression of registered
    policies, such as that of the user's own code, stays as it is.
    """
    name = policy if isinstance(policy, str) else policy.name
    try:
        return _short(ast.parse(name, mode="eval").body, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return name


def _short(node: ast.expr, source: str) -> str:
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in registered()
    ):
        return str(ast.get_source_segment(source, node))
    defaults = registered()[node.func.id].parameters
    arguments = [
        *zip(defaults, node.args, strict=False),
        *((k.arg, k.value) for k in node.keywords),
    ]
    shown = []
    for name, value in arguments:
        default = defaults.get(str(name))
        text = _short(value, source)
        if default is REQUIRED:  # these come first, and are known by their place
            shown.append(text)
        elif name in SHOWN or not _is(value, default):
            shown.append(f"{name}={text}")
    return f"{node.func.id}({', '.join(shown)})"


def _is(node: ast.expr, default: Any) -> bool:
    """Returns whether an argument is spelled like its default; True, 1 and 1.0 differ."""
    try:
        return repr(ast.literal_eval(node)) == repr(default)
    except ValueError:
        return False


def _tree(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"))


def _entries(registry: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the builder and the texts of each entry of REGISTRY."""
    for node in registry.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REGISTRY":
            assert isinstance(node.value, ast.Tuple)
            for entry in node.value.elts:
                assert isinstance(entry, ast.Call)
                [build] = entry.args
                texts = {str(word.arg): ast.literal_eval(word.value) for word in entry.keywords}
                yield ast.unparse(build), texts


def _signature(module: str, name: str) -> Signature:
    tree = _tree(module.removeprefix("jsparse.").replace(".", "/") + ".py")
    constants = _constants(tree)
    [build] = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    parameters = [parameter.arg for parameter in build.args.args]
    optional = build.args.defaults
    values = [REQUIRED] * (len(parameters) - len(optional)) + [
        _value(node, constants, f"{module}.{name}") for node in optional
    ]
    summary = (ast.get_docstring(build) or "").partition("\n\n")[0].replace("\n", " ")
    return Signature(dict(zip(parameters, values, strict=True)), summary, module, texts={})


def _value(node: ast.expr, constants: Mapping[str, Any], where: str) -> Any:
    """Returns the value of a default that is a literal or the name of one."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"{where}: the default {ast.unparse(node)} must be a literal, or the name of one in "
            "the same file"
        ) from None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Returns the literals that a module gives names to."""
    values: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                values |= zip(map(ast.unparse, target.elts), value, strict=True)
            else:
                values[ast.unparse(target)] = value
    return values
