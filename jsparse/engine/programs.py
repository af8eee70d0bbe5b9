"""Defines the engine's few programs, and says which of them requests will run.

A program is compiled for the shapes of its arguments and for nothing that a request brings: no
request ever waits for a compilation but the first that samples, or that asks for likely tokens.
Where they are not compiled ahead, the first request begins to compile all that it will run, several
at a time.
"""

import logging
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly
from jsparse.engine.packing import Packed, pack
from jsparse.engine.program_keys import SamplingMode, answer_keys, decode_keys, engine_keys
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import MAX_READING
from jsparse.engine.slots import (
    DecodeRows,
    ReadRows,
    Slots,
    neutral,
    no_decoding,
    no_knobs,
    no_reading,
    no_recent,
)
from jsparse.model_facts.constants import constants
from jsparse.models.transformer import Weights, to_logits
from jsparse.policy import ServiceKind
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.owners import (
    keep_inactive,
    put_rows,
    row_arrays,
    take_rows,
    with_row_arrays,
)
from jsparse.runtime.prefill import PrefillCarry, prefill_chunk, replay_chunk
from jsparse.runtime.program_set import ProgramKey, ProgramSet
from jsparse.runtime.rows import Batch, decode_steps, first_tokens, put, serviced_rows, take
from jsparse.runtime.sampling import ChooseFn, RowSampling, greedy, row_sampling, sampled
from jsparse.runtime.shared_pages import empty_pages

CHOICES: dict[SamplingMode, ChooseFn] = {"greedy": greedy, "sampled": sampled, "top": sampled}


logger = logging.getLogger("jsparse.engine")


class Programs(ProgramSet):
    """Holds the programs of one engine; all of them take and return its batch of slots."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepares programs; none is compiled."""
        self._made_for = spec
        self._decoder, self._policy = spec.params.decoder, spec.policy
        self._spec, self._sizes = spec.cache, spec.sizes
        own: dict[str, Any] = {"donate_argnames": "slots"}
        programs = {
            "start": program(self._start),
            "read": program(self._read, static_argnames="last", **own),
            "replay": program(self._replay, **own),
            "join": program(self._join, static_argnames="choice", **own),
            "decode": program(self._decode, static_argnames="choice", **own),
            "service": program(self._service, static_argnames="service", **own),
        }
        beside = ReadOnly(constants(spec.params, spec.policy))
        fixed = {"weights": spec.params.weights, "beside": beside}
        # the ways of choosing tokens whose programs have been prepared
        self._prepared: tuple[SamplingMode, ...] = ()
        super().__init__(programs, fixed, self._shapes_of)

    def expect_answer(
        self, start: int, end: int, new_tokens: int, rows: int, choice: SamplingMode
    ) -> None:
        """Begins to compile the programs of a request, unless all have been prepared.

        Its prompt is read from the token `start` on up to `end`, and it decodes in a program that
        has `rows` rows at least.
        """
        if not self._prepared:
            usable = partial(self.usable_choice, wanted=choice)
            self.expect(answer_keys(self._sizes, start, end, new_tokens, rows, usable))

    def prepare(
        self, choices: Sequence[SamplingMode], *, all_rows: bool = False
    ) -> list[ProgramKey]:
        """Compiles the programs that requests of these kinds need; returns those that are new.

        Of decode programs these are those of the fewest rows and of all, unless `all_rows`; the
        others, and those for rows that read together what they have in common, are compiled when
        there is use for them, while the engine does without.
        """
        sizes = self._sizes
        if not all_rows:
            sizes = sizes._replace(rows=(sizes.rows[0], sizes.rows[-1]))
        keys = engine_keys(sizes, self._policy, choices)
        if all_rows and sizes.family_rows:
            for rows in sizes.rows:
                keys += decode_keys(choices, rows, *sizes.families(rows))
        self._prepared = tuple({*self._prepared, *choices})
        return self.compile(keys, logger)

    def usable_rows(self, count: int) -> int:
        """Returns the rows of the smallest decode program that has as many and is there.

        If a smaller one would do that is not there yet, it begins to be compiled. If programs have
        not been prepared, each is waited for, and this is the rows of the smallest.
        """
        fitting = [rows for rows in self._sizes.rows if rows >= count]
        self.expect(decode_keys(self._prepared, fitting[0]))
        return next(rows for rows in fitting if self._all_ready(rows))

    def can_share(self, rows: int) -> bool:
        """Returns whether a decode program is there that reads once what rows have in common.

        If it is not, it begins to be compiled; if programs have not been prepared, it is waited
        for.
        """
        size = rows, *self._sizes.families(rows)
        self.expect(decode_keys(self._prepared, *size))
        return self._all_ready(*size)

    def _all_ready(self, *size: int) -> bool:
        """Returns whether the decode programs of a size are there, as far as any are prepared."""
        return all(map(self.ready, decode_keys(self._prepared, *size)))

    def usable_choice(self, name: str, rows: int, wanted: SamplingMode) -> SamplingMode:
        """Returns how a program chooses tokens, as wanted or in a more general way.

        Rows that take the likeliest tokens gain little by a program of their own: they run in one
        that draws, if that is there.
        """
        greedy, drawing = (ProgramKey.of(name, rows, choice=x) for x in ("greedy", "sampled"))
        if wanted == "greedy" and self.ready(drawing) and not self.ready(greedy):
            return "sampled"
        return wanted

    def made_from(self) -> tuple[Any, ...]:
        """Returns everything that programs depend on beside their arguments."""
        params, *others = self._made_for
        return params.decoder, *others

    @cached_property
    def _slots(self) -> Slots:
        return jax.eval_shape(self._start)

    def _shapes_of(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the shapes of the arguments with which a program of this size is run."""
        return () if name == "start" else (self._slots, *self.of_nobody(name, size))

    def of_nobody(self, name: str, size: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns what follows the slots where a program of this size is run for no row.

        A service needs rows: these are behind the last, which stands for a copy of it.
        """
        spec, sizes, rows = self._spec, self._sizes, size[0]
        if name in ("read", "replay"):
            return np.zeros(size, np.int32), no_reading(spec, sizes, rows)
        if name == "decode":
            return (no_decoding(spec, sizes, *size),)
        nobody = np.full(rows, sizes.num_slots, np.int32)
        if name == "service":
            return (nobody,)
        sampling = row_sampling([neutral()] * rows, self._made_for.vocab_size)
        return nobody, sampling, no_knobs(self._made_for.knobs, rows)

    def _start(self) -> Slots:
        """Returns empty slots."""
        policy, spec, decoder = self._policy, self._spec, self._decoder
        rows, config = spec.batch, decoder.config
        zeros = jnp.zeros(rows, jnp.int32)
        options = row_sampling([neutral()], self._made_for.vocab_size)
        batch = Batch(
            tokens=zeros,
            cache=empty_pages(spec),
            state=policy.init(spec),
            given=jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), options),
            made=zeros,
            recent=no_recent(policy, rows),
            knobs=no_knobs(self._made_for.knobs, rows),
        )
        window = jnp.zeros(
            (MAX_READING, policy.window, config.num_heads, config.head_dim), decoder.dtype
        )
        return Slots(
            batch,
            jnp.zeros((rows, config.hidden_size), decoder.dtype),
            tuple(window for _ in range(config.num_layers if policy.window else 0)),
        )

    def _read(
        self,
        slots: Slots,
        tokens: Int32[Array, "R T"],
        asked: ReadRows,
        *,
        last: bool,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Int32[Array, "R"]]:
        """Reads a chunk of each of some prompts; also returns where their next chunks begin."""
        note_trace()
        carry = inlined(prefill_chunk)(
            self._decoder,
            self._policy,
            weights,
            tokens,
            valid=asked.valid,
            carry=self._carry(slots, asked, asked.start),
            beside=beside,
            last=last,
        )
        return self._after(slots, asked, carry)

    def _replay(
        self, slots: Slots, tokens: Int32[Array, "R T"], asked: ReadRows, *, beside: ReadOnly
    ) -> tuple[Slots, Int32[Array, "R"]]:
        """Shows the policy chunks whose K and V other requests have computed; as `_read`."""
        note_trace()
        carry = self._carry(slots, asked, asked.start + asked.valid)
        carry = replay_chunk(self._decoder, self._policy, tokens, asked.valid, carry, beside)
        return self._after(slots, asked, carry)

    def _carry(self, slots: Slots, asked: ReadRows, lengths: Int32[Array, "R"]) -> PrefillCarry:
        """Returns prompts that hold `lengths` tokens as a batch of their own."""
        policy, spec, rows = self._policy, self._spec, slots.rows
        _, state = take_rows(policy, spec, rows.cache, rows.state, asked.slots)
        no_pages = spec._replace(batch=asked.slots.size, pool_pages=spec.num_kv_heads)
        empty = row_arrays(policy, spec, policy.init(no_pages))
        empty = with_row_arrays(policy, spec, state, empty)
        fresh = asked.fresh[:, None, None, None]
        return PrefillCarry(
            rows.cache.rows(asked.groups, lengths).of_rows(),
            keep_inactive(policy, spec, ~asked.fresh, state, empty),
            slots.hidden.at[asked.slots].get(mode="clip"),
            tuple(
                jnp.where(fresh, 0, each.at[asked.places].get(mode="clip"))
                for each in slots.windows
            ),
        )

    def _after(
        self, slots: Slots, asked: ReadRows, carry: PrefillCarry
    ) -> tuple[Slots, Int32[Array, "R"]]:
        """Returns the slots after a chunk of these prompts, and the prompts' positions."""
        rows, end = slots.rows, asked.start + asked.valid
        part = rows.cache.rows(asked.groups, end).after(carry.cache), carry.state
        cache, state = put_rows(self._policy, self._spec, rows.cache, rows.state, part, asked.slots)
        windows = (
            each.at[asked.places].set(new)
            for each, new in zip(slots.windows, carry.windows, strict=True)
        )
        hidden = slots.hidden.at[asked.slots].set(carry.last_hidden)
        return Slots(rows._replace(cache=cache, state=state), hidden, tuple(windows)), end

    def _join(
        self,
        slots: Slots,
        which: Int32[Array, "R"],
        sampling: RowSampling,
        knobs: dict[str, Array],
        *,
        choice: SamplingMode,
        weights: Weights,
    ) -> tuple[Slots, Packed]:
        """Chooses the first tokens of rows whose prompts have been read: they decode from now."""
        note_trace()
        logits = to_logits(self._decoder, weights, slots.hidden.at[which].get(mode="clip"))
        tokens, sampling, packed = inlined(first_tokens)(
            CHOICES[choice], self._kept(choice), sampling, logits, jnp.zeros(which.size, jnp.bool_)
        )
        rows = slots.rows
        new = rows._replace(
            tokens=tokens,
            given=sampling,
            made=jnp.ones(which.size, jnp.int32),
            recent=no_recent(self._policy, which.size),
            knobs=knobs,
            cache=(),
            state=(),
        )
        old = rows._replace(cache=(), state=())
        joined = jax.tree.map(lambda x, new: x.at[which].set(new), old, new)
        return slots._replace(rows=joined._replace(cache=rows.cache, state=rows.state)), packed

    def _decode(
        self,
        slots: Slots,
        asked: DecodeRows,
        *,
        choice: SamplingMode,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Packed]:
        """Runs steps of some rows; one for all has them in their order."""
        policy, spec, rows = self._policy, self._spec, slots.rows
        which, of_all = asked.slots, asked.slots.size == spec.batch
        places = which[:, None], asked.first[:, None] + jnp.arange(asked.groups.shape[1])
        rows = rows._replace(cache=rows.cache.with_groups(*places, asked.groups))
        part = rows if of_all else take(policy, spec, rows, which)
        part, packed = inlined(decode_steps)(
            self._decoder,
            policy,
            CHOICES[choice],
            self._sizes.steps,
            self._kept(choice),
            weights=weights,
            beside=beside,
            batch=part._replace(cache=part.cache.with_prefixes(asked.prefixes)),
            counts=asked.counts,
        )
        part = part._replace(cache=part.cache.with_prefixes(None))
        rows = part if of_all else put(policy, spec, rows, part, which)
        return slots._replace(rows=rows), packed

    def _service(
        self,
        slots: Slots,
        which: Int32[Array, "n"],
        *,
        service: ServiceKind,
        weights: Weights,
        beside: ReadOnly,
    ) -> Slots:
        """Runs one of the policy's services on some rows, one of which may be named repeatedly."""
        rows = serviced_rows(
            service,
            self._decoder,
            self._policy,
            self._spec,
            weights=weights,
            beside=beside,
            batch=slots.rows,
            rows=which,
        )
        return slots._replace(rows=rows)

    def _kept(self, choice: SamplingMode) -> Any:
        """Returns the function that packs the results of a step for the host."""
        wanted = {"layer_stats": self._made_for.layer_stats, "top": choice == "top"}
        return partial(pack, num_layers=self._spec.num_layers, **wanted)
