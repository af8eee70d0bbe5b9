"""Sets how many tokens the heads of a policy read, if its expression leaves that open.

A policy's size is its `budget`, else the `value` of `lychee_decode` or the `recent` tokens of a
window; the size of a wrapper is that of the policy it wraps. It is open if the expression
does not give it: quest(slack=1), dense_layers(quest, n=2), but not quest(budget=512). Methods that
sample, or read what a share of the attention mass needs, have no size.
"""

import ast
import inspect
from typing import Any

from jsparse.policies import own_code
from jsparse.policies.expressions import POLICIES
from jsparse.policy import AnyPolicy

NAMES = ("budget", "value", "recent")
SHARE_DIGITS = 5
SINK = "sink"  # the first tokens, which a window of `recent` tokens reads besides
# a method's argument that counts instead of its size; None: it has no size, since `recent` tokens
# are attended besides the sampled ones
INSTEAD = {"seer_attention": "threshold", "magic_pig": None}


def has_open_size(text: str) -> bool:
    """Returns whether an expression that `own_code.resolve` accepts leaves its size open."""
    source, node = own_code.parts(text)
    return _sized(source, node, 1, 1) is not None


def sized(text: str, tokens: int, length: int) -> AnyPolicy:
    """Builds the policy of an expression with an open size, such that heads read `tokens` tokens.

    Heads that read everything at any size are not considered; see `besides_dense`.

    Args:
        text: an expression, or a reference to user code.
        tokens: the number of tokens, at least 1.
        length: the number of tokens in the cache, of which a size that is a share is `tokens`.

    Raises:
        ValueError: the policy refuses this size.
    """
    source, node = own_code.parts(text)
    call = _sized(source, node, tokens, length)
    assert call is not None, text
    return own_code.resolve(source + ast.unparse(call))


def besides_dense(tokens: float, length: float, dense: float) -> float:
    """Returns the tokens per other head with which heads read `tokens` tokens on average.

    `dense` is the share of heads that read all `length` tokens, below 1. The result is negative if
    these alone read more.
    """
    return (tokens - dense * length) / (1 - dense)


def _sized(source: str, node: ast.expr, tokens: int, length: int) -> ast.Call | None:
    """Returns a call with its open size set; None if it has none."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    args, words = call.args, call.keywords
    inner = [x for x in (*args, *(word.value for word in words)) if _is_policy(x)]
    if inner:
        new = _sized("", inner[0], tokens, length)
        if new is None:
            return None
        words = [ast.keyword(w.arg, new if w.value is inner[0] else w.value) for w in words]
        return ast.Call(call.func, [new if x is inner[0] else x for x in args], words)
    build = own_code.builder_of(source, node)
    parameters = inspect.signature(build).parameters if callable(build) else {}
    given = dict(zip(parameters, args, strict=False)) | {w.arg: w.value for w in words}
    name = next((name for name in NAMES if name in parameters), None)
    if name is None or name in given or (not source and _without_size(call, given)):
        return None
    number: Any = tokens
    if type(parameters[name].default) is float:
        number = min(round(tokens / length, SHARE_DIGITS), 1.0)
    elif name == "recent" and SINK in parameters:
        sink = given.get(SINK) or ast.Constant(parameters[SINK].default)
        number = max(tokens - ast.literal_eval(sink), 1)
    return ast.Call(call.func, args, [*words, ast.keyword(name, ast.Constant(number))])


def _without_size(call: ast.Call, given: dict[str | None, ast.expr]) -> bool:
    """Returns whether a call of a method has no size, because of another argument or at all."""
    method = ast.unparse(call.func)
    if method not in INSTEAD:
        return False
    value = given.get(INSTEAD[method] or "")
    return INSTEAD[method] is None or (value is not None and ast.literal_eval(value) is not None)


def _is_policy(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in POLICIES
