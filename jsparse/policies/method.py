"""Defines Method, an entry in the registry of methods."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jsparse.policy import AnyPolicy


class Method(NamedTuple):
    """Registers a method, with its texts for the docs.

    The arguments in docs/policies.md are those of the builder, and the link to a paper comes from
    the arXiv id in the docstring of its module.

    Attributes:
        build: the builder.
        attends: the tokens that it attends to, for docs/policies.md.
        kind: the part of docs/api.md that it belongs to.
        paper: the method's name in its paper; empty if there is none.
        calls: calls in the README's row, with the arguments that matter most; empty for a call
            without arguments. Methods that are alike share the row of the first.
        gist: the same for the README; empty if that is `attends`.
        when: when to use it, for the README; empty if another method's row names it.
    """

    build: Callable[..., AnyPolicy]
    attends: str
    kind: Literal["selects", "evicts", "wraps"] = "selects"
    paper: str = ""
    calls: str = ""
    gist: str = ""
    when: str = ""
