"""Chooses the tests to run: pure ones, those that this machine can run, an eighth of the slow ones.

A pytest plugin. Tests that cannot run here are left out and counted in one line, not listed one by
one.
"""

import shutil
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

PURE = "pytest.mark.pure"
PARTS = 8
NO_GPU, NO_BROWSER = "needs an NVIDIA GPU", "needs Chromium"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEFT_OUT = pytest.StashKey[Counter]()
SKIPPED_FILES: dict[str, str] = {}


class NoJax:
    """Refuses to import jax, so that a pure test cannot start to need it."""

    def find_spec(self, name, path=None, target=None):
        """Raises ImportError for jax, and leaves all other modules to the next finders."""
        if name == "jax":
            raise ImportError("tests marked pure must not import jax")


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=int,
        metavar="N",
        help=f"of the tests marked slow, run one in {PARTS}: those of part N, taken mod {PARTS}",
    )


def pytest_configure(config):
    config.stash[LEFT_OUT] = Counter()
    if only_pure(config) and "jax" not in sys.modules:
        sys.meta_path.insert(0, NoJax())


def only_pure(config) -> bool:
    """Returns whether only pure tests were requested."""
    return "pure" in config.option.markexpr.split(" and ")


def pytest_ignore_collect(collection_path: Path, config):
    """Ignores files without a pure test if only these run: importing one may import jax."""
    if only_pure(config) and collection_path.suffix == ".py":
        return True if PURE not in collection_path.read_text(encoding="utf-8") else None
    return None


def part_of(test: str) -> int:
    """Returns the part, from 0 to PARTS - 1, of a slow test, by its id."""
    return zlib.crc32(test.encode()) % PARTS


def has_gpu() -> bool:
    """Returns whether jax computes on a GPU; without NVIDIA's driver, jax is not imported."""
    if not Path("/dev/nvidiactl").exists():
        return False
    import jax

    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(config, items):
    """Leaves out tests with unavailable requirements, and slow tests of other parts."""
    lacking = {}
    if any(item.get_closest_marker("gpu") for item in items) and not has_gpu():
        lacking["gpu"] = NO_GPU
    if not any(map(shutil.which, BROWSERS)):
        lacking["browser"] = NO_BROWSER
    part, kept, dropped = config.option.part, [], []
    for item in items:
        reason = next((lacking[mark] for mark in lacking if item.get_closest_marker(mark)), None)
        if reason is not None:
            config.stash[LEFT_OUT][reason] += 1
            dropped.append(item)
        elif (
            part is not None
            and item.get_closest_marker("slow")
            and part_of(item.nodeid) != part % PARTS
        ):
            dropped.append(item)
        else:
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def pytest_collectreport(report):
    """Records files that are skipped because of a missing package, with the reason."""
    if report.skipped:
        *_, reason = report.longrepr
        SKIPPED_FILES[report.nodeid] = reason.removeprefix("Skipped: ")


def pytest_sessionfinish(session):
    """Sends the tests that a pytest-xdist worker left out to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Stores the tests that a worker left out; all workers collect the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[LEFT_OUT].update(Counter(left_out) - node.config.stash[LEFT_OUT])


def counted(count: int, what: str, reason: str) -> str:
    """Returns how many tests or files need a requirement, by a reason that starts with "needs"."""
    if count == 1:
        return f"1 {what} {reason}"
    return f"{count:,} {what}s need{reason.removeprefix('needs')}"


def pytest_terminal_summary(terminalreporter, config):
    """Prints one line on the tests that this machine cannot run."""
    said = [counted(n, "test", reason) for reason, n in config.stash[LEFT_OUT].items()]
    said += [counted(n, "file", why) for why, n in Counter(SKIPPED_FILES.values()).items()]
    if said:
        terminalreporter.write_line(f"left out here: {'; '.join(said)}")
