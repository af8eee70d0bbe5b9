"""Write the lists of policies in the docs and the stub from the registry in jsparse/policies.

Usage: python .ci/policy_tables.py

It writes parts of files, each between two comments with the part's name, and prints the files that
changed.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jsparse.policies import REGISTRY
from jsparse.policies.method import Method

ROOT = Path(__file__).parents[1]
COMMAND = "python3 -m uv run python .ci/policy_tables.py"
type Policies = Sequence[Method]


def table(*rows: Iterable[str]) -> str:
    """Returns a Markdown table; the first row is its head."""
    head, *lines = (f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    return "\n".join(["", head, "|---" * (head.count("|") - 1) + "|", *lines, "", ""])


def uses(policies: Policies) -> str:
    """Returns the table of the tokens that policies attend to, and of their uses."""
    rows = (
        (
            re.sub(r"\w+\(.*?\)", r"`\g<0>`", policy.calls or f"{policy.build.__name__}()"),
            policy.attends,
            policy.when,
        )
        for policy in policies
        if policy.when
    )
    return table(("policy", "attends to", "when to use it"), *rows)


def arguments(policies: Policies) -> str:
    """Returns the table of all policies with their arguments and papers."""
    rows = (
        (
            f"`{policy.build.__name__}({', '.join(inspect.signature(policy.build).parameters)})`",
            ", ".join(paper(policy)),
        )
        for policy in policies
    )
    return table(("policy", "paper"), *rows)


def paper(policy: Method) -> Iterator[str]:
    """Yields the name of a policy's paper and a link to it, if there are any."""
    if policy.paper:
        yield policy.paper
        docstring = sys.modules[policy.build.__module__].__doc__ or ""
        if found := re.search(r"arXiv:([\d.]+\d)", docstring):
            yield f"[{found[1]}](https://arxiv.org/abs/{found[1]})"


def reference(kind: str) -> Callable[[Policies], str]:
    """Returns a function that lists the policies of a kind for the API reference."""

    def listed(policies: Policies) -> str:
        lines = (
            f"::: {policy.build.__module__}.{policy.build.__name__}"
            for policy in policies
            if policy.kind == kind
        )
        return "\n".join(["", *lines, "", ""])

    return listed


def imports(policies: Policies) -> str:
    """Returns the stub's imports of policies, sorted as ruff sorts them."""
    homes = sorted((policy.build.__module__, policy.build.__name__) for policy in policies)
    lines = (f"from {module} import {name} as {name}" for module, name in homes)
    return "\n".join([*lines, "", ""])


# the parts of each file, by the names in the comments around them
PARTS: Mapping[str, Mapping[str, Callable[[Policies], str]]] = {
    "docs/policies.md": {"policies": uses, "arguments": arguments},
    "docs/api.md": {
        "policies that select": reference("selects"),
        "policies that evict": reference("evicts"),
        "wrappers": reference("wraps"),
    },
    "jsparse/__init__.pyi": {"policies": imports},
}


def written(root: Path, file: str, policies: Policies) -> str:
    """Returns the text that a file should have."""
    text = (root / file).read_text(encoding="utf-8")
    for part, make in PARTS[file].items():
        begin, end = f"{part}: written by .ci/policy_tables.py", f"end of {part}"
        comments = rf"^(?:<!--|#) {re.escape(begin)}.*\n((?:.*\n)*?)(?:<!--|#) {end}\b"
        found = re.search(comments, text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{file} must have the comments '{begin}' and '{end}'")
        text = text[: found.start(1)] + make(policies) + text[found.end(1) :]
    return text


def outdated(root: Path, policies: Policies) -> dict[str, str]:
    """Returns the files that differ from their expected text, with that text."""
    texts = {file: written(root, file, policies) for file in PARTS}
    return {
        file: text
        for file, text in texts.items()
        if text != (root / file).read_text(encoding="utf-8")
    }


def main() -> None:
    """Writes the files that differ."""
    for file, text in outdated(ROOT, REGISTRY).items():
        (ROOT / file).write_text(text, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
