"""Builds policies from expressions such as "keep(oracle_top_k(budget=256), sink=4, recent=64)"."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from jsparse.policy import AnyPolicy, Policy, StandIn

# builders by name; `jsparse.policies` fills it from its REGISTRY
POLICIES: dict[str, Callable[..., AnyPolicy]] = {}
EXAMPLE = "streaming(sink=4, recent=512)"
# other projects' names of our methods
ALIASES = {
    "adasnapkv": "ada_kv",
    "doublesparse": "double_sparsity",
    "duo": "duo_attention",
    "eager": "dense",
    "fullattention": "dense",
    "heavyhitter": "h2o",
    "observedattention": "h2o",
    "sdpa": "dense",
    "sink": "streaming",
    "streamingllm": "streaming",
    "tidaldecode": "tidal",
    "topk": "oracle_top_k",
    "topp": "oracle_top_p",
}
# methods of other projects that are not implemented, with the nearest of ours
ABSENT = {
    "chunkkv": "snapkv",
    "compactor": "snapkv",
    "criticaladakv": "ada_kv",
    "criticalkv": "snapkv",
    "cur": "snapkv",
    "fastkvzip": "kvzip",
    "finch": "snapkv",
    "keydiff": "r_kv",
    "knorm": "snapkv",
    "kvzap": "kvzip",
    "lagkv": "snapkv",
    "leveragescore": "snapkv",
    "noncausalattn": "snapkv",
    "pyramidkv": "ada_kv",
    "qfilter": "snapkv",
    "qfilters": "snapkv",
    "scissorhands": "h2o",
    "simlayerkv": "duo_attention",
    "think": "double_sparsity",
    "tova": "h2o",
}
# policies from user code that jsparse.policies.own_code has found, by their text
_FOUND: dict[str, AnyPolicy] = {}


def parse(expression: str) -> Policy:
    """Builds the policy that an expression names.

    The expression is a registered name, or a call of one, with literals and other expressions as
    arguments. It is parsed as a syntax tree: nothing is evaluated or imported.

    Raises:
        ValueError: the expression does not parse, names an unknown policy or argument, or a
            placeholder for other policies, or has a refused value.
    """
    policy = _parse(expression)
    if isinstance(policy, StandIn):
        raise ValueError(f"policy={policy}: must be a policy, not a placeholder for one")
    return policy


def remember(expression: str, policy: AnyPolicy) -> AnyPolicy:
    """Registers a policy under a text that `parse` cannot resolve; returns the policy so named."""
    # a policy rebuilt from the same text has a different `select`
    if expression not in _FOUND or _FOUND[expression][0] is not policy[0]:
        _FOUND[expression] = policy._replace(name=expression)
    return _FOUND[expression]


def is_own(expression: str) -> bool:
    """Returns whether an expression names user code, registered by `remember`."""
    return expression in _FOUND


def call(name: str, function: Callable[..., Any], arguments: str, expression: str) -> Any:
    """Calls a function with arguments such as "(sink=4)", spelled as in an expression."""
    return _call(name, function, _tree(f"{name}{arguments}", expression), expression)


def as_policy(policy: AnyPolicy | str) -> AnyPolicy:
    """Returns a policy unchanged, or the one that an expression names; see `parse`.

    The result may be a placeholder; `jsparse.policy.resolved` returns the policy that runs.

    Raises:
        ValueError: the expression is refused, or `policy` is neither a policy nor an expression.
    """
    if isinstance(policy, Policy | StandIn):
        return policy
    if isinstance(policy, str):
        return _parse(policy)
    if getattr(policy, "builds_policy", False):
        builder: Any = policy
        raise ValueError(f"policy={builder.__name__}: did you mean {_call_of(builder)}?")
    raise ValueError(f"policy={policy!r}: must be a policy or an expression such as {EXAMPLE!r}")


def builder_of(name: ast.Name) -> Callable[..., Any]:
    """Returns the function that a name calls in a parsed expression."""
    return POLICIES[name.id]


def _parse(expression: str) -> AnyPolicy:
    expression = expression.strip()
    if expression in _FOUND:
        return _FOUND[expression]
    return _build(_tree(expression, expression), expression)


def _call_of(build: Callable[..., AnyPolicy]) -> str:
    """Returns the call of a builder that was passed instead of a policy."""
    name = build.__name__
    return f"jsparse.{name}()" if POLICIES.get(name) is build else f"{name}()"


def _tree(text: str, expression: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        own = "; path.py:function works only alone, on a command line" if ".py:" in text else ""
        message = error.msg if isinstance(error, SyntaxError) else ""
        if message.endswith("was never closed"):
            own = f"; its bracket {message[:3]} is not closed"
        raise ValueError(
            f"policy={expression!r}: must be an expression such as {EXAMPLE}{own}"
        ) from error


def _build(node: ast.expr, expression: str) -> AnyPolicy:
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ValueError(
            f"policy={expression!r}: {_source(expression, function)} must be the plain name of a "
            "policy"
        )
    name = function.id
    if name not in POLICIES:
        rule = _meant(name) or f"must be one of {', '.join(POLICIES)}"
        raise ValueError(f"policy={expression!r}: unknown policy {name!r}, {rule}")
    return _call(name, POLICIES[name], node, expression)


def _call(name: str, function: Callable[..., Any], node: ast.expr, expression: str) -> Any:
    """Calls a function with the literals and policies in a call's arguments."""
    arguments, keywords = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    if any(keyword.arg is None for keyword in keywords):
        raise ValueError(
            f"policy={expression!r}: arguments of {name} must be written out, without **"
        )
    names = [keyword.arg for keyword in keywords]
    if len(set(names)) < len(names):
        raise ValueError(f"policy={expression!r}: an argument of {name} is given twice")
    for node in arguments:
        _refuse_bare(name, function, node, expression)
    args = [_value(arg, expression) for arg in arguments]
    kwargs = {str(keyword.arg): _value(keyword.value, expression) for keyword in keywords}
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"policy={expression!r}: {error}") from error


def _refuse_bare(name: str, function: Callable[..., Any], node: ast.expr, expression: str) -> None:
    """Raises ValueError for an argument's name without a value, as in documentation."""
    parameters = inspect.signature(function).parameters
    if isinstance(node, ast.Name) and node.id in parameters:
        default = parameters[node.id].default
        known = default is not None and default is not inspect.Parameter.empty
        example = f", such as {name}({node.id}={default!r})" if known else ""
        raise ValueError(f"policy={expression!r}: {node.id} of {name} needs a value{example}")


def _meant(name: str) -> str:
    """Returns a hint to the policy that a name abbreviates, resembles or misspells, or ""."""
    plain = re.sub(r"(press|cache)$|[\W_]", "", name.lower())
    if plain in ABSENT:
        return f"not implemented; the nearest is {ABSENT[plain]}"
    known = {policy.replace("_", ""): policy for policy in POLICIES} | ALIASES
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    return f"did you mean {known[near[0]]}?" if near else ""


def _value(node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in POLICIES):
        return _build(node, expression)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        meant = _meant(node.id) if isinstance(node, ast.Name) else ""
        raise ValueError(
            f"policy={expression!r}: {_source(expression, node)} must be a literal or a policy"
            + (f"; {meant}" if meant else "")
        ) from error


def _source(expression: str, node: ast.expr) -> str:
    """Quotes the part of the expression that a node represents.

    Unlike `ast.unparse`, it works for any depth.
    """
    return repr(ast.get_source_segment(expression, node))
