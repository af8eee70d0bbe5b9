"""Check that docstrings, comments and pages use no phrases that we decided not to write.

Usage: python .ci/plain_words.py [--count] [PATH ...]

Each pattern has a number of uses per 1,000 words up to which it is accepted, mostly none; ALLOWED
are expressions that contain a pattern and are fine. --count prints the uses of each pattern instead
of where they are. Code, code blocks and quoted code are not looked at, nor is CHANGELOG's past.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("jsparse", "pallas_kernels", "models", "train", "bench", "tests", "examples", ".ci")


@dataclass(frozen=True)
class Pattern:
    """A phrase to avoid, and how to write instead."""

    name: str
    expression: str
    instead: str
    per_thousand: float = 0.0


PATTERNS = (
    Pattern(
        "relative clause without a noun",
        r"\b(what|whatever|whoever|whomever)\b|(?:^|[.;:,(]\s+|\b(?:and|or|for|to|of|by)\s+)who\b",
        "put a noun before the clause: what is in flight -> in-flight work",
        0.3,
    ),
    Pattern(
        "things that lie or stand",
        r"\b(lie|lies|lay|lain|lying|stand|stands|stood|standing)\b",
        "things are, start at, follow, are stored",
    ),
    Pattern("behind, of text or time", r"\bbehind\b", "after; behind the last -> past the end"),
    Pattern(
        "so many, as many",
        r"\b(so|as) (many|much|few|little)\b(?! as possible)",
        "name the parameter, or n",
        0.05,
    ),
    Pattern("is there", r"\b(is|are|was|were) there\b", "exists, is ready, is compiled"),
    Pattern("values by that", r"\b(None|0|1|True|False) (is|are|means) that\b", "None: no report"),
    Pattern(
        "nobody",
        r"\b(nobody|anybody|somebody|everybody|anyone|someone|everyone)\b",
        "name who or what it is",
    ),
    Pattern(
        "let go, take in", r"\b(lets?|letting) \w+ (go|know|in)\b|\btakes? in\b", "release, record"
    ),
    Pattern("come to hold", r"\bcan come to\b|\bcome to (its|their) ends?\b", "can hold; finish"),
    Pattern("too at the end", r", too[.;:,)]", "also, before the verb"),
    Pattern("class or property as a sentence", r"\A(Is|Are) (?!there)", "a noun phrase"),
)

# expressions that contain a pattern and are fine
ALLOWED = re.compile(
    r"""
    \bstands?\s(in\s)?for\b | \bstand-?alone\b | \bstand-?ins?\b | \blong-?standing\b | \bunderst\w+
    | \bwhat\s(to|a|an)\b | \bno\smatter\swhat\b | \bwhat-?if\b
    | \bbehind\s(a|the)\s(flag|proxy|router|gate|load\sbalancer|firewall)\b
    | \b(once|twice|half|times)\sas\s(many|much|few)\b | \bas\sfew\sas\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
QUOTED_CODE = re.compile(r"``[^`]*``|`[^`\n]*`")
QUESTION = re.compile(r"[^.;:!?]*\?")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields each docstring with its line, also those of attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields runs of comments on neighbouring lines as one text each, with their first line."""
    run: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        text = token.string.lstrip("#: ")
        if re.match(r"(noqa|type:|pyright|pragma|!)", text):
            continue
        if run and line == last + 1:
            run.append(text)
        else:
            if run:
                yield first, "\n".join(run)
            run, first = [text], line
        last = line
    if run:
        yield first, "\n".join(run)


def prose_of_page(text: str) -> str:
    """Returns a page's text with code blocks and HTML comments blanked, line for line."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the prose of a file with the line that each piece starts on."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, prose_of_page(source)
        return
    yield from docstrings(ast.parse(source))
    yield from comments(source)


def without_allowed(text: str) -> str:
    """Returns the text with quoted code, questions and allowed expressions blanked."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "_", found[0])

    text = QUOTED_CODE.sub(blank, text)
    text = re.sub(r"\]\([^)]*\)", blank, text)
    text = QUESTION.sub(blank, text)
    return ALLOWED.sub(blank, text)


def files(paths: list[str]) -> list[Path]:
    """Returns the Python files and pages below the paths; of the project if there are none."""
    if not paths:
        pages = [*Path().glob("*.md"), *Path("docs").rglob("*.md"), Path("bench/README.md")]
        modules = [path for root in ROOTS for path in Path(root).rglob("*.py")]
        return sorted({path for path in [*pages, *modules] if path.name != "CHANGELOG.md"})
    found: set[Path] = set()
    for path in map(Path, paths):
        found |= {*path.rglob("*.py"), *path.rglob("*.md")} if path.is_dir() else {path}
    return sorted(found)


def main() -> None:
    """Prints where patterns are used more than accepted, and exits with 1 if any is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", action="store_true", help="print numbers of uses only")
    options = parser.parse_args()
    words = 0
    uses: dict[str, list[str]] = {pattern.name: [] for pattern in PATTERNS}
    for path in files(options.paths):
        if path.name == Path(__file__).name:
            continue  # it has to spell them
        for line, text in texts(path):
            words += len(text.split())
            clean = without_allowed(text)
            for pattern in PATTERNS:
                for found in re.finditer(pattern.expression, clean, re.MULTILINE | re.IGNORECASE):
                    at = line + clean[: found.start()].count("\n")
                    context = " ".join(text[max(0, found.start() - 30) : found.end() + 30].split())
                    uses[pattern.name].append(f"{path}:{at}: {context}")
    failed = False
    for pattern in PATTERNS:
        count = len(uses[pattern.name])
        accepted = round(pattern.per_thousand * words / 1000)
        failed |= count > accepted
        if options.count:
            print(f"{count:6} of {accepted:3} accepted  {pattern.name}")
        elif count > accepted:
            print(f"{pattern.name}: {count}, {accepted} accepted; {pattern.instead}")
            print(*(f"  {use}" for use in uses[pattern.name]), sep="\n")
    if options.count:
        print(f"{words:6} words")
    sys.exit(failed and not options.count)


if __name__ == "__main__":
    main()
