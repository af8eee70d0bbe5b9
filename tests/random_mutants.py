"""Draws random faults of the package and measures how many of them the default tests notice.

The population is every place in the sources, each file once, where one of these applies: a
comparison turns into its neighbour (< into <=, == into !=), a whole number grows by one and another
is doubled, an arithmetic sign turns into its opposite, a sum or a chain of `and` and `or` loses a
term, a condition is negated. Strings, annotations, exceptions and their messages, and arguments of
logs and warnings have no places. Nor has a backend of a kernel if no default test on a CPU enters
the function or imports the module.

Every file of the default tests runs once without a fault, under coverage. The files that execute a
fault's lines judge it, within a time limit. The nearest come first: those with the most words in
common with the source's path, and among equals the cheapest. For lines that run only at import, the
files must enter a function of the same module. A fault in a line that no file executes survives.
"""

import ast
import hashlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from coverage import CoverageData

from tests.mutants import (
    FAILURE,
    NO_TESTS,
    TESTS_FAILED,
    Copies,
    Mutant,
    Verdict,
    judged,
    replaced,
    require_own_import,
    run_tests,
    shown,
)

PACKAGE = ("jsparse", "models", "pallas_kernels", "train")  # without following links
TIER = "default"
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
SILENT = {"log", "debug", "info", "warning", "error", "exception", "warn"}  # methods that report
RCFILE = """[run]
core = sysmon
parallel = true
patch = subprocess
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-sysmon
data_file = {data}
source = {sources}
"""


@dataclass(frozen=True)
class Site:
    """A place for a fault, where `after` replaces bytes `start` to `end` of `file`.

    Attributes:
        lines: the first and the last changed line.
        function: the lines of the innermost function around it; None: code run at import.
    """

    file: str
    start: int
    end: int
    before: str
    after: str
    lines: tuple[int, int]
    function: tuple[int, int] | None

    def text(self, text: bytes) -> bytes:
        """Returns the file's text with the fault."""
        return text[: self.start] + self.after.encode() + text[self.end :]

    @property
    def name(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.lines[0]}, byte {self.start}: {before} -> {after}"


class Sites(ast.NodeVisitor):
    """Collects the places of one source in `found`, and the lines of functions in `bodies`."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text.encode()
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.function: tuple[int, int] | None = None
        self.bodies: set[int] = set()
        self.found: list[Site] = []
        self.visit(ast.parse(text))

    def span(self, node: Any) -> tuple[int, int]:
        """Returns the first byte of a node and the one after its last."""
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: ast.AST) -> str:
        return self.text[slice(*self.span(node))].decode()

    def add(self, node: Any, start: int, end: int, after: str) -> None:
        before = self.text[start:end].decode()
        lines = (node.lineno, node.end_lineno)
        self.found.append(Site(self.file, start, end, before, after, lines, self.function))

    def add_operator(self, node: Any, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Adds a replacement of the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        token = re.search(old, self.text[start:end].decode())
        if token is not None:  # otherwise a comment or a bracket is not ASCII
            self.add(node, start + token.start(), start + token.end(), new)

    def add_condition(self, node: Any) -> None:
        self.add(node, *self.span(node), f"(not ({self.source(node)}))")

    def visit_scope(self, node: Any) -> None:
        """Visits decorators and defaults as part of the enclosing scope, then the body."""
        around = self.function
        for each in [*getattr(node, "decorator_list", []), *node.args.defaults]:
            self.visit(each)
        for each in filter(None, node.args.kw_defaults):
            self.visit(each)
        body = node.body if isinstance(node.body, list) else [node.body]
        self.function = (body[0].lineno, node.end_lineno)
        if body[0].lineno > node.lineno:
            self.bodies.update(range(body[0].lineno, node.end_lineno + 1))
        for each in body:
            self.visit(each)
        self.function = around

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_scope

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def leave_out(self, node: ast.AST) -> None:
        """Skips a node that has no places."""

    visit_Raise = visit_TypeAlias = visit_JoinedStr = leave_out

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in SILENT):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self.source(node.test):
            self.visit_test(node)

    def visit_test(self, node: Any) -> None:
        self.add_condition(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_test

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.add_condition(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self.add_operator(node, left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(
            isinstance(side, ast.JoinedStr) or is_text(side) for side in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not text:
            self.add_operator(node, node.left, node.right, *ARITHMETIC[type(node.op)])
            if isinstance(node.op, ast.Add | ast.Sub):
                self.add(node, *self.span(node), f"({self.source(node.left)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for dropped in node.values:
            kept = (f"({self.source(each)})" for each in node.values if each is not dropped)
            self.add(node, *self.span(node), f"({word.join(kept)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(node, *self.span(node), str(node.value + 1))
        if type(node.value) is float:
            self.add(node, *self.span(node), repr(2 * node.value or 1.0))


def is_text(node: ast.AST) -> bool:
    """Returns whether a node is a string literal."""
    literal = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return literal or isinstance(node, ast.JoinedStr)


def sources(root: Path) -> list[str]:
    """Returns the files of the package below `root`, each once."""
    found = []
    for folder in PACKAGE:
        found += [f for f in (root / folder).rglob("*.py") if not f.is_symlink()]
    return sorted(str(file.relative_to(root)) for file in found)


@dataclass(frozen=True)
class Measured:
    """The run of one test file without a fault.

    Attributes:
        seconds: its time.
        failed: its tests that fail without a fault, or the file itself.
        lines: the executed lines of each source.
    """

    test: str
    seconds: float
    failed: list[str]
    lines: dict[str, list[int]]


def measure(copy: Path, test: str) -> Measured:
    """Runs one test file under coverage."""
    data = copy / ".pytest_cache" / "coverage"
    data.mkdir(parents=True, exist_ok=True)
    for old in data.iterdir():
        old.unlink()
    rcfile = copy / ".pytest_cache" / "coveragerc"
    inside = [str(copy / folder) for folder in PACKAGE]
    rcfile.write_text(RCFILE.format(data=data / "run", sources=",".join(inside)))
    runner = ["-m", "coverage", "run", f"--rcfile={rcfile}", "-m", "pytest"]
    run = run_tests(copy, [test], TIER, "-rfE", runner=runner)
    failed = [found[2] for found in FAILURE.finditer(run.output)]
    if run.code not in (0, NO_TESTS) and not (run.code == TESTS_FAILED and failed):
        failed = [test]
    lines: dict[str, set[int]] = {}
    for part in data.iterdir():
        measured = CoverageData(str(part))
        measured.read()
        for file in measured.measured_files():
            source = os.path.relpath(os.path.realpath(file), copy)
            lines.setdefault(source, set()).update(measured.lines(file) or ())
    return Measured(test, run.seconds, failed, {f: sorted(n) for f, n in lines.items()})


class Judges:
    """Chooses the test files that judge a fault."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        self.measured = sorted(measured, key=lambda one: one.seconds)
        self.lines = [
            {file: frozenset(lines) for file, lines in one.lines.items()} for one in self.measured
        ]

    def executing(self, site: Site, bodies: set[int]) -> list[Measured]:
        """Returns the files that execute a place, the nearest first, then the cheapest.

        At import, these are the files that enter `bodies`, if there are any.
        """
        wanted = set(range(site.lines[0], site.lines[1] + 1))
        pairs = list(zip(self.measured, self.lines, strict=True))
        ran = [(one, lines) for one, lines in pairs if wanted & lines.get(site.file, frozenset())]
        if site.function is None:
            ran = [pair for pair in ran if bodies & pair[1][site.file]] or ran
        return sorted((one for one, _ in ran), key=lambda one: -shared_words(one.test, site.file))

    def enters(self, site: Site) -> bool:
        """Returns whether any file enters the function around a place, or imports its module."""
        first, last = site.function or (1, sys.maxsize)
        return any(
            any(first <= line <= last for line in lines.get(site.file, ())) for lines in self.lines
        )


def is_backend(file: str) -> bool:
    """Returns whether a source of a kernel is one of its backends."""
    return file.startswith("pallas_kernels/") and Path(file).name not in {
        "api.py",
        "reference.py",
        "__init__.py",
    }


def shared_words(test: str, source: str) -> int:
    """Returns the number of words that two paths share; a part of a name is a word."""
    words = (set(re.split(r"[\W_]", path)) for path in (test, source.removesuffix(".py")))
    return len(set.intersection(*words))


def within(files: list[Measured], seconds: float) -> list[Measured]:
    """Returns the first file, and those of the others that fit into the time, in order."""
    taken, spent = [], 0.0
    for one in files:
        if not taken or spent + one.seconds <= seconds:
            taken.append(one)
            spent += one.seconds
    return taken


def judge(copy: Path, site: Site, files: list[Measured], seconds: float) -> Verdict:
    """Returns the verdict on a fault; `seconds` limit the time of the tests that judge it."""
    chosen = within(files, seconds)
    limit = 120 + 4 * sum(one.seconds for one in chosen)
    skip = [f"--deselect={test}" for one in chosen for test in one.failed]
    text = (copy / site.file).read_bytes()
    changed = site.text(text)
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
        raise RuntimeError(f"{site.name}: changes nothing")
    with replaced(copy, site.file, changed):
        run = run_tests(copy, [one.test for one in chosen], TIER, *skip, limit=limit)
    return judged(Mutant(site.name, site.file, "", "", ()), TIER, run)


def digest(root: Path) -> str:
    """Returns a hash of this state of sources and tests."""
    files = [*sources(root), *sorted(str(f.relative_to(root)) for f in root.glob("tests/**/*.py"))]
    text = "".join(f"{file}\n{(root / file).read_text(encoding='utf-8')}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sampler:
    """Draws faults and has them judged until its time is over.

    Attributes:
        root: the working tree.
        cache: the folder of results, from which the next call resumes.
        copies: the copies of the working tree in which tests run.
        until: when to stop, by time.monotonic().
        seconds: the total time without a fault of the tests that judge one fault.
    """

    root: Path
    cache: Path
    copies: Copies
    until: float
    seconds: float

    def work[T, R](
        self, name: str, kind: type[R], items: dict[str, T], do: Callable[[Path, T], R]
    ) -> dict[str, R] | None:
        """Returns the result of each item, by its key; None if time ran out first."""
        folder = self.cache / digest(self.root)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}.jsonl"
        file.touch()
        made = dict(map(json.loads, file.read_text(encoding="utf-8").splitlines()))

        def one(copy: Path, key: str) -> None:
            if time.monotonic() < self.until:
                made[key] = asdict(cast(Any, do(copy, items[key])))
                with file.open("a", encoding="utf-8") as output:
                    output.write(json.dumps([key, made[key]], ensure_ascii=False) + "\n")

        self.copies.map(one, [key for key in items if key not in made])
        return {key: kind(**made[key]) for key in items} if items.keys() <= made.keys() else None

    def measure(self, copy: Path, test: str) -> Measured:
        """Runs one test file under coverage and prints the tests that fail without a fault."""
        require_own_import(copy)
        found = measure(copy, test)
        print(f"ran  {test}, {found.seconds:.0f} s", *found.failed, flush=True)
        return found

    def sample(self, number: int, seed: int) -> dict[str, Any] | None:
        """Returns the record of `count` faults; None if time ran out first."""
        tests = sorted(str(f.relative_to(self.root)) for f in self.root.glob("tests/**/test_*.py"))
        ran = self.work("measured", Measured, {test: test for test in tests}, self.measure)
        if ran is None:
            return None
        judges = Judges(one for one in ran.values() if one.test not in one.failed)
        places = [Sites(file, (self.root / file).read_text("utf-8")) for file in sources(self.root)]
        bodies = {each.file: each.bodies for each in places}
        sites = [site for each in places for site in each.found]
        population = [site for site in sites if not is_backend(site.file) or judges.enters(site)]
        drawn = random.Random(seed).sample(population, number)

        def judge_one(copy: Path, site: Site) -> Verdict:
            files = judges.executing(site, bodies[site.file])
            if files:
                found = judge(copy, site, files, self.seconds)
            else:
                found = Verdict(site.name, site.file, None, None, "never executed", 0.0)
            print(shown(found), flush=True)
            return found

        found = self.work(f"seed-{seed}", Verdict, {site.name: site for site in drawn}, judge_one)
        if found is None:
            return None
        survivors = [name for name, verdict in found.items() if verdict.killed_by is None]
        return {
            "seed": seed,
            "places": len(sites),
            "population": len(population),
            "fail_without_a_fault": sorted(test for one in ran.values() for test in one.failed),
            "sample": number,
            "killed": round(1 - len(survivors) / number, 4),
            "survivors": survivors,
            "verdicts": [asdict(v) | {"seconds": round(v.seconds, 1)} for v in found.values()],
        }
