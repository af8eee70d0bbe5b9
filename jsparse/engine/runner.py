"""Dispatches plans to the device, and does not wait for their results.

It waits only for copies of blocks, to limit the number in flight.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jsparse.engine.blocks import Copy
from jsparse.engine.constraint_programs import constrain, rows_at_once
from jsparse.engine.copy_programs import (
    Groups,
    PackedBlock,
    copy_in,
    copy_out,
    no_groups,
    no_row,
    resume,
)
from jsparse.engine.decode_programs import decode, decode_key, service
from jsparse.engine.evict_programs import evict_key
from jsparse.engine.packing import CHOICES, unpack, unpack_scores
from jsparse.engine.prefill_programs import join, prefill, replay, start
from jsparse.engine.program_record import NewRequest
from jsparse.engine.programs import Programs
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import SamplingMode
from jsparse.engine.slots import Slots, neutral
from jsparse.engine.step_plan import Chunk, DecodePlan, PrefillPlan, Resumed, RowPlan, StepPlan
from jsparse.engine.tail_programs import leave, refill
from jsparse.host_memory import pages as host_pages
from jsparse.host_memory.pages import HostLayers, Leaving, device_sharding, host_sharding
from jsparse.runtime.collecting import NewTokens, OutputBuilder, PromptScores
from jsparse.runtime.constraint import allowed
from jsparse.runtime.prefill import settle
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.request import Request, knob_rows
from jsparse.runtime.sampling import row_sampling

# the most copies of blocks that are in flight between device and host memory
AT_A_TIME = 8


class PendingResults(NamedTuple):
    """The results of one program, in flight to the host.

    Attributes:
        packed: as in `packing.Packed`; for a chunk that is not its prompt's last, any numbers.
        rows: the sequences, with their rows in `packed` and their steps.
        work: the plan of the program.
        scores: the log-probabilities of a chunk's tokens, as `packing.pack_scores` returns them;
            None: no sequence wants them.
        scored: the sequences that want them, with their rows in `scores` and their tokens.
        dispatched: when its dispatch began, in seconds, after any compilation.
        milliseconds: its expected time.
        delayed: whether it waits for blocks that come back from host memory.
    """

    packed: Array
    rows: list[tuple[int, int, int]]
    work: PrefillPlan | DecodePlan
    scores: Array | None = None
    scored: Sequence[tuple[int, int, int]] = ()
    dispatched: float = 0
    milliseconds: float = 0
    delayed: bool = False

    @property
    def ready(self) -> bool:
        """Whether the results are ready."""
        return self.packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def steps(self) -> int:
        """The number of steps of the program; a prefill program counts as one."""
        return self.work.steps if isinstance(self.work, DecodePlan) else 1


def choice_of(request: Request) -> SamplingMode:
    """Returns the cheapest sampling mode that a request allows."""
    if request.sampling.logprobs:
        return "top"
    return "greedy" if request.sampling.greedy else "sampled"


class Runner:
    """The device's arrays; plans are run on them in order."""

    def __init__(
        self, spec: EngineSpec, programs: Programs, output_of: Callable[[int], OutputBuilder]
    ) -> None:
        """Allocates the slots; `output_of` returns the output of a sequence, by its number."""
        self._spec, self._programs, self._output_of = spec, programs, output_of
        self._neutral = {
            rows: jax.device_put(row_sampling([neutral()] * rows, spec.decoder.config.vocab_size))
            for rows in spec.sizes.prefill_rows
        }
        # the blocks in host memory, by place
        self._blocks: dict[int, PackedBlock] = {}
        self._copying: deque[PackedBlock] = deque()
        self.allocate()

    def allocate(self) -> None:
        """Allocates empty slots, and K and V in host memory if they belong there."""
        self._slots: Slots = self._programs.run(start.key())
        self._host: HostLayers = ()
        if self._spec.sizes.tail_tokens:
            self._host = host_pages.empty_pages(self._spec.cache)
            self._programs.lend_pages(self._host)

    def free(self) -> None:
        """Frees the slots, and host memory; no program may run until `allocate`."""
        for array in jax.tree.leaves(self._slots):
            array.delete()
        self.forget()

    def warm_up(self, programs: Iterable[ProgramKey]) -> None:
        """Warms programs up with placeholder inputs: on a GPU, first runs take longer.

        Services are left out, since they treat every row in their inputs as due.
        """
        for key in programs:
            if key.name in (start.name, service.name, copy_out.name, copy_in.name):
                continue
            arguments = self._slots, *self._programs.placeholders(key.name, key.size)
            out = self._programs.run(key, *arguments)
            if key.name == leave.name:  # it read the last row
                self._store(tuple((jnp.full_like(ids, -1), pages) for ids, pages in out))
                continue
            if key.name == prefill.name:
                self._store(out[2])
            self._slots = out if isinstance(out, Slots) else out[0]
        self.settle()

    def run(self, plan: StepPlan) -> list[PendingResults]:
        """Dispatches a plan; returns its pending results."""
        pending = []
        self._copy(plan.copies)
        for row in plan.resumed:
            self._resume(row)
        if plan.prefill is not None:
            pending.append(self._prefill(plan.prefill))
        self._copy(plan.late_copies)
        if plan.decode is not None:
            pending.append(self._decode(plan.decode))
            if not self._spec.sizes.drafts:  # a verification round includes its services
                self._service(plan.decode.rows)
                self._store_tails(plan.decode.rows)
        self._copying.clear()  # those to host memory are in `_blocks`
        if not all(copy.out for copy in plan.copies):
            pending[:1] = [each._replace(delayed=True) for each in pending[:1]]
        for results in pending:
            results.packed.copy_to_host_async()
            if results.scores is not None:
                results.scores.copy_to_host_async()
        return pending

    def results(self, pending: PendingResults) -> list[tuple[int, NewTokens, int]]:
        """Waits for a program's results; returns its sequences, with tokens and planned steps."""
        packed = np.asarray(pending.packed)
        layers, layer_stats = self._spec.cache.num_layers, self._spec.layer_stats
        return [
            (seq, unpack(packed[:steps, row], layers, layer_stats), steps)
            for seq, row, steps in pending.rows
        ]

    def prompt_scores(self, pending: PendingResults) -> list[tuple[int, PromptScores]]:
        """Waits for the log-probabilities of a chunk's tokens; returns them by sequence."""
        scores = np.asarray(pending.scores) if pending.scored else np.zeros(0)
        return [(seq, unpack_scores(scores[:count, row])) for seq, row, count in pending.scored]

    def _wants_scores(self, seq: int) -> bool:
        output = self._output_of(seq)
        return output.index == 0 and output.request.sampling.prompt_logprobs is not None

    def forget(self) -> None:
        """Releases host memory."""
        self._blocks.clear()
        self._copying.clear()
        self._host = ()
        self._programs.lend_pages(None)

    def settle(self) -> None:
        """Waits for running programs: a process that exits during one is aborted."""
        settle(self._slots, self._host)

    def expect(self, plan: PrefillPlan, live: int) -> None:
        """Starts to compile all programs that the first sequence will run in a batch of `live`."""
        chunk = plan.chunks[0]
        request = self._request_of(chunk.seq)
        rows = min(live, self._spec.sizes.num_slots)
        scored = request.sampling.prompt_logprobs is not None
        rest = request.sampling.max_tokens, rows, choice_of(request), scored
        self._programs.expect_request(NewRequest(chunk.start, len(request.ids), *rest))

    def _prefill(self, plan: PrefillPlan) -> PendingResults:
        spec, chunks, size = (
            self._spec,
            plan.chunks,
            (plan.num_rows, plan.size),
        )
        of_chunks = [self._request_of(chunk.seq) for chunk in chunks]
        tokens, inputs = prefill.placeholders(spec, size)
        for row, (chunk, request) in enumerate(zip(chunks, of_chunks, strict=True)):
            tokens[row, : chunk.valid] = request.ids[chunk.start : chunk.start + chunk.valid]
            inputs.groups[row, : len(chunk.groups)] = chunk.groups
            of_row = (chunk.slot, chunk.place, chunk.fresh, chunk.start, chunk.valid)
            for column, value in zip(inputs[:-1], of_row, strict=True):
                column[row] = value
        wanting = [
            (chunk.seq, row, chunk.valid)
            for row, chunk in enumerate(chunks)
            if self._wants_scores(chunk.seq) and not plan.replay
        ]
        scored = len(wanting) > 0
        key = prefill.key(*size, last=plan.last, scored=scored)
        if plan.replay:
            key = replay.key(*size)
        self._slots, done, leaving = self._programs.run(key, self._slots, tokens, inputs)
        self._store(leaving)
        scores = (done if scored else None), wanting
        if not plan.last:
            return PendingResults(done, [], plan, *scores)
        for chunk in chunks:
            if chunk.kept:
                self._evict(chunk)
            if self._host:
                which = np.array([chunk.slot], np.int32)
                self._slots = self._programs.run(refill.key(1), self._slots, which)
        neutral_rows = [neutral()] * (plan.num_rows - len(chunks))
        choice = self.sampling_mode([chunk.seq for chunk in chunks])
        key = self._programs.usable(join.key(plan.num_rows, choice=choice))
        # greedy rows have no options, also in a program that samples
        sampling = self._neutral[plan.num_rows]
        if choice != "greedy":
            sampling = row_sampling([*of_chunks, *neutral_rows], spec.decoder.config.vocab_size)
        knobs = knob_rows([*of_chunks, *neutral_rows], spec.knobs)
        self._slots, packed = self._programs.run(key, self._slots, inputs.slots, sampling, knobs)
        firsts = [(chunk.seq, row, 1) for row, chunk in enumerate(chunks)]
        return PendingResults(packed, firsts, plan, *scores)

    def _store(self, leaving: tuple[Leaving, ...]) -> None:
        """Writes pages into host memory."""
        if leaving:
            self._host = host_pages.put(self._host, leaving)
            self._programs.lend_pages(self._host)

    def _store_tails(self, rows: list[RowPlan]) -> None:
        """Writes the newest tokens of rows that are due into host memory."""
        every = self._spec.sizes.tail_tokens
        for row in rows:
            if every and row.age % every == 0:
                which = np.array([row.slot], np.int32)
                self._store(self._programs.run(leave.key(1), self._slots, which))

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks out to host memory and back in, in this order."""
        for out, run in itertools.groupby(copies, key=attrgetter("out")):
            (self._copy_out if out else self._copy_in)(list(run))

    def _copy_out(self, copies: list[Copy]) -> None:
        for copy in copies:
            part = self._programs.run(copy_out.key(1), self._slots, self._groups_of(copy))
            self._blocks.pop(copy.place, None)  # its memory is free for the next
            self._blocks[copy.place] = jax.device_put(part, host_sharding())
            self._copying.append(self._blocks[copy.place])

    def _copy_in(self, copies: list[Copy]) -> None:
        place = device_sharding()
        parts = (jax.device_put(self._blocks[copy.place], place) for copy in copies)
        coming = next(parts)
        for copy in copies:
            # a copy waits for programs dispatched before it, so the next one is started first
            part, coming = coming, next(parts, coming)
            inputs = self._groups_of(copy), part
            self._slots = self._programs.run(copy_in.key(1), self._slots, *inputs)
            self._copying.append(part)

    def _groups_of(self, copy: Copy) -> Groups:
        """Returns the groups of a block, once few enough copies are in flight."""
        if len(self._copying) >= AT_A_TIME:  # each takes device memory
            jax.block_until_ready(self._copying.popleft())
        (groups,) = no_groups(self._spec)
        groups[0, : len(copy.groups)] = copy.groups
        return groups

    def _resume(self, row: Resumed) -> None:
        """Gives a row the groups in which its blocks are."""
        slots, groups = no_row(self._spec)
        slots[0], groups[0, : len(row.groups)] = row.slot, row.groups
        self._slots = self._programs.run(resume.key(1), self._slots, slots, groups)

    def _evict(self, chunk: Chunk) -> None:
        """Compresses a prompt that ends with this chunk."""
        prompt, request = chunk.start + chunk.valid, self._request_of(chunk.seq)
        key = evict_key(self._spec.sizes, prompt)
        inputs, _ = self._programs.placeholders(key.name, key.size)
        inputs.slots[0], inputs.places[0], inputs.lengths[0] = chunk.slot, chunk.place, prompt
        inputs.groups[0, : len(chunk.groups)] = chunk.groups
        inputs.kept[0, : len(chunk.kept)] = chunk.kept
        inputs.tokens[0, :prompt] = request.ids[:prompt]
        knobs = knob_rows([request], self._spec.knobs)
        self._slots = self._programs.run(key, self._slots, inputs, knobs)

    def _decode(self, plan: DecodePlan) -> PendingResults:
        num_rows, rows, sizes = plan.num_rows, plan.rows, self._spec.sizes
        size = num_rows, *(sizes.prefixes(num_rows) if plan.prefixes else ())
        (inputs,) = decode.placeholders(self._spec, size)
        # a program of all rows has them in slot order; in others, unused rows come last
        in_order = num_rows == sizes.num_slots
        at = {row.slot: row.slot if in_order else nth for nth, row in enumerate(rows)}
        for row in rows:
            nth = at[row.slot]
            inputs.slots[nth], inputs.counts[nth] = row.slot, row.steps
            if row.groups:
                inputs.first[nth], inputs.groups[nth, : len(row.groups)] = row.first, row.groups
        for nth, prefix in enumerate(plan.prefixes):
            members = [at[slot] for slot in prefix.slots]
            inputs.prefixes.rows[nth, : len(members)] = members
            inputs.prefixes.tokens[nth] = prefix.tokens
        self._constrain(rows)
        choice = self.sampling_mode(row.seq for row in rows)
        key = self._programs.usable(decode_key(choice, *size, drafts=plan.drafts))
        self._slots, packed = self._programs.run(key, self._slots, inputs)
        results = [(row.seq, at[row.slot], row.steps) for row in rows]
        return PendingResults(packed, results, plan)

    def _constrain(self, rows: list[RowPlan]) -> None:
        """Sets the tokens that rows with a grammar may choose next."""
        found = ((row.slot, self._output_of(row.seq).constraint) for row in rows)
        limited = [(slot, state) for slot, state in found if state is not None]
        size = rows_at_once(self._spec.sizes)
        for part in itertools.batched(limited, size):
            (inputs,) = constrain.placeholders(self._spec, (size,))
            slots, states = zip(*part, strict=True)
            inputs.slots[: len(part)], inputs.allowed[: len(part)] = slots, allowed(states)
            self._slots = self._programs.run(constrain.key(size), self._slots, inputs)

    def _request_of(self, seq: int) -> Request:
        return self._output_of(seq).request

    def sampling_mode(self, seqs: Iterable[int]) -> SamplingMode:
        """Returns the cheapest sampling mode that all of these sequences allow."""
        wanted = {choice_of(self._request_of(seq)) for seq in seqs}
        modes: list[SamplingMode] = [mode for mode in CHOICES if mode in wanted]
        return modes[-1]

    def _service(self, rows: list[RowPlan]) -> None:
        """Corrects and maintains the rows that are due, `service_rows` at a time."""
        size = self._spec.sizes.service_rows
        for name, every in self._spec.policy.services.every.items():
            due = [row.slot for row in rows if row.age % every == 0]
            for part in itertools.batched(due, size):
                # repeating a row changes nothing unless the service moves its tokens
                filler = self._spec.sizes.num_slots if self._spec.policy.evicts else part[0]
                which = np.array([*part, *[filler] * (size - len(part))], np.int32)
                key = service.key(size, service=name)
                self._slots = self._programs.run(key, self._slots, which)
