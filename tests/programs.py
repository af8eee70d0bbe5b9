"""Counts the programs that tests ask XLA for, and fails default tests that ask for too many.

A pytest plugin. Compiling is most of what the tests take: a program of ours costs a tenth of a
second to a whole one, whatever it computes. What jax compiles for a single operation outside of
jit, such as jnp.zeros, takes some hundredths, and is counted apart. A program that the compilation
cache holds counts, too.
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOST, MOST_OPERATIONS = 12, 60
MOST_BYTES = 1 << 30
# the compiler segfaults when a process has 65530 memory maps, of which a program takes a few
MAPS, MOST_MAPS, LOOK_EVERY = Path("/proc/self/maps"), 30000, 100
REQUESTED = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
MISSED = "/jax/compilation_cache/cache_misses"
PROGRAMS, OPERATIONS = "programs", "single operations"

_counted: Counter[str] = Counter()
_listening = False
_shared = 0  # programs compiled for what several tests share
_looked = 0  # programs when the memory maps were last counted
_by_test: Counter[str] = Counter()
_of_workers: Counter[str] = Counter()


def shared[T](function: Callable[..., T]) -> Callable[..., T]:
    """Caches a function as functools.cache does; what it compiles counts for none of its users."""

    @functools.cache
    def made(*args: Any, **kwargs: Any) -> T:
        global _shared
        before, shared_before = _counted[REQUESTED], _shared
        try:
            return function(*args, **kwargs)
        finally:
            _shared = shared_before + _counted[REQUESTED] - before

    return made


def count_programs() -> None:
    """Begins to count, once jax has been imported."""
    global _listening
    if _listening or "jax" not in sys.modules:
        return
    from jax import monitoring

    def count(event: str, *_, **__) -> None:
        _counted[event] += 1

    monitoring.register_event_listener(count)
    monitoring.register_event_duration_secs_listener(count)
    _listening = True


def own_programs() -> int:
    """Returns how many programs were asked for so far, but for what tests share."""
    return _counted[REQUESTED] - _shared


def pytest_addoption(parser):
    parser.addoption(
        "--programs",
        action="store_true",
        help="forget compiled programs before each test, and list the tests that ask for most",
    )


def pytest_collection_finish(session):
    count_programs()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Counts what fixtures of a wider scope than a test compile as shared."""
    global _shared
    before, shared_before = _counted[REQUESTED], _shared
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _shared = shared_before + _counted[REQUESTED] - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Notes where a test's own count begins."""
    count_programs()
    if item.config.option.programs and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    item.stash[BEGUN] = own_programs()
    result = yield
    stay_below_the_maps_of_a_process()
    return result


BEGUN = pytest.StashKey[int]()


def stay_below_the_maps_of_a_process() -> None:
    """Forgets compiled programs before they use up the process's memory maps."""
    global _looked
    if _counted[REQUESTED] - _looked < LOOK_EVERY:
        return
    _looked = _counted[REQUESTED]
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Notes how many programs a test asked for."""
    result = yield
    made = own_programs() - item.stash[BEGUN]
    _by_test[item.nodeid] = made
    return result


def pytest_sessionfinish(session):
    """Hands a worker's counts to the process that prints them; that one bounds the cache."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = dict(_counted)
        session.config.workeroutput["programs_by_test"] = dict(_by_test)
    else:
        trim(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), MOST_BYTES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Adds up what workers of pytest-xdist counted."""
    output = getattr(node, "workeroutput", {})
    _of_workers.update(output.get("programs", {}))
    _by_test.update(output.get("programs_by_test", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Prints one line on the compilation cache, and with --programs the dearest tests."""
    total = _counted + _of_workers
    if total[REQUESTED]:
        terminalreporter.write_line(
            f"{total[REQUESTED]} programs: {total[HIT]} from the compilation cache, "
            f"{total[MISSED]} compiled; {os.environ['JAX_COMPILATION_CACHE_DIR']}"
        )
    if config.option.programs:
        for test, made in _by_test.most_common(20):
            terminalreporter.write_line(f"{made:5} {test}")


def trim(folder: Path, most_bytes: int) -> None:
    """Deletes the files of a cache that were used least recently, until it is small enough."""
    held = []
    for file in folder.glob("*") if folder.is_dir() else ():
        status = file.stat()
        held.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    size = sum(each for _, each, _ in held)
    for _, own, file in sorted(held):
        if size <= most_bytes:
            return
        file.unlink(missing_ok=True)
        size -= own
