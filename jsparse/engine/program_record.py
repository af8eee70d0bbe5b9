"""Defines EngineProgram, the description of one of an engine's programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes, SamplingMode
from jsparse.policy import Policy
from jsparse.runtime.compilation import Program, program
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.spread_programs import SHARDED


class NewRequest(NamedTuple):
    """A sequence whose prompt is prefilled alone, for finding the programs that it needs.

    Attributes:
        start, end: the first token to prefill, and the end of the prompt.
        new_tokens: the most tokens of its completion.
        rows: the number of rows that decode with it, itself included.
        choice: its sampling mode.
        scored: whether it wants the log-probabilities of its prompt.
    """

    start: int
    end: int
    new_tokens: int
    rows: int
    choice: SamplingMode
    scored: bool = False


def no_keys(*_: Any) -> list[ProgramKey]:
    """Returns no keys, for a program that is compiled on first use."""
    return []


@dataclass(frozen=True)
class EngineProgram:
    """One of an engine's programs: its function, and when and how it is compiled.

    Attributes:
        body: the function, `body(spec, slots, *inputs, **static)`. It may also take the model's
            `weights`, and `read_only`, the arrays that programs only read.
        placeholders: returns inputs, on the host, with which a program of this size changes no row.
            The rows of a service are then past the last row, and stand for copies of it.
        keys_of_engine: returns the keys of the programs that an engine of these sizes may run for
            sequences with these sampling modes.
        keys_of_request: returns the keys of the programs that one sequence needs.
        static: the names of static arguments.
        donates: whether it takes the slots and returns them, as its first result.
        out: SHARDED or REPLICATED for each result, if the model is spread over several devices.
    """

    body: Callable[..., Any]
    placeholders: Callable[[EngineSpec, tuple[int, ...]], tuple[Any, ...]]
    keys_of_engine: Callable[[EngineSizes, Policy, Sequence[SamplingMode]], list[ProgramKey]]
    keys_of_request: Callable[[EngineSizes, NewRequest], list[ProgramKey]]
    static: tuple[str, ...]
    donates: bool
    out: Any

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.body.__name__

    def key(self, *size: int, **static: Any) -> ProgramKey:
        """Returns the key of the program with these sizes and static arguments."""
        return ProgramKey.of(self.name, *size, **static)

    def compiled_for(self, spec: EngineSpec) -> Program:
        """Returns the program of an engine, on all ranks if its model is spread over several."""
        options: dict[str, Any] = {"donate_argnames": "slots"} if self.donates else {}
        options |= {"sharded": ("slots", "weights"), "out": self.out}
        body = partial(self.body, spec)
        return program(body, static_argnames=self.static, **options).on(spec.deployment.params.mesh)


def engine_program(
    *static: str,
    placeholders: Callable[[EngineSpec, tuple[int, ...]], tuple[Any, ...]],
    keys_of_engine: Callable[..., list[ProgramKey]] = no_keys,
    keys_of_request: Callable[..., list[ProgramKey]] = no_keys,
    donates: bool = True,
    out: Any = SHARDED,
) -> Callable[[Callable[..., Any]], EngineProgram]:
    """Returns a decorator that makes an EngineProgram of a function with these static arguments."""

    def decorate(body: Callable[..., Any]) -> EngineProgram:
        return EngineProgram(
            body, placeholders, keys_of_engine, keys_of_request, static, donates, out
        )

    return decorate
