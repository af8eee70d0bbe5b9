"""Turns functions of hyper-parameters into methods, and checks the policies passed to wrappers."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, cast

from jaxtyping import Array

from jsparse.cache import StepView
from jsparse.hooks import State
from jsparse.policy import Policy, PrefillMethod, StandIn, never_dense
from jsparse.selection import everything

SOME_TOKENS = 8192  # the length of a prompt in the examples of messages


def builder[**P, R: (Policy, StandIn, PrefillMethod)](build: Callable[P, R]) -> Callable[P, R]:
    """Marks a function of hyper-parameters as a method.

    Equal arguments return the same object, so that nothing is traced twice. The policy's name
    becomes the call that built it, including defaults.
    """
    signature, call = inspect.signature(build), cast(Callable[..., R], build)
    arguments = ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in signature.parameters.values()
    )
    spelled = f"{build.__name__}({arguments})"

    @functools.cache
    def once(arguments: tuple[tuple[str, type, Any], ...]) -> R:
        shown = ", ".join(f"{key}={value!r}" for key, _, value in arguments)
        policy = call(**{key: value for key, _, value in arguments})
        return policy._replace(name=f"{build.__name__}({shown})")

    @functools.wraps(build)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            _refuse_ratio(signature, kwargs)
            raise TypeError(f"{error}; the arguments are {spelled}") from None
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            if isinstance(value, StandIn):
                raise ValueError(f"{key}={value}: must not be inside another policy")
        given = {key: _literal(value) for key, value in bound.arguments.items()}
        _refuse_share(signature, given)
        for key, value in given.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{key}={value!r}: must be a number, a string, an array of numbers or a policy"
                )
        # 1, 1.0 and True are equal as keys, so the key includes their types
        return once(tuple((key, type(value), value) for key, value in given.items()))

    wrapper.__dict__["builds_policy"] = True
    return wrapper


def _refuse_ratio(signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raises ValueError for a compression ratio, the form in which other libraries take a budget.

    A ratio gives a number of tokens only once the prompt is known; a budget fixes the rows' memory
    and their shared programs beforehand.
    """
    ratio = given.get("compression_ratio")
    if "budget" in signature.parameters and isinstance(ratio, int | float) and 0 <= ratio < 1:
        raise ValueError(
            f"compression_ratio={ratio!r}: must be given as budget, {_budget(signature, 1 - ratio)}"
        )


def _refuse_share(signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raises ValueError for a share if the budget is a number of tokens."""
    share = given.get("budget")
    if type(share) is float and 0 < share < 1 and type(_default(signature)) is int:
        raise ValueError(f"budget={share!r}: must be {_budget(signature, share)}")


def _budget(signature: inspect.Signature, share: float) -> str:
    """Describes a policy's budget for this share of the tokens."""
    if type(_default(signature)) is float:
        return f"the share of the tokens: budget={share:g}"
    tokens = round(SOME_TOKENS * share)
    return f"a number of tokens: for {share:.4g} of {SOME_TOKENS} tokens, budget={tokens}"


def _default(signature: inspect.Signature) -> Any:
    return signature.parameters["budget"].default if "budget" in signature.parameters else None


def _literal(value: Any) -> Any:
    """Returns the value in the form that a policy's name can spell.

    Paths become strings, arrays and lists become tuples of numbers, and masks become tuples of 0
    and 1.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Policy) or not isinstance(value, list | tuple):
        return value
    return tuple(int(x) if isinstance(x, bool) else _literal(x) for x in value)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | Policy | None)


def require_knob(policy: Policy, name: str, value: Any) -> None:
    """Raises ValueError unless rows may set the hyper-parameter `name` to this value."""
    if name not in policy.per_row:
        allowed = sorted({"dense", *policy.per_row})
        raise ValueError(f"policy={{{name!r}: {value!r}}}: {policy} lets rows set {allowed}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number")
    policy.per_row[name](name, value)


def require_stays(name: str, policy: Policy, reason: str) -> None:
    """Raises ValueError if a policy evicts; `reason` explains why it must keep its tokens."""
    if policy.evicts:
        raise ValueError(
            f"{name}={policy}: must keep every token, {reason}; {policy.name.partition('(')[0]} "
            "drops some"
        )


def require_offloadable(name: str, policy: Policy) -> None:
    """Raises ValueError if a policy cannot decode with K and V in host memory."""
    reasons = {
        "evicts tokens, which moves others": policy.evicts,
        "reads K or V of all tokens": policy.reads is None,
        "computes K and V of tokens again": policy.services.correct_every > 0,
        "needs other fields of the cache": bool(policy.fields),
        "has dense rows": policy.dense_below is not never_dense,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"{name}={policy}: must decode without K and V on the device, but {reason}"
            )


def require_policy(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a policy."""
    if not isinstance(value, Policy):
        raise ValueError(f"{name}={value!r}: must be a policy")


@builder
def dense() -> Policy:
    """Attends to everything: the exact model."""

    def select(state: State, layer: int, q: Array, view: StepView):
        return everything(view.layers[layer].lengths), None, state

    def heads(layer: int, num_kv_heads: int) -> tuple[int, ...]:
        return tuple(range(num_kv_heads))

    return Policy(select, shares="pages", dense_heads=heads)
