"""Carries plans out on the device: dispatches programs, and does not wait for their results.

Where sequences move between device and host memory it waits, so that few copies are on their way.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jsparse.engine.decode_programs import decode, decode_key, service
from jsparse.engine.evict_programs import evict_key
from jsparse.engine.move_programs import MovedGroups, SwappedPages, no_groups, swap_in, swap_out
from jsparse.engine.packing import CHOICES, unpack
from jsparse.engine.prefill_programs import join, prefill, replay, start
from jsparse.engine.program_record import NewRequest
from jsparse.engine.programs import Programs
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import SamplingMode
from jsparse.engine.slots import Slots, neutral
from jsparse.engine.step_plan import Chunk, DecodePlan, Move, PrefillPlan, RowPlan, StepPlan
from jsparse.engine.tail_programs import leave, refill
from jsparse.host_memory import pages as host_pages
from jsparse.host_memory.pages import HostLayers, Leaving, device_sharding, host_sharding
from jsparse.runtime.collecting import NewTokens
from jsparse.runtime.prefill import settle
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.request import Request, knob_rows
from jsparse.runtime.sampling import row_sampling

# copies of parts of a row that are on their way between device and host memory
AT_A_TIME = 8


class PendingResults(NamedTuple):
    """Holds the results of one program, on their way to the host.

    Attributes:
        packed: as in `packing.Packed`; of a chunk that is not the last, any number.
        rows: the sequences, with their rows in `packed` and their steps.
        work: what the program has read, or the steps that it has run.
        dispatched: when it was dispatched, in seconds.
        milliseconds: how long it is expected to take.
    """

    packed: Array
    rows: list[tuple[int, int, int]]
    work: PrefillPlan | DecodePlan
    dispatched: float = 0
    milliseconds: float = 0

    @property
    def ready(self) -> bool:
        """Whether the results are there."""
        return self.packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def steps(self) -> int:
        """The number of steps that the program has run; reading counts as one."""
        return self.work.steps if isinstance(self.work, DecodePlan) else 1


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
        """Allocates the slots; `request_of` returns the request of a sequence's number."""
        self._spec, self._programs, self._request_of = spec, programs, request_of
        self._neutral = {
            rows: jax.device_put(row_sampling([neutral()] * rows, spec.decoder.config.vocab_size))
            for rows in spec.sizes.prefill_rows
        }
        self._slots: Slots = programs.run(start.key())
        # K and V, where they lie in host memory
        self._host: HostLayers = ()
        if spec.sizes.tail_tokens:
            self._host = host_pages.empty_pages(spec.cache)
            programs.lend_pages(self._host)
        # the pages of sequences that are swapped out, in host memory
        self._swapped: dict[int, list[SwappedPages]] = {}
        self._copying: deque[SwappedPages] = deque()

    def warm_up(self, programs: Iterable[ProgramKey]) -> None:
        """Warms programs up with placeholder inputs: on a GPU, first runs take longer.

        Services are left out, since they take a row that is due, whatever it is.
        """
        for key in programs:
            if key.name in (start.name, service.name, swap_out.name, swap_in.name):
                continue
            arguments = self._slots, *self._programs.placeholders(key.name, key.size)
            out = self._programs.run(key, *arguments)
            if key.name == leave.name:  # it took the last row
                self._store(tuple((jnp.full_like(ids, -1), pages) for ids, pages in out))
                continue
            if key.name == prefill.name:
                self._store(out[2])
            self._slots = out if isinstance(out, Slots) else out[0]
        self.settle()

    def run(self, plan: StepPlan) -> list[PendingResults]:
        """Dispatches a plan; returns its pending results."""
        pending = []
        for number in plan.forgotten:
            del self._swapped[number]
        for move in plan.swapped_in:
            self._swap_in(move)
        if plan.prefill is not None:
            pending.append(self._prefill(plan.prefill))
        for move in plan.swapped_out:
            self._swap_out(move)
        if plan.decode is not None:
            pending.append(self._decode(plan.decode))
            if not self._spec.sizes.drafts:  # a round has them within
                self._service(plan.decode.rows)
                self._store_tails(plan.decode.rows)
        # whoever is moved keeps what is needed
        self._copying.clear()
        for results in pending:
            results.packed.copy_to_host_async()
        return pending

    def results(self, pending: PendingResults) -> list[tuple[int, NewTokens, int]]:
        """Returns each sequence that a program decoded for, once its results are there.

        It is followed by its tokens, and by how many were planned.
        """
        packed = np.asarray(pending.packed)
        layers, layer_stats = self._spec.cache.num_layers, self._spec.layer_stats
        return [
            (seq, unpack(packed[:steps, row], layers, layer_stats), steps)
            for seq, row, steps in pending.rows
        ]

    def forget(self) -> None:
        """Releases host memory."""
        self._swapped.clear()
        self._copying.clear()
        self._host = ()
        self._programs.lend_pages(None)

    def settle(self) -> None:
        """Waits for running programs: a process that exits during one is aborted."""
        settle(self._slots, self._host)

    def expect(self, plan: PrefillPlan, live: int) -> None:
        """Has all programs compiled that the first sequence will run, beside `live` - 1 others."""
        chunk = plan.chunks[0]
        request = self._request_of(chunk.seq)
        rows = min(live, self._spec.sizes.num_slots)
        asked = request.sampling.max_tokens, rows, choice_of(request)
        self._programs.expect_request(NewRequest(chunk.start, len(request.ids), *asked))

    def _prefill(self, plan: PrefillPlan) -> PendingResults:
        spec, chunks, size = (
            self._spec,
            plan.chunks,
            (plan.num_rows, plan.size),
        )
        of_chunks = [self._request_of(chunk.seq) for chunk in chunks]
        tokens, asked = prefill.placeholders(spec, size)
        for row, (chunk, request) in enumerate(zip(chunks, of_chunks, strict=True)):
            tokens[row, : chunk.valid] = request.ids[chunk.start : chunk.start + chunk.valid]
            asked.groups[row, : len(chunk.groups)] = chunk.groups
            of_row = (chunk.slot, chunk.place, chunk.fresh, chunk.start, chunk.valid)
            for column, value in zip(asked[:-1], of_row, strict=True):
                column[row] = value
        key = replay.key(*size) if plan.replay else prefill.key(*size, last=plan.last)
        self._slots, done, leaving = self._programs.run(key, self._slots, tokens, asked)
        self._store(leaving)
        if not plan.last:
            return PendingResults(done, [], plan)
        for chunk in chunks:
            if chunk.kept:
                self._evict(chunk)
            if self._host:
                which = np.array([chunk.slot], np.int32)
                self._slots = self._programs.run(refill.key(1), self._slots, which)
        neutral_rows = [neutral()] * (plan.num_rows - len(chunks))
        choice = self.sampling_mode([chunk.seq for chunk in chunks])
        key = self._programs.usable(join.key(plan.num_rows, choice=choice))
        sampling = self._neutral[plan.num_rows]
        if dict(key.static)["choice"] != "greedy":
            sampling = row_sampling([*of_chunks, *neutral_rows], spec.decoder.config.vocab_size)
        knobs = knob_rows([*of_chunks, *neutral_rows], spec.knobs)
        self._slots, packed = self._programs.run(key, self._slots, asked.slots, sampling, knobs)
        firsts = [(chunk.seq, row, 1) for row, chunk in enumerate(chunks)]
        return PendingResults(packed, firsts, plan)

    def _store(self, leaving: tuple[Leaving, ...]) -> None:
        """Writes pages into host memory."""
        if leaving:
            self._host = host_pages.put(self._host, leaving)
            self._programs.lend_pages(self._host)

    def _store_tails(self, rows: list[RowPlan]) -> None:
        """Writes the newest tokens of the rows that are due into host memory."""
        every = self._spec.sizes.tail_tokens
        for row in rows:
            if every and row.age % every == 0:
                which = np.array([row.slot], np.int32)
                self._store(self._programs.run(leave.key(1), self._slots, which))

    def _swap_out(self, move: Move) -> None:
        """Copies the pages of a row to host memory."""
        parts: list[SwappedPages] = []
        for moved in self._moved(move):
            part = self._programs.run(swap_out.key(1), self._slots, moved)
            parts.append(jax.device_put(part, host_sharding()))
            self._copying.append(parts[-1])
        self._swapped[move.seq] = parts

    def _swap_in(self, move: Move) -> None:
        """Copies the pages of a row back, into other groups."""
        place = device_sharding()
        copies = (jax.device_put(part, place) for part in self._swapped.pop(move.seq))
        coming = next(copies)
        for moved in self._moved(move):
            # a copy waits for what the device was given before it: the next one goes first
            part, coming = coming, next(copies, coming)
            self._slots = self._programs.run(swap_in.key(1), self._slots, moved, part)
            self._copying.append(part)

    def _moved(self, move: Move) -> Iterator[MovedGroups]:
        """Returns the groups of a row, as many at a time as a program takes."""
        size = self._spec.sizes.moved_groups
        for nth, groups in enumerate(itertools.batched(move.groups, size)):
            if len(self._copying) >= AT_A_TIME:  # the device has a copy of each
                jax.block_until_ready(self._copying.popleft())
            (moved,) = no_groups(self._spec)
            moved.slots[0], moved.first[0] = move.slot, move.first + nth * size
            moved.groups[0, : len(groups)] = groups
            yield moved

    def _evict(self, chunk: Chunk) -> None:
        """Lets the policy compress a prompt that ends with this chunk."""
        prompt = chunk.start + chunk.valid
        key = evict_key(self._spec.sizes, prompt)
        asked, _ = self._programs.placeholders(key.name, key.size)
        asked.slots[0], asked.places[0], asked.lengths[0] = chunk.slot, chunk.place, prompt
        asked.groups[0, : len(chunk.groups)] = chunk.groups
        asked.kept[0, : len(chunk.kept)] = chunk.kept
        knobs = knob_rows([self._request_of(chunk.seq)], self._spec.knobs)
        self._slots = self._programs.run(key, self._slots, asked, knobs)

    def _decode(self, plan: DecodePlan) -> PendingResults:
        num_rows, rows, sizes = plan.num_rows, plan.rows, self._spec.sizes
        size = num_rows, *(sizes.prefixes(num_rows) if plan.prefixes else ())
        (asked,) = decode.placeholders(self._spec, size)
        # a program of all rows has them in their order; in others the unused ones are the last
        in_order = num_rows == sizes.num_slots
        at = {row.slot: row.slot if in_order else nth for nth, row in enumerate(rows)}
        for row in rows:
            nth = at[row.slot]
            asked.slots[nth], asked.counts[nth] = row.slot, row.steps
            if row.groups:
                asked.first[nth], asked.groups[nth, : len(row.groups)] = row.first, row.groups
        for nth, prefix in enumerate(plan.prefixes):
            members = [at[slot] for slot in prefix.slots]
            asked.prefixes.rows[nth, : len(members)] = members
            asked.prefixes.tokens[nth] = prefix.tokens
        choice = self.sampling_mode(row.seq for row in rows)
        key = self._programs.usable(decode_key(choice, *size, drafts=plan.drafts))
        self._slots, packed = self._programs.run(key, self._slots, asked)
        results = [(row.seq, at[row.slot], row.steps) for row in rows]
        return PendingResults(packed, results, plan)

    def sampling_mode(self, seqs: Iterable[int]) -> SamplingMode:
        """Returns the cheapest way of choosing tokens that all of these sequences allow."""
        wanted = {choice_of(self._request_of(seq)) for seq in seqs}
        modes: list[SamplingMode] = [mode for mode in CHOICES if mode in wanted]
        return modes[-1]

    def _service(self, rows: list[RowPlan]) -> None:
        """Corrects and maintains the rows that are due, some at a time."""
        size = self._spec.sizes.service_rows
        for name, every in self._spec.policy.services.every.items():
            due = [row.slot for row in rows if row.age % every == 0]
            for part in itertools.batched(due, size):
                # served twice by one program, a row stays as it is, if its tokens do not move
                filler = self._spec.sizes.num_slots if self._spec.policy.evicts else part[0]
                which = np.array([*part, *[filler] * (size - len(part))], np.int32)
                key = service.key(size, service=name)
                self._slots = self._programs.run(key, self._slots, which)
