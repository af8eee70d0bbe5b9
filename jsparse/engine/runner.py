"""Carries plans out on the device: dispatches programs, and never waits for their results."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jsparse.engine.packing import TokenResult, unpack
from jsparse.engine.program_keys import SamplingMode
from jsparse.engine.programs import CHOICES, Programs
from jsparse.engine.setup import EngineSpec
from jsparse.engine.slots import OpenPrompt, Slots, neutral
from jsparse.engine.step_plan import Chunk, Decode, StepPlan
from jsparse.runtime.pauses import due
from jsparse.runtime.prefill import settle
from jsparse.runtime.request import Request, knob_row
from jsparse.runtime.sampling import RowSampling, row_sampling


class PendingResults(NamedTuple):
    """Holds the results of one program, on their way to the host.

    Attributes:
        packed: as in `packing.Packed`; of a chunk that is not the last, any number.
        rows: the answers, with their rows in `packed` and their steps.
        steps: the number of steps of the program.
    """

    packed: Array
    rows: list[tuple[int, int, int]]
    steps: int = 1


def choice_of(request: Request) -> SamplingMode:
    """Returns the cheapest way of choosing tokens that a request allows."""
    if request.sampling.logprobs:
        return "top"
    return "greedy" if request.sampling.greedy else "sampled"


class Runner:
    """Holds the device's arrays, and carries out plans in their order."""

    def __init__(
        self, spec: EngineSpec, programs: Programs, request_of: Callable[[int], Request]
    ) -> None:
        """Allocates the slots; `request_of` returns the request of an answer's number."""
        self._spec, self._programs, self._request_of = spec, programs, request_of
        self._scratch = spec.cache.pages // spec.cache.num_kv_heads - 1
        self._neutral = jax.device_put(row_sampling([neutral()], spec.vocab_size))
        self._batch: Slots = programs.run("start")
        self._prompts: dict[int, OpenPrompt] = {}

    def run(self, plan: StepPlan) -> list[PendingResults]:
        """Dispatches a plan; returns its pending results."""
        pending = []
        for number in plan.ended:
            self._prompts.pop(number, None)
        if plan.chunk is not None:
            alone = all(row.answer == plan.chunk.answer for row in plan.rows)
            if alone and plan.chunk.fresh and not plan.chunk.replay:
                self._expect(plan.chunk)
            pending += self._read(plan.chunk)
        if plan.rows:
            pending.append(self._decode(plan.steps, plan.rows))
            self._service(plan.rows)
        for results in pending:
            results.packed.copy_to_host_async()
        return pending

    def results(self, pending: PendingResults) -> list[tuple[int, list[TokenResult]]]:
        """Returns each answer that a program decoded for, with its tokens, once they are there."""
        packed = np.asarray(pending.packed)
        return [
            (answer, [self._unpacked(packed[nth, row]) for nth in range(steps)])
            for answer, row, steps in pending.rows
        ]

    def _unpacked(self, row: np.ndarray) -> TokenResult:
        return unpack(row, self._spec.cache.num_layers, self._spec.layer_stats)

    def settle(self) -> None:
        """Waits for running programs: a process that exits during one is aborted."""
        settle(self._batch, list(self._prompts.values()))

    def _expect(self, chunk: Chunk) -> None:
        """Has all programs compiled that an answer which is alone will run."""
        request = self._request_of(chunk.answer)
        self._programs.expect_answer(
            chunk.start,
            end=len(request.ids),
            new_tokens=request.sampling.max_tokens,
            slot=chunk.slot,
            choice=choice_of(request),
        )

    def _read(self, chunk: Chunk) -> list[PendingResults]:
        request = self._request_of(chunk.answer)
        if chunk.fresh:
            self._prompts[chunk.answer] = self._programs.run("begin")
        tokens = np.zeros((1, chunk.size), np.int32)
        tokens[0, : chunk.valid] = request.ids[chunk.start : chunk.start + chunk.valid]
        groups = np.full(self._spec.cache.num_pages, self._scratch, np.int32)
        groups[: len(chunk.groups)] = chunk.groups
        name, static = ("replay", {}) if chunk.replay else ("read", {"last": chunk.last})
        self._batch, prompt, done = self._programs.run(
            name,
            self._batch,
            self._prompts.pop(chunk.answer),
            tokens,
            groups,
            np.int32(chunk.start),
            np.int32(chunk.valid),
            size=chunk.size,
            **static,
        )
        if not chunk.last:
            self._prompts[chunk.answer] = prompt
            return [PendingResults(done, [])]
        choice = choice_of(request)
        self._batch, packed = self._programs.run(
            "join",
            self._batch,
            prompt,
            np.int32(chunk.slot),
            groups,
            np.int32(chunk.start + chunk.valid),
            self._neutral if choice == "greedy" else self._sampling(request),
            knob_row(request, self._spec.knobs),
            choice=choice,
        )
        return [PendingResults(packed, [(chunk.answer, 0, 1)])]

    def _decode(self, steps: int, rows: list[Decode]) -> PendingResults:
        counts = np.zeros(self._spec.sizes.rows_for(max(row.slot for row in rows)), np.int32)
        for row in rows:
            counts[row.slot] = row.steps
        wanted = {choice_of(self._request_of(row.answer)) for row in rows}
        self._batch, packed = self._programs.run(
            "decode",
            self._batch,
            counts,
            size=len(counts),
            count=steps,
            choice=max(wanted, key=[*CHOICES].index),
        )
        return PendingResults(packed, [(row.answer, row.slot, row.steps) for row in rows], steps)

    def _service(self, rows: list[Decode]) -> None:
        """Corrects and maintains the rows that are due, one by one."""
        for row in rows:
            for name in due(self._spec.policy.services.every, row.age):
                self._batch = self._programs.run(
                    "service", self._batch, np.int32(row.slot), service=name
                )

    def _sampling(self, request: Request) -> RowSampling:
        return row_sampling([request], self._spec.vocab_size)
