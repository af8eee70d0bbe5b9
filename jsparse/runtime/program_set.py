"""Compiles a known set of programs ahead of their first use, several at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from functools import partial
from typing import Any, NamedTuple

from jsparse.runtime.compilation import Program


class ProgramKey(NamedTuple):
    """The key of a program: its function, the sizes of its shapes, its static arguments."""

    name: str
    size: tuple[int, ...] = ()
    static: frozenset[tuple[str, Any]] = frozenset()

    @classmethod
    def of(cls, name: str, *size: int, **static: Any) -> "ProgramKey":
        """Returns the key of a function's program with these sizes and static arguments."""
        return cls(name, size, frozenset(static.items()))


logger = logging.getLogger("jsparse.runtime")
# seconds between log lines while programs compile
LOG_SECONDS = 10


class ProgramSet:
    """Programs that are each compiled for a few sizes and static arguments.

    Compiled programs refuse other shapes, so none is traced again.

    Attributes:
        seconds: the time that callers have waited for compilation.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        fixed: Mapping[str, Any],
        arguments: Callable[[str, tuple[int, ...]], tuple[Any, ...]],
    ) -> None:
        """Sets up the programs; nothing is compiled.

        Args:
            programs: the programs, by name.
            fixed: arguments that never change, by name; a program receives those that it has.
            arguments: returns the shapes of a program's other arguments, given its name and size.
        """
        self._programs, self._arguments = programs, arguments
        self._fixed = {name: made.among(fixed) for name, made in programs.items()}
        self._given = {name: dict(own) for name, own in self._fixed.items()}
        self._made: dict[ProgramKey, Future[Callable[..., Any]]] = {}
        self.seconds = 0.0

    @property
    def compiled(self) -> int:
        """The number of compiled programs."""
        return sum(job.done() for job in list(self._made.values()))

    @property
    def compiling(self) -> bool:
        """Whether any program is being compiled or loaded from disk."""
        return self.compiled < len(self._made)

    def ready(self, wanted: ProgramKey) -> bool:
        """Returns whether a program is compiled, without an error."""
        job = self._made.get(wanted)
        return job is not None and job.done() and not job.cancelled() and job.exception() is None

    def run(self, wanted: ProgramKey, *arrays: Any) -> Any:
        """Runs a program, and compiles it first if necessary."""
        if not self.ready(wanted):
            began = time.perf_counter()
            self.expect([wanted])
            self._made[wanted].result()
            self.seconds += time.perf_counter() - began
        return self._made[wanted].result()(*arrays, **self._given[wanted.name])

    def lend(self, name: str, value: Any) -> None:
        """Replaces a fixed argument of the programs by another of the same shapes."""
        for given in self._given.values():
            if name in given:
                given[name] = value

    def replace(self, **values: Any) -> None:
        """Replaces fixed arguments by others of the same shapes, for all programs to come also."""
        for of_programs in (self._fixed, self._given):
            for given in of_programs.values():
                given |= {name: value for name, value in values.items() if name in given}

    def expect(self, wanted: Iterable[ProgramKey]) -> None:
        """Starts compiling those programs that are not compiled yet, and returns at once."""
        for each in wanted:
            if each not in self._made:
                program = self._programs[each.name]
                job = program.ahead(*self._shapes(each), **self._named(each))
                self._made[each] = job
                job.add_done_callback(partial(_log_error, each))

    def adopt(self, given: ProgramKey, data: bytes) -> None:
        """Adds a program that another process has compiled."""
        program, job = self._programs[given.name], Future[Callable[..., Any]]()
        job.set_result(program.unpacked(data, *self._shapes(given), **self._named(given)))
        self._made[given] = job

    def _shapes(self, wanted: ProgramKey) -> tuple[Any, ...]:
        return self._arguments(wanted.name, wanted.size)

    def _named(self, wanted: ProgramKey) -> dict[str, Any]:
        return self._fixed[wanted.name] | dict(wanted.static)

    def compile(self, wanted: Iterable[ProgramKey], logger: logging.Logger) -> list[ProgramKey]:
        """Compiles programs and waits for them; an interrupt does not wait for the rest.

        Returns the newly requested ones.
        """
        wanted = [*wanted]
        new = [each for each in wanted if each not in self._made]
        self.expect(new)
        began, jobs = time.perf_counter(), {self._made[each] for each in wanted}
        pending = {job for job in jobs if not job.done()}
        try:
            while pending:
                seconds, ready = time.perf_counter() - began, len(jobs) - len(pending)
                logger.info("compiling: %d of %d programs ready, %.0f s", ready, len(jobs), seconds)
                _, pending = wait(pending, LOG_SECONDS, return_when=FIRST_EXCEPTION)
                for job in jobs - pending:
                    job.result()
            for job in jobs:
                job.result()
        except BaseException:
            for each in new:
                if self._made[each].cancel():
                    del self._made[each]
            raise
        return new


def _log_error(key: ProgramKey, job: Future[Callable[..., Any]]) -> None:
    """Logs that a program cannot be compiled; callers that need it also get the error."""
    error = None if job.cancelled() else job.exception()
    if error is not None and not isinstance(error, CancelledError):
        logger.warning("%s cannot be compiled: %r", key, error)
