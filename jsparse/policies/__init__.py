"""The registry of methods, and the expressions that name them: "keep(oracle_top_k(budget=256), sink=4, recent=64)"."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from jsparse.policies.double_sparsity import double_sparsity
from jsparse.policies.duo_attention import duo_attention
from jsparse.policies.full import full
from jsparse.policies.lychee_decode import lychee_decode
from jsparse.policies.oracle import oracle_top_k, oracle_top_p
from jsparse.policies.quest import quest
from jsparse.policies.streaming import streaming
from jsparse.policies.tidal import tidal
from jsparse.policies.twilight import twilight
from jsparse.policies.wrappers import dense_layers, keep
from jsparse.policy import Policy, dense

POLICIES: dict[str, Callable[..., Policy]] = {
    build.__name__: build
    for build in (
        dense,
        streaming,
        quest,
        double_sparsity,
        tidal,
        lychee_decode,
        duo_attention,
        full,
        oracle_top_k,
        oracle_top_p,
        twilight,
        keep,
        dense_layers,
    )
}


def parse(expression: str) -> Policy:
    """Builds the policy that an expression names.

    The expression is a registered name, or a call of one with literals and further expressions as arguments. It is read
    as a syntax tree and never evaluated as code.

    Raises:
        ValueError: it does not parse, names an unknown policy or argument, or an argument's value is refused.
    """
    expression = expression.strip()
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"policy={expression!r}: must be an expression such as streaming(sink=4, recent=512)"
        ) from error
    return _build(tree, expression)


def as_policy(policy: Policy | str) -> Policy:
    """A policy as it is, or the one that an expression names."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return parse(policy)
    raise ValueError(f"policy={policy!r}: must be a policy or an expression such as 'streaming(sink=4, recent=512)'")


def _build(node: ast.expr, expression: str) -> Policy:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise ValueError(f"policy={expression!r}: {_source(expression, call.func)} must be the plain name of a policy")
    name = call.func.id
    if name not in POLICIES:
        raise ValueError(f"policy={expression!r}: unknown policy {name!r}, must be one of {', '.join(POLICIES)}")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"policy={expression!r}: arguments of {name} must be written out, without **")
    names = [keyword.arg for keyword in call.keywords]
    if len(set(names)) < len(names):
        raise ValueError(f"policy={expression!r}: an argument of {name} is given twice")
    args = [_value(arg, expression) for arg in call.args]
    kwargs = {str(keyword.arg): _value(keyword.value, expression) for keyword in call.keywords}
    signature = inspect.signature(POLICIES[name])
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"policy={expression!r}: {error}; the arguments are {name}{signature}") from error
    try:
        return POLICIES[name](*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"policy={expression!r}: {error}") from error


def _value(node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in POLICIES):
        return _build(node, expression)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"policy={expression!r}: {_source(expression, node)} must be a literal or one of {', '.join(POLICIES)}"
        ) from error


def _source(expression: str, node: ast.expr) -> str:
    """The piece of the expression that a node stands for; unlike `ast.unparse` it takes any depth."""
    return repr(ast.get_source_segment(expression, node))
