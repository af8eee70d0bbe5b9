"""Counts the programs that tests request from XLA, and reports default tests that request too many.

A pytest plugin. Compilation takes most of the tests' time: a program of ours costs a tenth of a
second to a whole one, whatever it computes. Programs that jax compiles for a single operation
outside of jit, such as jnp.zeros, take some hundredths and are counted separately. A program in the
compilation cache also counts. The number of a test depends on the tests before it in its process:
tests over the budget are reported, and fail only with JSPARSE_PROGRAM_BUDGET set, as in .ci/run.
"""

import functools
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

MAX_PROGRAMS, MAX_OPERATIONS = 12, 60
ADVICE = "share a shape or mark it slow"
MAX_BYTES = 1 << 30
# the compiler segfaults when a process has 65530 memory maps; a program takes a few
MAPS, MAX_MAPS, LOOK_EVERY = Path("/proc/self/maps"), 30000, 100
REQUESTED = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
MISSED = "/jax/compilation_cache/cache_misses"
PROGRAMS, OPERATIONS = "programs", "single operations"

Counts = Counter[str]
_counted: Counts = Counter()
_shared: Counts = Counter()  # programs shared by several tests
_of_workers: Counts = Counter()
_by_test: dict[str, Counts] = {}
_over_budget: dict[str, str] = {}
_listening = False
_looked = 0  # programs when the memory maps were last counted
BEGUN = pytest.StashKey[Counts]()


def shared[T](function: Callable[..., T]) -> Callable[..., T]:
    """Caches a function like functools.cache; the programs that it compiles count for none of its
    users.
    """

    @functools.cache
    def made(*args: Any, **kwargs: Any) -> T:
        with sharing():
            return function(*args, **kwargs)

    return made


@contextmanager
def sharing() -> Iterator[None]:
    """Counts the programs compiled within as shared."""
    global _shared
    before, shared_before = _counted.copy(), _shared
    try:
        yield
    finally:
        _shared = shared_before + (_counted - before)


def listen() -> None:
    """Starts counting, once jax has been imported."""
    global _listening
    if _listening or "jax" not in sys.modules:
        return
    import jax.numpy
    from jax import monitoring

    operations = {*dir(jax.lax), *dir(jax.numpy), "stage"}

    def count(event: str, *_: Any, fun_name: str = "", **__: Any) -> None:
        if event == REQUESTED:
            name = fun_name.removeprefix("jit(").removesuffix(")").removeprefix("_")
            event = OPERATIONS if name in operations else PROGRAMS
        _counted[event] += 1

    monitoring.register_event_listener(count)
    monitoring.register_event_duration_secs_listener(count)
    _listening = True


def pytest_addoption(parser):
    parser.addoption(
        "--programs",
        action="store_true",
        help="forget compiled programs before each test, and list the tests that ask for most",
    )


def pytest_configure():
    """Looks for garbage rarely: imports, traces and compiled programs allocate much and stay."""
    gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish(session):
    """Starts counting; also freezes the objects of tests and modules for the garbage collector."""
    listen()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Counts programs of fixtures with a wider scope than a test as shared."""
    if fixturedef.scope == "function":
        return (yield)
    with sharing():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Records where a test's own count starts."""
    listen()
    if item.config.option.programs and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    item.stash[BEGUN] = _counted - _shared
    result = yield
    stay_below_the_maps_of_a_process()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Records a test of the default run that requested too many programs; in CI it fails."""
    result = yield
    made = _by_test[item.nodeid] = _counted - _shared - item.stash[BEGUN]
    if not {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}:
        for kind, maximum in ((PROGRAMS, MAX_PROGRAMS), (OPERATIONS, MAX_OPERATIONS)):
            if made[kind] > maximum:
                message = f"{made[kind]} {kind}: must compile at most {maximum}: {ADVICE}"
                if os.environ.get("JSPARSE_PROGRAM_BUDGET"):
                    pytest.fail(message, pytrace=False)
                _over_budget[item.nodeid] = message
    return result


def stay_below_the_maps_of_a_process() -> None:
    """Drops compiled programs before they use up the process's memory maps."""
    global _looked
    made = _counted[PROGRAMS] + _counted[OPERATIONS]
    if made - _looked < LOOK_EVERY:
        return
    _looked = made
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        sys.modules["jax"].clear_caches()


def pytest_sessionfinish(session):
    """Sends a worker's counts to the process that prints them; that process trims the cache."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = dict(_counted)
        by_test = {test: dict(made) for test, made in _by_test.items()}
        session.config.workeroutput["programs_by_test"] = by_test
        session.config.workeroutput["over_budget"] = _over_budget
        gc.freeze()  # the process ends; looking for garbage in it would take seconds
    else:
        trim(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), MAX_BYTES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Adds up the counts of pytest-xdist's workers."""
    output = getattr(node, "workeroutput", {})
    _of_workers.update(output.get("programs", {}))
    for test, made in output.get("programs_by_test", {}).items():
        _by_test[test] = Counter(made)
    _over_budget.update(output.get("over_budget", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Prints the use of the compilation cache, tests over budget, and --programs most expensive
    ones.
    """
    total = _counted + _of_workers
    if total[PROGRAMS] or total[OPERATIONS]:
        terminalreporter.write_line(
            f"{total[PROGRAMS]} programs and {total[OPERATIONS]} single operations: "
            f"{total[HIT]} from the compilation cache, {total[MISSED]} compiled "
            f"({os.environ['JAX_COMPILATION_CACHE_DIR']})"
        )
    for test, message in sorted(_over_budget.items()):
        terminalreporter.write_line(f"{test}: {message}")
    if config.option.programs:
        dearest = sorted(_by_test, key=lambda test: (-_by_test[test][PROGRAMS], test))
        for test in dearest[:20]:
            made = _by_test[test]
            terminalreporter.write_line(f"{made[PROGRAMS]:4} {made[OPERATIONS]:4} {test}")


def trim(folder: Path, max_bytes: int) -> None:
    """Deletes the least recently used files of a cache until it is small enough."""
    held = []
    for file in folder.glob("*") if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process also trims
            status = file.stat()
            held.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    size = sum(each for _, each, _ in held)
    for _, own, file in sorted(held):
        if size <= max_bytes:
            return
        file.unlink(missing_ok=True)
        size -= own
