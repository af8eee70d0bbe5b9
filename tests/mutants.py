"""Checks that the tests notice faults: python -m tests.mutants [--full] [--jobs N] [--json FILE].

With --sample N [--seed S] [--cache FOLDER], N random faults are drawn instead; see
tests/random_mutants.py. The command stops after --limit-seconds and resumes when run again.

tests/mutants.toml lists small faults, each an exact replacement in one file, with the tests that
should see it. Each is put into a copy of the working tree, and these tests run there: the fault is
*killed* if one of them fails, and survives otherwise. A fault that survives the default tests is a
gap in them; with --full it also meets the slow tests.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
LIMIT_SECONDS = 600  # of one run of pytest; a fault may cause an endless loop
MIN_SHARE = 0.9  # of the faults that the default tests must kill
TIERS = {"default": "not slow", "slow": "slow and not gpu"}  # by the marks that pytest selects
TESTS_FAILED, INTERRUPTED, NO_TESTS = 1, 2, 5  # pytest's exit codes
VERSIONS = itertools.count(1)  # of files with a fault put in
FAILURE = re.compile(r"^(FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `replace` takes the place of the only `find`.

    `tests` are the files whose tests should notice it, or one test of a file: FILE::TEST. `needs`
    is a package without which none of them can, such as triton, whose interpreter runs kernels.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    needs: str = ""


@dataclass(frozen=True)
class Run:
    """The result of one run of pytest.

    Attributes:
        code: pytest's exit code; None: the run took too long.
        failure: the first test that failed, or the file that could not be collected.
        collection: whether collection failed.
        seconds: how long it took.
        output: its whole output.
    """

    code: int | None
    failure: str
    collection: bool
    seconds: float
    output: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a fault, as in the record.

    Attributes:
        name: the fault's name.
        file: the file with the fault.
        killed_by: the first test that failed, or another reason that ended the run; None: it
            survived.
        tier: the tier that killed it, "default" or "slow"; None: it survived.
        how: "test", "collection" or "time-out"; None: it survived.
        seconds: the total time of its runs.
    """

    name: str
    file: str
    killed_by: str | None
    tier: str | None
    how: str | None
    seconds: float


def load(file: Path = LIST) -> list[Mutant]:
    """Returns the faults of a list.

    Raises:
        ValueError: the fields of an entry are not those of a fault.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    wanted = {field.name for field in fields(Mutant) if field.name != "needs"}
    for entry in entries:
        if entry.keys() - {"needs"} != wanted:
            raise ValueError(f"{entry.get('name')}: must have {sorted(wanted)}, not {[*entry]}")
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def check(mutants: Iterable[Mutant], root: Path = ROOT) -> None:
    """Checks that every fault can be put in and has tests.

    Raises:
        ValueError: some cannot; the message names them with the reason.
    """
    wrong, names = [], set()
    for mutant in mutants:
        file = root / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.find) if file.is_file() else 0
        if not file.is_file():
            wrong.append(f"{mutant.name}: {mutant.file} does not exist")
        elif count != 1:
            wrong.append(f"{mutant.name}: its text is in {mutant.file} {count} times, must be once")
        if mutant.find == mutant.replace:
            wrong.append(f"{mutant.name}: it replaces its text by the same")
        if mutant.name in names:
            wrong.append(f"{mutant.name}: another fault has this name")
        names.add(mutant.name)
        missing = [test for test in mutant.tests if not (root / test.partition("::")[0]).is_file()]
        if missing or not mutant.tests:
            wrong.append(f"{mutant.name}: must name files of tests, {missing} are none")
    if wrong:
        raise ValueError("\n".join(wrong))


def require_packages(mutants: Iterable[Mutant]) -> None:
    """Raises ValueError if a package that faults need is not installed."""
    for needed in sorted({mutant.needs for mutant in mutants} - {""}):
        if importlib.util.find_spec(needed) is None:
            number = sum(mutant.needs == needed for mutant in mutants)
            raise ValueError(
                f"{number} faults need the package {needed}, which is not installed: "
                f"CONTRIBUTING.md says how to add it for this command"
            )


def copied(into: Path) -> Path:
    """Copies all files that git does not ignore, links as links, and returns their folder.

    A tree without git is copied without hidden folders and those made by tools.
    """
    if not (ROOT / ".git").exists():
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
        return Path(shutil.copytree(ROOT, into, symlinks=True, ignore=ignored))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):  # otherwise deleted but not committed
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)
    return into


def environment(copy: Path) -> dict[str, str]:
    """Returns the environment in which a copy's tests import the copy and use no GPU.

    All copies share compiled programs, because their key is the compiled text. They do not share
    the package's own store of programs, where a fault would survive.
    """
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JSPARSE_CACHE_DIR": str(copy / ".pytest_cache" / "jsparse"),
    }


def require_own_import(copy: Path) -> None:
    """Raises RuntimeError if a copy's tests would import another jsparse."""
    code = "import jsparse, jsparse.models; print(jsparse.__file__, jsparse.models.__file__)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, cwd=copy, env=environment(copy), check=True, capture_output=True, text=True
    ).stdout.split()
    if not all(Path(file).is_relative_to(copy) for file in found):
        raise RuntimeError(f"the copy in {copy} imports {found}")


def run_tests(
    copy: Path,
    tests: Iterable[str],
    tier: str,
    *options: str,
    runner: Sequence[str] = ("-m", "pytest", "-x"),
    limit: float = LIMIT_SECONDS,
) -> Run:
    """Runs some files of tests in a copy, up to the first failure."""
    command = [sys.executable, *runner, "-q", "-n", "0", "-p", "no:cacheprovider", *options]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "-m", TIERS[tier], *tests],
        cwd=copy,
        env=environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code, output = None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that its tests may have started
        process.wait()
    return Run(code, *first_failure(output), time.perf_counter() - began, output)


def first_failure(output: str) -> tuple[str, bool]:
    """Returns the first test in pytest's summary, and whether it is a file instead.

    A file is named if it could not be collected.
    """
    _, _, summary = output.rpartition("short test summary info")  # log output may look similar
    found = FAILURE.search(summary)
    if found is None:
        return "", False
    return found[2], found[1] == "ERROR" and "::" not in found[2]


def put_in(copy: Path, mutant: Mutant) -> AbstractContextManager[None]:
    """Puts a fault into a copy and removes it again."""
    text = (copy / mutant.file).read_text(encoding="utf-8")
    return replaced(copy, mutant.file, text.replace(mutant.find, mutant.replace).encode())


@contextmanager
def replaced(copy: Path, name: str, changed: bytes) -> Iterator[None]:
    """Replaces a file of a copy, and restores it afterwards.

    Python checks bytecode by a file's size and its time in whole seconds, so every version of a
    file gets a different time.
    """
    file = copy / name
    text, before = file.read_bytes(), file.stat().st_mtime_ns
    try:
        file.write_bytes(changed)
        os.utime(file, ns=(before, before + next(VERSIONS) * 10**9))
        yield
    finally:
        file.write_bytes(text)
        os.utime(file, ns=(before, before))
        shutil.rmtree(copy / ".pytest_cache" / "jsparse", ignore_errors=True)


def judged(mutant: Mutant, tier: str, run: Run) -> Verdict:
    """Returns the verdict of a run on the fault in the copy.

    Raises:
        RuntimeError: pytest itself failed.
    """
    told = mutant.name, mutant.file
    if run.code is None:
        return Verdict(*told, f"no end within {run.seconds:.0f} s", tier, "time-out", run.seconds)
    if run.code in (TESTS_FAILED, INTERRUPTED) and run.collection:
        return Verdict(*told, run.failure, tier, "collection", run.seconds)
    if run.code == TESTS_FAILED and run.failure:
        return Verdict(*told, run.failure, tier, "test", run.seconds)
    if run.code == 0 or (run.code == NO_TESTS and tier == "slow"):
        return Verdict(*told, None, None, None, run.seconds)
    raise RuntimeError(f"{mutant.name}: pytest ended with {run.code}\n{run.output[-2000:]}")


class Copies:
    """Gives each of several threads a copy of the working tree."""

    def __init__(self, folder: Path, number: int) -> None:
        """Makes the copies."""
        self._number = number
        self._free: SimpleQueue[Path] = SimpleQueue()
        for nth in range(number):
            self._free.put(copied(folder / f"copy{nth}"))

    def map[T](self, function: Callable[[Path, T], Any], items: Iterable[T]) -> list[Any]:
        """Returns function(copy, item) for all items, some at a time; stops at the first error."""

        def with_copy(item: T) -> Any:
            copy = self._free.get()
            try:
                return function(copy, item)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(self._number) as pool:
            try:
                return list(pool.map(with_copy, items))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def require_green(self, mutants: Iterable[Mutant], tier: str) -> None:
        """Runs all files of tests without a fault.

        Raises:
            RuntimeError: a file fails, or has no tests in the default tier.
        """

        def run(copy: Path, test: str) -> None:
            require_own_import(copy)
            ran = run_tests(copy, [test], tier)
            if ran.code != 0 and not (ran.code == NO_TESTS and tier == "slow"):
                raise RuntimeError(f"{test} without a fault: {ran.code}\n{ran.output[-2000:]}")
            print(f"green  {test}, {tier}, {ran.seconds:.0f} s", flush=True)

        self.map(run, sorted({test for mutant in mutants for test in mutant.tests}))

    def judge(self, mutants: Iterable[Mutant], tier: str) -> list[Verdict]:
        """Returns the verdict on each fault in one tier."""

        def run(copy: Path, mutant: Mutant) -> Verdict:
            with put_in(copy, mutant):
                found = judged(mutant, tier, run_tests(copy, mutant.tests, tier))
            print(shown(found), flush=True)
            return found

        return self.map(run, mutants)


def verdicts(mutants: list[Mutant], jobs: int, full: bool) -> list[Verdict]:
    """Returns the verdicts on all faults, in their order."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(Path(folder).resolve(), jobs)
        copies.require_green(mutants, "default")
        found = dict(zip(mutants, copies.judge(mutants, "default"), strict=True))
        left = [mutant for mutant in mutants if found[mutant].tier is None]
        if full and left:
            copies.require_green(left, "slow")
            for mutant, later in zip(left, copies.judge(left, "slow"), strict=True):
                seconds = found[mutant].seconds + later.seconds
                found[mutant] = Verdict(**asdict(later) | {"seconds": seconds})
        return list(found.values())


def shown(verdict: Verdict) -> str:
    """Returns a fault's line of the table."""
    by = "SURVIVED" if verdict.killed_by is None else verdict.killed_by
    marks = [mark for mark in (verdict.tier, verdict.how) if mark not in (None, "default", "test")]
    return f"{verdict.name:<60}  {verdict.seconds:4.0f} s  {' '.join([by, *marks])}"


def shares(found: list[Verdict], full: bool) -> dict[str, float]:
    """Returns the shares of faults killed by the default tier and by both tiers."""
    by_default = sum(verdict.tier == "default" for verdict in found) / len(found)
    killed = sum(verdict.tier is not None for verdict in found) / len(found)
    return {"default": by_default} | ({"default+slow": killed} if full else {})


def header() -> dict[str, Any]:
    """Returns the header of a record; JSPARSE_REVISION gives a copy's revision."""
    revision = os.environ.get("JSPARSE_REVISION")
    if revision is None:
        described = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        ran = subprocess.run(described, cwd=ROOT, check=True, capture_output=True, text=True)
        revision = ran.stdout.strip()
    return {
        "command": shlex.join(["python", "-m", "tests.mutants", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "git_revision": revision,
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
    }


def record(found: list[Verdict], full: bool) -> dict[str, Any]:
    """Returns the record of a check, ready for JSON."""
    return {
        **header(),
        "mutants": len(found),
        "killed": {tier: round(share, 4) for tier, share in shares(found, full).items()},
        "verdicts": [asdict(one) | {"seconds": round(one.seconds, 1)} for one in found],
    }


def sampled(given: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the record of random faults; None if time ran out first."""
    from tests.random_mutants import Sampler

    until = time.monotonic() + given.limit_seconds
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(Path(folder).resolve(), given.jobs)
        sampler = Sampler(ROOT, given.cache, copies, until, given.seconds_each)
        found = sampler.sample(given.sample, given.seed)
    if found is None:
        return None
    print("", *(f"SURVIVED  {name}" for name in found["survivors"]), sep="\n")
    print(f"{found['killed']:.1%} of {found['sample']} killed; places: {found['population']}")
    return header() | found


def listed(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Returns the record of the listed faults, and whether the tests notice enough of them."""
    mutants = load()
    check(mutants)
    mutants = [mutant for mutant in mutants if given.only in mutant.name]
    if not mutants:
        raise ValueError(f"--only={given.only}: leaves nothing to run")
    require_packages(mutants)
    found = verdicts(mutants, given.jobs, given.full)
    print("", *map(shown, found), sep="\n")
    for tier, share in shares(found, given.full).items():
        print(f"{tier}: {round(share * len(found))} of {len(found)} killed, {share:.1%}")
    survived = any(verdict.tier is None for verdict in found)
    enough = not survived if given.full else shares(found, False)["default"] >= MIN_SHARE
    return record(found, given.full), enough


def main() -> int:
    """Runs the command; returns 1 if too many faults survive, 3 if time ran out."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--full", action="store_true", help="run slow tests on what survives")
    parser.add_argument("--jobs", type=int, default=2, help="runs of pytest at a time")
    parser.add_argument("--only", default="", help="a part of the names of the faults to put in")
    parser.add_argument("--json", type=Path, help="the file for the record")
    parser.add_argument("--sample", type=int, help="draw so many faults at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "mutants", help="keeps a sample's results"
    )
    parser.add_argument(
        "--seconds-each", type=float, default=300, help="of tests for one fault of a sample"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=math.inf, help="begin no run after this time"
    )
    given = parser.parse_args()
    try:
        if given.json is not None and not given.json.parent.is_dir():
            raise ValueError(f"--json={given.json}: must be in a folder that exists")
        if given.jobs < 1 or (given.sample is not None and given.sample < 1):
            raise ValueError(f"--jobs={given.jobs} --sample={given.sample}: must be at least 1")
        if given.sample is None:
            made, enough = listed(given)
        else:
            made, enough = sampled(given), True
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    if made is None:
        print("time is over: the same command goes on from here")
        return 3
    if given.json is not None:
        text = json.dumps(made, indent=2, ensure_ascii=False)
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
