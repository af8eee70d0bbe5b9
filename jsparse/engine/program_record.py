"""Defines EngineProgram, all that an engine knows of one of its programs."""

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
    """Describes an answer whose prompt is read alone, to name the programs that it needs.

    Attributes:
        start, end: the first token that is read, and the end of the prompt.
        new_tokens: the most tokens of the answer.
        rows: the rows that it decodes with, itself included.
        choice: how its tokens are chosen.
    """

    start: int
    end: int
    new_tokens: int
    rows: int
    choice: SamplingMode


def no_keys(*_: Any) -> list[ProgramKey]:
    """Returns the keys of a program that is compiled on first use alone."""
    return []


@dataclass(frozen=True)
class EngineProgram:
    """Holds one of an engine's programs: what it computes, and when and how it is compiled.

    Attributes:
        body: the function, `body(spec, slots, *inputs, **static)`. It may also take the model's
            `weights`, and `read_only`, the arrays that programs only read.
        placeholders: returns the inputs, on the host, with which a program of this size changes no
            row; a service takes rows behind the last, which stand for a copy of it.
        keys_of_engine: returns the keys of the programs that an engine of these sizes may run for
            answers whose tokens are chosen in these ways.
        keys_of_request: returns the keys of the programs that one answer needs.
        static: the names of static arguments.
        donates: whether it takes the slots and returns them, as its first result.
        out: OWN or SAME for each result, where the model is spread over several devices.
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
    """Makes an EngineProgram of a function with these static arguments."""

    def made(body: Callable[..., Any]) -> EngineProgram:
        return EngineProgram(
            body, placeholders, keys_of_engine, keys_of_request, static, donates, out
        )

    return made
