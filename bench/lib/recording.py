"""Policies that record what they select, and the text on which they do."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from jsparse.models.checkpoint import Params
from jsparse.policy import Policy, State
from jsparse.prompts import tokenizer_of


def recording(policy: Policy, init: Callable[..., State], select: Callable[..., Any]) -> Policy:
    """Returns `policy` with another select, and a state whose first element is its own.

    Raises:
        ValueError: the policy falls back or maintains, which would see the records as its state.
    """

    def passed_on(hook):
        return lambda state, *arguments: (hook(state[0], *arguments), *state[1:])

    if policy.fallback is not None or policy.period:
        raise ValueError(
            f"policy={policy}: must neither fall back nor maintain, "
            "which would see the records as its state"
        )
    hooks = {name: passed_on(getattr(policy, name)) for name in ("prefill", "append", "update")}
    return policy._replace(select=select, init=init, **hooks)


def text_tokens(params: Params) -> list[int]:
    """Returns the tokens of the text of `jsparse eval`."""
    text = (
        files("jsparse.evaluation")
        .joinpath("texts/shakespeare_1911.txt")
        .read_text(encoding="utf-8")
    )
    return tokenizer_of(params, "the benchmark").encode(text)
