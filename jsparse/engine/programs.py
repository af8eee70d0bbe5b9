"""Compiles the engine's few programs, and predicts which of them requests will run.

A program is compiled for the shapes of its arguments, which no request changes. Only the first
request that samples, or that asks for likely tokens, may wait for a compilation. If programs are
not compiled ahead, the first request starts to compile all that it will run, several at a time.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from jsparse.cache import ReadOnly
from jsparse.engine.constraint_programs import constrain
from jsparse.engine.copy_programs import copy_in, copy_out, resume
from jsparse.engine.decode_programs import (
    decode,
    decode_keys,
    draft_and_verify,
    service,
    service_keys,
)
from jsparse.engine.evict_programs import evict
from jsparse.engine.prefill_programs import join, prefill, prefill_keys, replay, start
from jsparse.engine.program_record import NewRequest
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes, SamplingMode
from jsparse.engine.slots import Slots
from jsparse.engine.tail_programs import leave, refill
from jsparse.host_memory.pages import HostLayers, shapes
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy
from jsparse.runtime.compilation import inlined
from jsparse.runtime.constants import constants, renewed
from jsparse.runtime.program_set import ProgramKey, ProgramSet
from jsparse.runtime.spread_programs import placed

logger = logging.getLogger("jsparse.engine")
# in the order in which a sequence needs them, then those that service rows and copy blocks
PROGRAMS = {
    each.name: each
    for each in (
        *(start, prefill, replay, evict, refill, join, constrain, decode, draft_and_verify),
        *(leave, service, copy_out, copy_in, resume),
    )
}


def engine_keys(
    sizes: EngineSizes, policy: Policy, choices: Sequence[SamplingMode]
) -> list[ProgramKey]:
    """Returns the keys of all programs for sequences with these sampling modes.

    Programs for shared prefixes are not among them. Decode programs, which take longest to compile,
    come before prefill programs.
    """
    records = reversed(PROGRAMS.values())
    return [key for record in records for key in record.keys_of_engine(sizes, policy, choices)]


class Programs(ProgramSet):
    """The programs of one engine."""

    def __init__(self, spec: EngineSpec, params: Params) -> None:
        """Creates the set, without compiled programs."""
        self._made_for, self._sizes = spec, spec.sizes
        programs = {name: record.compiled_for(spec) for name, record in PROGRAMS.items()}
        # pages in host memory change between programs, so they are passed to each one anew
        pages = shapes(spec.cache) if spec.sizes.tail_tokens else None
        self._read_only = ReadOnly(constants(params, spec.policy), host=pages)
        self._lent: HostLayers | None = None
        fixed = {"weights": params.weights, "read_only": self._read_only}
        # the sampling modes whose programs have been prepared
        self._prepared: tuple[SamplingMode, ...] = ()
        super().__init__(programs, fixed, self._shapes_of)

    def lend_pages(self, host: HostLayers | None) -> None:
        """Sets the pages in host memory that programs read from now on; None: none."""
        self._lent = host
        lent = self._read_only if host is None else self._read_only._replace(host=host)
        self.lend("read_only", lent)

    def replace_weights(self, params: Params) -> None:
        """Replaces the weights by others of the same shapes, and constants derived from them."""
        known = renewed(params, self._read_only.constants or {})
        self._read_only = self._read_only._replace(constants=known or None)
        self.replace(weights=params.weights, read_only=self._read_only)
        self.lend_pages(self._lent)

    def require_evictable(self) -> None:
        """Raises ValueError if the policy evicts and its state does not fit decoding rows."""
        if self._sizes.evicted_pages:
            size = 1, self._sizes.prompt_pages[-1]
            shapes, fixed = self._shapes_of(evict.name, size), self._fixed[evict.name]
            jax.eval_shape(inlined(self._programs[evict.name]), *shapes, **fixed)

    def expect_request(self, request: NewRequest) -> None:
        """Starts to compile the programs of a sequence, unless all have been prepared."""
        if not self._prepared:
            for record in PROGRAMS.values():
                self.expect(map(self.usable, record.keys_of_request(self._sizes, request)))

    def prepare(
        self, choices: Sequence[SamplingMode], *, all_rows: bool = False, wait: bool = True
    ) -> list[ProgramKey]:
        """Compiles the programs that requests with these sampling modes need; returns the new ones.

        Unless `all_rows`, decode programs are compiled only for the fewest rows and for all rows.
        The others, and those for shared prefixes, are compiled once they are useful, while the
        engine runs without them. Unless `wait`, this waits only for the programs that any request
        needs (the first of `choices`, and decode programs of all rows); the rest are compiled in
        the background.
        """
        sizes = self._sizes
        if not all_rows:
            sizes = sizes.of_rows(0, -1)
        keys = engine_keys(sizes, self._made_for.policy, choices)
        if all_rows and sizes.prefix_rows:
            for rows in sizes.rows:
                keys += decode_keys(choices, rows, *sizes.prefixes(rows))
        needed = keys
        if not wait:
            needed = engine_keys(sizes.of_rows(-1), self._made_for.policy, choices[:1])
        new = self.compile(needed, logger)
        self.expect(keys)
        # optional: programs with drafts also run rounds without them
        if sizes.adapts and sizes.steps > 1:
            for rows in sizes.rows:
                self.expect(decode_keys(choices, rows, drafts=0))
        self._prepared = tuple({*self._prepared, *choices})
        return new

    def expect_scored(self) -> None:
        """Starts to compile the programs for log-probabilities of prompts."""
        self.expect(prefill_keys(self._sizes, scored=True))

    def coming(self, choice: SamplingMode, *, scored: bool = False) -> bool:
        """Returns whether prepared programs of this sampling mode are still being compiled.

        If `scored`, also those for log-probabilities of prompts, after `expect_scored`. A request
        that needs one would stall all others until then.

        Raises:
            ValueError: one of the latter cannot be compiled.
        """
        if choice not in self._prepared:
            return False
        needed = engine_keys(self._sizes.of_rows(-1), self._made_for.policy, [choice])
        jobs = [self._made.get(each) for each in needed]
        if any(job is not None and not job.done() for job in jobs):
            return True
        if not scored:
            return False
        jobs = [self._made.get(each) for each in prefill_keys(self._sizes, scored=True)]
        for job in jobs:
            if job is not None and job.done() and (error := job.exception()) is not None:
                raise ValueError(f"prompt_logprobs: their programs cannot be compiled: {error}")
        return any(job is None or not job.done() for job in jobs)

    def usable_rows(self, count: int) -> int:
        """Returns the size of the smallest compiled program for at least `count` rows.

        Starts to compile the smallest size that would do. If no size is compiled, the caller waits
        for the program of all rows, or for the smallest one if no programs have been prepared.
        """
        fitting = [rows for rows in self._sizes.rows if rows >= count]

        def keys(rows: int) -> list[ProgramKey]:
            return decode_keys(self._prepared, rows, drafts=self._sizes.drafts_for(rows))

        self.expect(keys(fitting[0]))
        compiled = (rows for rows in fitting if all(map(self.ready, keys(rows))))
        if (rows := next(compiled, None)) is not None:
            return rows
        self.expect(keys(fitting[-1]) + service_keys(self._sizes, self._made_for.policy))
        return fitting[-1]

    def can_run(self, rows: int, wanted: SamplingMode, *, drafts: int | None = None) -> bool:
        """Returns whether an optional, faster program is compiled.

        It is a program for shared prefixes, or a verification round with room for `drafts` drafts.
        If it is not compiled, its compilation starts, unless its sampling mode has not been
        prepared. If no mode has been prepared, the caller waits for a program for shared prefixes.
        """
        if self._prepared and wanted == "top" and wanted not in self._prepared:
            return False
        if drafts is None:
            keys = decode_keys(self._prepared, rows, *self._sizes.prefixes(rows))
        else:
            keys = decode_keys(self._prepared or (wanted,), rows, drafts=drafts)
        self.expect(keys)
        return all(map(self.ready, keys))

    def usable(self, wanted: ProgramKey) -> ProgramKey:
        """Returns the program to run; its sampling mode may be more general than requested.

        Greedy rows run in a program that samples, if only that one is compiled.
        """
        static = dict(wanted.static)
        if static.get("choice") != "greedy" or self.ready(wanted):
            return wanted
        drawing = wanted._replace(static=frozenset((static | {"choice": "sampled"}).items()))
        return drawing if self.ready(drawing) else wanted

    @cached_property
    def _slots(self) -> Slots:
        shapes = jax.eval_shape(inlined(self._programs[start.name]))
        mesh = self._made_for.deployment.params.mesh
        return shapes if mesh is None else placed(shapes, mesh)

    def _shapes_of(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the shapes of the arguments of a program of this size."""
        return () if name == start.name else (self._slots, *self.placeholders(name, size))

    def placeholders(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns placeholder inputs: the arguments after the slots, for zero rows."""
        return PROGRAMS[name].placeholders(self._made_for, size)
