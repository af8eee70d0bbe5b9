"""Carries plans out on the device: dispatches programs, and never waits for their results."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jsparse.cache import SharedPrefixes
from jsparse.engine.packing import NewTokens, unpack
from jsparse.engine.program_keys import SamplingMode
from jsparse.engine.programs import CHOICES, Programs
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import MAX_READING
from jsparse.engine.slots import ReadRows, Slots, neutral
from jsparse.engine.step_plan import Decode, Decoding, Reading, StepPlan
from jsparse.runtime.prefill import settle
from jsparse.runtime.request import Request, knob_rows
from jsparse.runtime.sampling import row_sampling


class PendingResults(NamedTuple):
    """Holds the results of one program, on their way to the host.

    Attributes:
        packed: as in `packing.Packed`; of a chunk that is not the last, any number.
        rows: the answers, with their rows in `packed` and their steps.
        work: what the program has read, or the steps that it has run.
        dispatched: when it was dispatched, in seconds.
        milliseconds: how long it is expected to take.
    """

    packed: Array
    rows: list[tuple[int, int, int]]
    work: Reading | Decoding
    dispatched: float = 0
    milliseconds: float = 0

    @property
    def steps(self) -> int:
        """The number of steps that the program has run; reading counts as one."""
        return self.work.steps if isinstance(self.work, Decoding) else 1


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
        self._neutral = {
            rows: jax.device_put(row_sampling([neutral()] * rows, spec.vocab_size))
            for rows in spec.sizes.prefill_rows
        }
        self._slots: Slots = programs.run("start")

    def run(self, plan: StepPlan) -> list[PendingResults]:
        """Dispatches a plan; returns its pending results."""
        pending = []
        if plan.reading is not None:
            pending.append(self._read(plan.reading))
        if plan.decoding is not None:
            pending.append(self._decode(plan.decoding))
            self._service(plan.decoding.rows)
        for results in pending:
            results.packed.copy_to_host_async()
        return pending

    def results(self, pending: PendingResults) -> list[tuple[int, NewTokens]]:
        """Returns each answer that a program decoded for, with its tokens, once they are there."""
        packed = np.asarray(pending.packed)
        layers, layer_stats = self._spec.cache.num_layers, self._spec.layer_stats
        return [
            (answer, unpack(packed[:steps, row], layers, layer_stats))
            for answer, row, steps in pending.rows
        ]

    def settle(self) -> None:
        """Waits for running programs: a process that exits during one is aborted."""
        settle(self._slots)

    def expect(self, reading: Reading, live: int) -> None:
        """Has all programs compiled that the first answer will run, beside `live` - 1 others."""
        chunk = reading.chunks[0]
        request = self._request_of(chunk.answer)
        self._programs.expect_answer(
            chunk.start,
            end=len(request.ids),
            new_tokens=request.sampling.max_tokens,
            rows=min(live, self._spec.sizes.num_slots),
            choice=choice_of(request),
        )

    def _read(self, reading: Reading) -> PendingResults:
        spec, chunks = self._spec, reading.chunks
        of_chunks = [self._request_of(chunk.answer) for chunk in chunks]
        tokens = np.zeros((reading.num_rows, reading.size), np.int32)
        # rows beyond the chunks lie behind the last slot and the last place
        columns: dict[str, Any] = {
            "slots": np.full(reading.num_rows, spec.sizes.num_slots, np.int32),
            "places": np.full(reading.num_rows, MAX_READING, np.int32),
            "fresh": np.zeros(reading.num_rows, np.bool_),
            "start": np.zeros(reading.num_rows, np.int32),
            "valid": np.zeros(reading.num_rows, np.int32),
        }
        groups = np.full((reading.num_rows, spec.cache.num_pages), self._scratch, np.int32)
        for row, (chunk, request) in enumerate(zip(chunks, of_chunks, strict=True)):
            tokens[row, : chunk.valid] = request.ids[chunk.start : chunk.start + chunk.valid]
            groups[row, : len(chunk.groups)] = chunk.groups
            of_row = (chunk.slot, chunk.place, chunk.fresh, chunk.start, chunk.valid)
            for column, value in zip(columns.values(), of_row, strict=True):
                column[row] = value
        name, static = ("replay", {}) if reading.replay else ("read", {"last": reading.last})
        asked = ReadRows(**columns, groups=groups)  # pyright: ignore[reportArgumentType]
        self._slots, done = self._programs.run(
            name, self._slots, tokens, asked, size=tokens.shape, **static
        )
        if not reading.last:
            return PendingResults(done, [], reading)
        neutral_rows = [neutral()] * (reading.num_rows - len(chunks))
        choice = self._choice("join", reading.num_rows, [chunk.answer for chunk in chunks])
        sampling = self._neutral[reading.num_rows]
        if choice != "greedy":
            sampling = row_sampling([*of_chunks, *neutral_rows], spec.vocab_size)
        self._slots, packed = self._programs.run(
            "join",
            self._slots,
            asked.slots,
            sampling,
            knob_rows([*of_chunks, *neutral_rows], spec.knobs),
            size=(reading.num_rows,),
            choice=choice,
        )
        firsts = [(chunk.answer, row, 1) for row, chunk in enumerate(chunks)]
        return PendingResults(packed, firsts, reading)

    def _decode(self, decoding: Decoding) -> PendingResults:
        slots, num_rows = self._spec.sizes.num_slots, decoding.num_rows
        rows = [row.slot for row in decoding.rows]
        # a program of all rows has them in their order; others have unused ones behind the last
        at = rows if num_rows == slots else [*range(len(rows))]
        which = np.arange(slots) if num_rows == slots else np.full(num_rows, slots)
        counts = np.zeros(num_rows, np.int32)
        which[at], counts[at] = rows, [row.steps for row in decoding.rows]
        # behind the last group of a row, where nothing is written
        first = np.full(num_rows, self._spec.cache.num_pages, np.int32)
        groups = np.full((num_rows, self._spec.sizes.growth), self._scratch, np.int32)
        for nth, row in zip(at, decoding.rows, strict=True):
            if row.groups:
                first[nth], groups[nth, : len(row.groups)] = row.first, row.groups
        prefixes = self._prefixes(decoding, dict(zip(rows, at, strict=True)))
        self._slots, packed = self._programs.run(
            "decode",
            self._slots,
            which.astype(np.int32),
            counts,
            first,
            groups,
            prefixes,
            size=(num_rows, *(prefixes.rows.shape if prefixes else ())),
            choice=self._choice("decode", num_rows, [row.answer for row in decoding.rows]),
        )
        results = [(row.answer, nth, row.steps) for nth, row in zip(at, decoding.rows, strict=True)]
        return PendingResults(packed, results, decoding)

    def _prefixes(self, decoding: Decoding, row_of: dict[int, int]) -> SharedPrefixes | None:
        """Returns what rows have in common, in the numbers that a program has for slots."""
        if not decoding.families:
            return None
        num_rows, shape = decoding.num_rows, self._spec.sizes.families(decoding.num_rows)
        rows, tokens = np.full(shape, num_rows, np.int32), np.zeros(shape[0], np.int32)
        for nth, family in enumerate(decoding.families):
            rows[nth, : len(family.slots)] = [row_of[slot] for slot in family.slots]
            tokens[nth] = family.tokens
        return SharedPrefixes(rows, tokens)  # pyright: ignore[reportArgumentType]

    def _choice(self, name: str, rows: int, answers: Iterable[int]) -> SamplingMode:
        """Returns the cheapest way of choosing tokens that all of these answers allow."""
        wanted = {choice_of(self._request_of(answer)) for answer in answers}
        modes: list[SamplingMode] = [mode for mode in CHOICES if mode in wanted]
        return self._programs.usable_choice(name, rows, modes[-1])

    def _service(self, rows: list[Decode]) -> None:
        """Corrects and maintains the rows that are due, some at a time."""
        size = self._spec.sizes.service_rows
        for name, every in self._spec.policy.services.every.items():
            due = [row.slot for row in rows if row.age % every == 0]
            for part in itertools.batched(due, size):
                # a row may be served twice by one program, which changes nothing
                which = np.array([*part, *part[:1] * (size - len(part))], np.int32)
                self._slots = self._programs.run(
                    "service", self._slots, which, size=(size,), service=name
                )
