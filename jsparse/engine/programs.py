"""Defines the engine's few programs, and says which of them requests will run.

A program is compiled for the shapes of its arguments and for nothing that a request brings: no
request ever waits for a compilation but the first that samples, or that asks for likely tokens.
Where they are not compiled ahead, the first request begins to compile all that it will run, several
at a time.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jsparse.cache import ReadOnly
from jsparse.engine.bodies import Bodies
from jsparse.engine.program_keys import (
    SamplingMode,
    answer_keys,
    decode_keys,
    engine_keys,
    evict_key,
    service_keys,
)
from jsparse.engine.setup import EngineSpec
from jsparse.engine.slots import (
    Slots,
    neutral,
    no_decoding,
    no_evicting,
    no_knobs,
    no_moving,
    no_reading,
)
from jsparse.host_memory.pages import HostLayers, shapes
from jsparse.runtime.compilation import Program, inlined, program
from jsparse.runtime.constants import constants
from jsparse.runtime.program_set import ProgramKey, ProgramSet
from jsparse.runtime.sampling import row_sampling
from jsparse.runtime.spread_programs import OWN, SAME, placed

logger = logging.getLogger("jsparse.engine")


class Programs(ProgramSet):
    """Holds the programs of one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepares programs; none is compiled."""
        self._made_for, self._sizes, self.bodies = spec, spec.sizes, Bodies(spec)
        bodies = self.bodies
        programs = {
            "start": self._program(bodies.start, donates=False),
            "read": self._program(bodies.read, "last", out=(OWN, SAME, SAME)),
            "replay": self._program(bodies.replay, out=(OWN, SAME, SAME)),
            "evict": self._program(bodies.evict),
            "park": self._program(bodies.park, donates=False),
            "resume": self._program(bodies.resume),
            "refill": self._program(bodies.refill),
            "leave": self._program(bodies.leave, donates=False),
            "join": self._program(bodies.join, "choice", out=(OWN, SAME)),
            "decode": self._program(bodies.decode, "choice", out=(OWN, SAME)),
            "round": self._program(bodies.round, "choice", "drafts", out=(OWN, SAME)),
            "service": self._program(bodies.service, "service"),
        }
        # pages in host memory are lent to each program, since they change between them
        pages = shapes(spec.cache) if spec.sizes.tail_tokens else None
        self._beside = ReadOnly(constants(spec.params, spec.policy), host=pages)
        fixed = {"weights": spec.params.weights, "beside": self._beside}
        # the ways of choosing tokens whose programs have been prepared
        self._prepared: tuple[SamplingMode, ...] = ()
        super().__init__(programs, fixed, self._shapes_of)

    def _program(
        self, body: Callable[..., Any], *static: str, donates: bool = True, out: Any = OWN
    ) -> Program:
        """Returns the program of a body, on all ranks if the model is spread over several.

        Of its results, those that are `OWN` are of each rank, as the slots and the weights are.
        """
        options: dict[str, Any] = {"donate_argnames": "slots"} if donates else {}
        options |= {"own": ("slots", "weights"), "out": out}
        return program(body, static_argnames=static, **options).on(self._made_for.params.mesh)

    def lend_pages(self, host: HostLayers | None) -> None:
        """Lets programs read these pages in host memory from now on; None is none at all."""
        lent = self._beside if host is None else self._beside._replace(host=host)
        self.lend("beside", lent)

    def require_evictable(self) -> None:
        """Raises ValueError if the policy evicts and leaves what rows that decode cannot take."""
        if self._sizes.evicted_pages:
            key = evict_key(self._sizes.prompt_pages[-1])
            shapes = self._shapes_of(key.name, key.size)
            jax.eval_shape(inlined(self._programs[key.name]), *shapes, **self._fixed[key.name])

    def expect_answer(
        self, start: int, end: int, new_tokens: int, rows: int, choice: SamplingMode
    ) -> None:
        """Begins to compile the programs of a request, unless all have been prepared.

        Its prompt is read from the token `start` on up to `end`, and it decodes in a program that
        has `rows` rows at least.
        """
        if not self._prepared:
            keys = answer_keys(self._sizes, start, end, new_tokens, rows, choice)
            self.expect(map(self.usable, keys))

    def prepare(
        self, choices: Sequence[SamplingMode], *, all_rows: bool = False, wait: bool = True
    ) -> list[ProgramKey]:
        """Compiles the programs that requests of these kinds need; returns those that are new.

        Of decode programs these are those of the fewest rows and of all, unless `all_rows`; the
        others, and those for rows that read shared prefixes together, are compiled when there is
        use for them, while the engine does without. Unless it should `wait`, the same holds for all
        but the programs that any request needs: the first of `choices`, in programs of all rows.
        """
        sizes = self._sizes
        if not all_rows:
            sizes = sizes.of_rows(0, -1)
        keys = engine_keys(sizes, self._made_for.policy, choices)
        if all_rows and sizes.family_rows:
            for rows in sizes.rows:
                keys += decode_keys(choices, rows, *sizes.families(rows))
        needed = keys
        if not wait:
            needed = engine_keys(sizes.of_rows(-1), self._made_for.policy, choices[:1])
        new = self.compile(needed, logger)
        self.expect(keys)
        self._prepared = tuple({*self._prepared, *choices})
        return new

    def coming(self, choice: SamplingMode) -> bool:
        """Returns whether prepared programs of this sampling mode are still being compiled.

        A request that needs one would stall all others until then.
        """
        if choice not in self._prepared:
            return False
        needed = engine_keys(self._sizes.of_rows(-1), self._made_for.policy, [choice])
        jobs = (self._made.get(each) for each in needed)
        return any(job is not None and not job.done() for job in jobs)

    def usable_rows(self, count: int) -> int:
        """Returns the rows of the smallest program that decodes as many and is there.

        If a smaller one would do that is not there yet, it begins to be compiled. If none is there,
        that of all rows is waited for, and where programs have not been prepared, the smallest.
        """
        fitting = [rows for rows in self._sizes.rows if rows >= count]

        def keys(rows: int) -> list[ProgramKey]:
            return decode_keys(self._prepared, rows, drafts=self._sizes.drafts_for(rows))

        self.expect(keys(fitting[0]))
        there = (rows for rows in fitting if all(map(self.ready, keys(rows))))
        if (rows := next(there, None)) is not None:
            return rows
        self.expect(keys(fitting[-1]) + service_keys(self._sizes, self._made_for.policy))
        return fitting[-1]

    def can_run(self, rows: int, wanted: SamplingMode, *, drafts: int | None = None) -> bool:
        """Returns whether a program is there that others can do the work of, if slower.

        That is one which reads once what rows have in common, or a round with room for so many
        drafts. If it is not there, it begins to be compiled, unless it chooses tokens in a way that
        has not been prepared. If none has, one that reads once is waited for.
        """
        if self._prepared and wanted == "top" and wanted not in self._prepared:
            return False
        if drafts is None:
            keys = decode_keys(self._prepared, rows, *self._sizes.families(rows))
        else:
            keys = decode_keys(self._prepared or (wanted,), rows, drafts=drafts)
        self.expect(keys)
        return all(map(self.ready, keys))

    def usable(self, wanted: ProgramKey) -> ProgramKey:
        """Returns the program to run, which may choose tokens in a more general way than wanted.

        Rows that take the likeliest tokens gain little by a program of their own: they run in one
        that draws, if that is there.
        """
        static = dict(wanted.static)
        if static.get("choice") != "greedy" or self.ready(wanted):
            return wanted
        drawing = wanted._replace(static=frozenset((static | {"choice": "sampled"}).items()))
        return drawing if self.ready(drawing) else wanted

    @cached_property
    def _slots(self) -> Slots:
        mesh, shapes = self._made_for.params.mesh, jax.eval_shape(inlined(self._programs["start"]))
        return shapes if mesh is None else placed(shapes, mesh)

    def _shapes_of(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the shapes of the arguments with which a program of this size is run."""
        if name == "start":
            return ()
        shapes = self._slots, *self.of_nobody(name, size)
        return (*shapes, jax.eval_shape(self.bodies.park, *shapes)) if name == "resume" else shapes

    def of_nobody(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns what follows the slots where a program of this size is run for no row.

        A service needs rows: these are behind the last, which stands for a copy of it.
        """
        spec, sizes, rows = self._made_for.cache, self._sizes, size[0]
        if name in ("read", "replay"):
            return np.zeros(size, np.int32), no_reading(spec, sizes, rows)
        if name in ("decode", "round"):
            return (no_decoding(self._made_for.decoding, sizes, *size),)
        if name in ("park", "resume"):
            return (no_moving(self._made_for.decoding, sizes),)
        if name == "evict":
            return no_evicting(spec, sizes, size[1]), no_knobs(self._made_for.knobs, 1)
        nobody = np.full(rows, sizes.num_slots, np.int32)
        if name in ("service", "refill", "leave"):
            return (nobody,)
        sampling = row_sampling([neutral()] * rows, self._made_for.vocab_size)
        return nobody, sampling, no_knobs(self._made_for.knobs, rows)
