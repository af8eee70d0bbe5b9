"""Method, an entry in the registry of methods."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jsparse.policy import AnyPolicy


class Method(NamedTuple):
    """A method's entry in the registry, with its texts for docs/policies.md.

    The docs take the arguments from the builder and the paper's arXiv id from the docstring of the
    builder's module. A text has at most 25 words.

    Attributes:
        build: the builder.
        paper: the method's name in its paper; empty: no paper.
        kind: its section in docs/api.md.
        calls: the calls in its row of "When to use each", with the most important arguments; empty:
            a call without arguments. Similar methods share the row of the first.
        attends: the tokens that it attends to; empty: another method's row has them.
        when: when to use it; empty: another method's row has it.
    """

    build: Callable[..., AnyPolicy]
    paper: str = ""
    kind: Literal["selects", "evicts", "wraps"] = "selects"
    calls: str = ""
    attends: str = ""
    when: str = ""
