"""Defines the engine's few programs, and says which of them requests will run.

A program is compiled for the shapes of its arguments and for nothing that a request brings: no
request ever waits for a compilation but the first that samples, or that asks for likely tokens.
Where they are not compiled ahead, the first request begins to compile all that it will run, several
at a time.
"""

import logging
from collections.abc import Iterable
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.cache import KVCache, ReadOnly
from jsparse.engine.packing import Packed, pack
from jsparse.engine.setup import EngineSpec
from jsparse.model_facts.constants import constants
from jsparse.models.transformer import Weights, to_logits
from jsparse.policy import ServiceKind
from jsparse.runtime import prefill
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.owners import row_arrays, with_row_arrays
from jsparse.runtime.prefill import PrefillCarry, prefill_chunk, replay_chunk
from jsparse.runtime.program_set import ProgramKey, ProgramSet
from jsparse.runtime.request import Request
from jsparse.runtime.rows import (
    Batch,
    decode_steps,
    first_tokens,
    put,
    serviced_rows,
    take,
)
from jsparse.runtime.sampling import ChooseFn, RowSampling, greedy, row_sampling, sampled
from jsparse.runtime.sampling_params import OFF, SamplingParams
from jsparse.runtime.shared_pages import SharedPages, empty_pages

# How tokens are chosen: all rows take the likeliest; each by its own options; and with the
# likeliest tokens beside the chosen one.
SamplingMode = Literal["greedy", "sampled", "top"]
CHOICES: dict[SamplingMode, ChooseFn] = {"greedy": greedy, "sampled": sampled, "top": sampled}

# All rows of an engine, whether or not they hold requests.
Slots = Batch[SharedPages]

logger = logging.getLogger("jsparse.engine")


class OpenPrompt(NamedTuple):
    """Holds what belongs to a prompt that is being read, beside its pages.

    Attributes:
        rows: the arrays of the policy's state that rows own, for one row.
        last_hidden, windows: as in PrefillCarry.
    """

    rows: list[Array]
    last_hidden: Float[Array, "1 D"]
    windows: tuple[Float[Array, "1 W N H"], ...]


class Programs(ProgramSet):
    """Holds the programs of one engine, all of which take and return its batch of slots."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepares programs; none is compiled."""
        self._made_for = spec
        self._decoder, self._policy = spec.params.decoder, spec.policy
        self._spec, self._sizes = spec.cache, spec.sizes
        # the shapes of the options of one row
        self._sampling = row_sampling([neutral()], spec.vocab_size)
        read = {"donate_argnames": ("batch", "prompt")}
        own: dict[str, Any] = {"donate_argnames": "batch"}
        programs = {
            "start": program(self._start),
            "begin": program(self._begin),
            "read": program(self._read, static_argnames="last", **read),
            "replay": program(self._replay, **read),
            "join": program(self._join, static_argnames="choice", **own),
            "decode": program(self._decode, static_argnames=("count", "choice"), **own),
            "service": program(self._service, static_argnames="service", **own),
        }
        beside = ReadOnly(constants(spec.params, spec.policy))
        fixed = {"weights": spec.params.weights, "beside": beside}
        super().__init__(programs, fixed, self._shapes_of)

    def expect_answer(
        self, start: int, end: int, new_tokens: int, slot: int, choice: SamplingMode
    ) -> None:
        """Begins to compile what a request runs that is alone.

        Its prompt is read from the token `start` on up to `end`, and it decodes in `slot`.
        """
        wanted = [
            ProgramKey.of("read", size, last=last) for size, last in self._sizes.chunks(start, end)
        ]
        wanted.append(ProgramKey.of("join", choice=choice))
        if new_tokens > 1:
            rows = self._sizes.rows_for(slot)
            count = self._sizes.steps if new_tokens > self._sizes.steps else 1
            wanted.append(ProgramKey.of("decode", rows, count=count, choice=choice))
        self.expect(wanted)

    def prepare(self, choices: Iterable[SamplingMode] = ("greedy", "sampled")) -> None:
        """Compiles all programs that requests of these kinds need, several at a time."""
        wanted = [ProgramKey.of("start"), ProgramKey.of("begin")]
        full = {size for _, size in self._sizes.ladder}
        for size in full | set(self._sizes.tails):
            for last in (True, False) if size in full else (True,):
                wanted.append(ProgramKey.of("read", size, last=last))
            if self._policy.shares == "keys" and size in full:
                wanted.append(ProgramKey.of("replay", size))
        for choice in choices:
            wanted.append(ProgramKey.of("join", choice=choice))
            for rows, count in product(self._sizes.rows, sorted({1, self._sizes.steps})):
                wanted.append(ProgramKey.of("decode", rows, count=count, choice=choice))
        wanted += [ProgramKey.of("service", service=name) for name in self._policy.services.every]
        self.compile(wanted, logger)

    def made_from(self) -> tuple[Any, ...]:
        """Returns all that programs depend on beside their arguments."""
        params, *others = self._made_for
        return params.decoder, *others

    @cached_property
    def _shapes(self) -> tuple[Slots, OpenPrompt]:
        return jax.eval_shape(self._start), jax.eval_shape(self._begin)

    def _shapes_of(self, name: str, size: int) -> tuple[Any, ...]:
        """Returns the shapes of the arguments with which a program of this size is run."""
        if name in ("start", "begin"):
            return ()
        batch, prompt = self._shapes
        number, groups = jnp.int32(0), jnp.zeros(self._spec.num_pages, jnp.int32)
        if name in ("read", "replay"):
            tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
            return batch, prompt, tokens, groups, number, number
        if name == "join":
            return batch, prompt, number, groups, number, self._sampling, self._no_knobs(1)
        return batch, (jnp.zeros(size, jnp.int32) if name == "decode" else number)

    def _start(self) -> Slots:
        """Returns empty slots."""
        rows = self._spec.batch
        zeros = jnp.zeros(rows, jnp.int32)
        return Batch(
            tokens=zeros,
            cache=empty_pages(self._spec),
            state=self._policy.init(self._spec),
            given=jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), self._sampling),
            made=zeros,
            recent=self._no_recent(rows),
            knobs=self._no_knobs(rows),
        )

    def _begin(self) -> OpenPrompt:
        """Returns what belongs to a prompt of which nothing has been read."""
        policy, spec = self._policy, self._spec
        no_pages = spec._replace(batch=1, pool_pages=spec.num_kv_heads)
        nothing = KVCache((), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.bool_))
        carry = prefill.start(self._decoder, policy, nothing, policy.init(no_pages))
        return OpenPrompt(row_arrays(policy, spec, carry.state), carry.last_hidden, carry.windows)

    def _read(
        self,
        batch: Slots,
        prompt: OpenPrompt,
        tokens: Int32[Array, "1 T"],
        groups: Int32[Array, "M"],
        start: Int32[Array, ""],
        valid: Int32[Array, ""],
        *,
        last: bool,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, OpenPrompt, Int32[Array, ""]]:
        """Reads a chunk of a prompt, from the position `start` on, into its groups.

        The last result is the position where the next chunk begins.
        """
        note_trace()
        carry = inlined(prefill_chunk)(
            *(self._decoder, self._policy, weights, tokens, valid[None]),
            *(self._carry(batch, prompt, groups, start), beside),
            last=last,
        )
        return *self._parted(batch, carry), start + valid

    def _replay(
        self,
        batch: Slots,
        prompt: OpenPrompt,
        tokens: Int32[Array, "1 T"],
        groups: Int32[Array, "M"],
        start: Int32[Array, ""],
        valid: Int32[Array, ""],
        *,
        beside: ReadOnly,
    ) -> tuple[Slots, OpenPrompt, Int32[Array, ""]]:
        """Shows the policy a chunk whose K and V other requests have computed; as `_read`."""
        note_trace()
        carry = self._carry(batch, prompt, groups, start + valid)
        carry = replay_chunk(self._decoder, self._policy, tokens, valid[None], carry, beside)
        return *self._parted(batch, carry), start + valid

    def _carry(
        self,
        batch: Slots,
        prompt: OpenPrompt,
        groups: Int32[Array, "M"],
        length: Int32[Array, ""],
    ) -> PrefillCarry:
        """Returns a prompt of which so many tokens have been read, as a batch of its own."""
        return PrefillCarry(
            batch.cache.rows(groups[None], length[None]).of_rows(),
            with_row_arrays(self._policy, self._spec, batch.state, prompt.rows),
            *(prompt.last_hidden, prompt.windows),
        )

    def _parted(self, batch: Slots, carry: PrefillCarry) -> tuple[Slots, OpenPrompt]:
        """Returns the batch with the pages of a carry, and what is the prompt's own."""
        policy, spec = self._policy, self._spec
        own = row_arrays(policy, spec, batch.state)
        state = with_row_arrays(policy, spec, carry.state, own)
        rows = row_arrays(policy, spec, carry.state)
        batch = batch._replace(cache=batch.cache.after(carry.cache), state=state)
        return batch, OpenPrompt(rows, carry.last_hidden, carry.windows)

    def _join(
        self,
        batch: Slots,
        prompt: OpenPrompt,
        slot: Int32[Array, ""],
        groups: Int32[Array, "M"],
        length: Int32[Array, ""],
        sampling: RowSampling,
        knobs: dict[str, Array],
        *,
        choice: SamplingMode,
        weights: Weights,
    ) -> tuple[Slots, Packed]:
        """Puts a prompt that has been read into a slot, and chooses its first token."""
        note_trace()
        policy, spec = self._policy, self._spec
        logits = to_logits(self._decoder, weights, prompt.last_hidden)
        token, sampling, packed = inlined(first_tokens)(
            CHOICES[choice], self._kept(choice), sampling, logits, jnp.zeros(1, jnp.bool_)
        )
        row = Batch(
            tokens=token,
            cache=batch.cache.rows(groups[None], length[None]),
            state=with_row_arrays(policy, spec, batch.state, prompt.rows),
            given=sampling,
            made=jnp.ones(1, jnp.int32),
            recent=self._no_recent(1),
            knobs=knobs,
        )
        return put(policy, spec, batch, row, slot[None]), packed

    def _decode(
        self,
        batch: Slots,
        counts: Int32[Array, "n"],
        *,
        count: int,
        choice: SamplingMode,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Packed]:
        """Runs `count` steps of the first n rows; row b takes part in the first `counts[b]`."""
        policy, spec, rows = self._policy, self._spec, counts.size
        few = batch if rows == spec.batch else take(policy, spec, batch, rows)
        few, packed = inlined(decode_steps)(
            *(self._decoder, policy, CHOICES[choice], count, self._kept(choice)),
            *(weights, beside, few, counts),
        )
        return (few if rows == spec.batch else put(policy, spec, batch, few, rows)), packed

    def _service(
        self,
        batch: Slots,
        slot: Int32[Array, ""],
        *,
        service: ServiceKind,
        weights: Weights,
        beside: ReadOnly,
    ) -> Slots:
        """Runs one of the policy's services on one row."""
        return serviced_rows(
            *(service, self._decoder, self._policy, self._spec, weights, beside, batch),
            slot[None],
        )

    def _kept(self, choice: SamplingMode) -> Any:
        """Returns what makes of a step what the host wants to know."""
        wanted = {"layer_stats": self._made_for.layer_stats, "top": choice == "top"}
        return partial(pack, num_layers=self._spec.num_layers, **wanted)

    def _no_recent(self, rows: int) -> Int32[Array, "B n"]:
        return jnp.zeros((rows, self._policy.services.correct_every), jnp.int32)

    def _no_knobs(self, rows: int) -> dict[str, Array]:
        """Returns hyper-parameters that no row sets."""
        return {
            name: jnp.zeros(rows, jnp.bool_)
            if name == "dense"
            else jnp.full(rows, jnp.nan, jnp.float32)
            for name in self._made_for.knobs
        }


def neutral() -> Request:
    """Returns a request that takes the likeliest token."""
    return Request([], SamplingParams(**OFF), frozenset(), 0)
