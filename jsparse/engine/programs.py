"""Defines the engine's few programs, and says which of them requests will run.

A program is compiled for the shapes of its arguments and for nothing that a request brings: no
request ever waits for a compilation but the first that samples, or that asks for likely tokens.
Where they are not compiled ahead, the first request begins to compile all that it will run, several
at a time.
"""

import logging
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.cache import KVCache, ReadOnly
from jsparse.engine.packing import Packed, pack
from jsparse.engine.program_keys import SamplingMode, answer_keys, engine_keys
from jsparse.engine.setup import EngineSpec
from jsparse.engine.slots import OpenPrompt, Slots, neutral, no_knobs, no_recent
from jsparse.model_facts.constants import constants
from jsparse.models.transformer import Weights, to_logits
from jsparse.policy import ServiceKind
from jsparse.runtime import prefill
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.owners import row_arrays, with_row_arrays
from jsparse.runtime.prefill import PrefillCarry, prefill_chunk, replay_chunk
from jsparse.runtime.program_set import ProgramSet
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
        """Begins to compile the programs of a request that is alone.

        Its prompt is read from the token `start` on up to `end`, and it decodes in `slot`.
        """
        self.expect(answer_keys(self._sizes, start, end, new_tokens, slot, choice))

    def prepare(self, choices: Iterable[SamplingMode] = ("greedy", "sampled")) -> None:
        """Compiles all programs that requests of these kinds need, several at a time."""
        self.compile(engine_keys(self._sizes, self._policy, choices), logger)

    def made_from(self) -> tuple[Any, ...]:
        """Returns everything that programs depend on beside their arguments."""
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
            return (
                batch,
                prompt,
                number,
                groups,
                number,
                self._sampling,
                no_knobs(self._made_for.knobs, 1),
            )
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
            recent=no_recent(self._policy, rows),
            knobs=no_knobs(self._made_for.knobs, rows),
        )

    def _begin(self) -> OpenPrompt:
        """Returns the state of a prompt before its first chunk."""
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
            self._decoder,
            self._policy,
            weights,
            tokens,
            valid=valid[None],
            carry=self._carry(batch, prompt, groups, start),
            beside=beside,
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
        """Returns a prompt as a batch of its own, after its first tokens have been read."""
        return PrefillCarry(
            batch.cache.rows(groups[None], length[None]).of_rows(),
            with_row_arrays(self._policy, self._spec, batch.state, prompt.rows),
            prompt.last_hidden,
            prompt.windows,
        )

    def _parted(self, batch: Slots, carry: PrefillCarry) -> tuple[Slots, OpenPrompt]:
        """Returns the batch with the pages of a carry, and the prompt's own state."""
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
            recent=no_recent(self._policy, 1),
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
            self._decoder,
            policy,
            CHOICES[choice],
            count,
            self._kept(choice),
            weights=weights,
            beside=beside,
            batch=few,
            counts=counts,
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
            service,
            self._decoder,
            self._policy,
            self._spec,
            weights=weights,
            beside=beside,
            batch=batch,
            rows=slot[None],
        )

    def _kept(self, choice: SamplingMode) -> Any:
        """Returns the function that packs the results of a step for the host."""
        wanted = {"layer_stats": self._made_for.layer_stats, "top": choice == "top"}
        return partial(pack, num_layers=self._spec.num_layers, **wanted)
