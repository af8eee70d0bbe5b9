"""Chooses which tests run: the pure ones, those that this machine can run, an eighth of the slow.

A pytest plugin. What cannot run here is left out and counted in one line, not listed test by test.
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
    """Refuses to import jax, so that a pure test cannot come to need it."""

    def find_spec(self, name, path=None, target=None):
        """Raises ImportError for jax, and leaves every other module to the finders that follow."""
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
    """Returns whether tests marked pure are all that was asked for."""
    return "pure" in config.option.markexpr.split(" and ")


def pytest_ignore_collect(collection_path: Path, config):
    """Ignores files without a pure test when only these run: importing one may import jax."""
    if only_pure(config) and collection_path.suffix == ".py":
        return True if PURE not in collection_path.read_text(encoding="utf-8") else None
    return None


def part_of(test: str) -> int:
    """Returns the part, from 0 to PARTS - 1, to which a slow test belongs by its id."""
    return zlib.crc32(test.encode()) % PARTS


def has_gpu() -> bool:
    """Returns whether jax computes on a GPU; without NVIDIA's driver, jax is not asked."""
    if not Path("/dev/nvidiactl").exists():
        return False
    import jax

    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(config, items):
    """Leaves out what needs what this machine has not, and slow tests of other parts."""
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
    """Notes files that a missing package skips, and why."""
    if report.skipped:
        *_, reason = report.longrepr
        SKIPPED_FILES[report.nodeid] = reason.removeprefix("Skipped: ")


def pytest_sessionfinish(session):
    """Hands what a worker of pytest-xdist left out to the process that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Takes what a worker left out; all workers collect the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[LEFT_OUT].update(Counter(left_out) - node.config.stash[LEFT_OUT])


def counted(count: int, what: str, reason: str) -> str:
    """Returns how many tests or files need something, from a reason that begins with "needs"."""
    if count == 1:
        return f"1 {what} {reason}"
    return f"{count:,} {what}s need{reason.removeprefix('needs')}"


def pytest_terminal_summary(terminalreporter, config):
    """Prints one line on what this machine cannot run."""
    said = [counted(n, "test", reason) for reason, n in config.stash[LEFT_OUT].items()]
    said += [counted(n, "file", why) for why, n in Counter(SKIPPED_FILES.values()).items()]
    if said:
        terminalreporter.write_line(f"left out here: {'; '.join(said)}")
