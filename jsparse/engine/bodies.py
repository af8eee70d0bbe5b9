"""Defines what the engine's programs compute: all of them take and return its batch of slots."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly
from jsparse.engine import host_rows
from jsparse.engine.packing import Packed, joined, pack, pack_round, parted
from jsparse.engine.program_keys import SamplingMode
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import MAX_READING
from jsparse.engine.slots import (
    DecodeRows,
    EvictRow,
    GroupPages,
    MovedGroups,
    Parked,
    ReadRows,
    Slots,
    neutral,
    no_knobs,
)
from jsparse.host_memory.pages import Leaving
from jsparse.models.transformer import Weights, to_logits
from jsparse.policy import ServiceKind
from jsparse.runtime.compilation import inlined, note_trace
from jsparse.runtime.host_store import with_newest
from jsparse.runtime.owners import (
    keep_inactive,
    put_pages,
    put_rows,
    put_state,
    row_arrays,
    take_pages,
    take_state,
    with_row_arrays,
)
from jsparse.runtime.prefill import PrefillCarry, prefill_chunk, replay_chunk
from jsparse.runtime.room import evict
from jsparse.runtime.rows import (
    Batch,
    decode_steps,
    first_tokens,
    no_recent,
    put,
    serviced_rows,
    take,
)
from jsparse.runtime.sampling import ChooseFn, RowSampling, greedy, row_sampling, sampled
from jsparse.runtime.shared_pages import SharedPages, empty_pages, scratch_group
from jsparse.runtime.speculation import speculate

CHOICES: dict[SamplingMode, ChooseFn] = {"greedy": greedy, "sampled": sampled, "top": sampled}


class Bodies:
    """Computes what an engine's programs do, one method each."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepares for the model, the policy and the sizes of an engine."""
        self._made_for = spec
        self._decoder, self._policy = spec.params.decoder, spec.policy
        self._spec, self._sizes, self._decoding = spec.cache, spec.sizes, spec.decoding
        self._reading = spec.cache._replace(batch=MAX_READING)

    def made_from(self) -> tuple[Any, ...]:
        """Returns everything that programs depend on beside their arguments."""
        params, *others = self._made_for
        return params.decoder, *others

    def start(self) -> Slots:
        """Returns empty slots."""
        policy, spec, decoder = self._policy, self._decoding, self._decoder
        rows, config = spec.batch, decoder.config
        zeros = jnp.zeros(rows, jnp.int32)
        options = row_sampling([neutral()], self._made_for.vocab_size)
        if policy.offload is None:
            pages = empty_pages(spec, fields=policy.fields, by_head=policy.evicts)
        else:
            pages = host_rows.empty_tails(spec, policy)
        batch = Batch(
            tokens=zeros,
            cache=pages,
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
            policy.init(self._reading) if policy.evicts else (),
        )

    def read(
        self,
        slots: Slots,
        tokens: Int32[Array, "R T"],
        asked: ReadRows,
        *,
        last: bool,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Int32[Array, "R"], tuple[Leaving, ...]]:
        """Reads a chunk of each of some prompts; also returns where their next chunks begin.

        The last result are the chunk's pages, by layer, if K and V lie in host memory.
        """
        note_trace()
        size = tokens.shape[1]
        carry = inlined(prefill_chunk)(
            self._decoder,
            self._policy,
            weights,
            tokens,
            valid=asked.valid,
            carry=self._carry(slots, asked, asked.start, size),
            beside=beside,
            last=last,
        )
        new = ()
        if self._policy.offload is not None:
            new = host_rows.leaving(carry.cache, asked.start, size)
        return *self._after(slots, asked, carry), new

    def replay(
        self, slots: Slots, tokens: Int32[Array, "R T"], asked: ReadRows, *, beside: ReadOnly
    ) -> tuple[Slots, Int32[Array, "R"], tuple[Leaving, ...]]:
        """Shows the policy chunks whose K and V other requests have computed; as `read`."""
        note_trace()
        carry = self._carry(slots, asked, asked.start + asked.valid, tokens.shape[1])
        if self._policy.offload is not None:
            carry = carry._replace(cache=with_newest(carry.cache, beside.host))
        carry = replay_chunk(self._decoder, self._policy, tokens, asked.valid, carry, beside)
        return *self._after(slots, asked, carry), ()

    def _carry(
        self, slots: Slots, asked: ReadRows, lengths: Int32[Array, "R"], size: int
    ) -> PrefillCarry:
        """Returns prompts that hold `lengths` tokens, at most `size` new, as a batch of their own.

        Where K and V lie in host memory, they have the policy's pages for themselves, too.
        """
        policy, spec, rows = self._policy, self._spec, slots.rows
        memory = rows.cache.rows(asked.groups, lengths)
        if policy.offload is not None:
            pages = memory.pages_of(asked.groups)
            state = take_state(policy, spec, rows.state, asked.slots, pages)
            cache = host_rows.prompts(spec, memory, size)
        elif policy.evicts:
            state = take_state(policy, self._reading, slots.reading, asked.places)
            cache = memory.of_rows()
        else:
            state = take_state(policy, spec, rows.state, asked.slots)
            cache = memory.of_rows()
        no_pages = spec._replace(batch=asked.slots.size, pool_pages=spec.num_kv_heads)
        empty = row_arrays(policy, spec, policy.init(no_pages))
        empty = with_row_arrays(policy, spec, state, empty)
        fresh = asked.fresh[:, None, None, None]
        return PrefillCarry(
            cache,
            keep_inactive(policy, spec, ~asked.fresh, state, empty),
            jnp.where(asked.fresh[:, None], 0, slots.hidden.at[asked.slots].get(mode="clip")),
            tuple(
                jnp.where(fresh, 0, each.at[asked.places].get(mode="clip"))
                for each in slots.windows
            ),
        )

    def _after(
        self, slots: Slots, asked: ReadRows, carry: PrefillCarry
    ) -> tuple[Slots, Int32[Array, "R"]]:
        """Returns the slots after a chunk of these prompts, and the prompts' positions."""
        policy, spec, rows, reading = self._policy, self._spec, slots.rows, slots.reading
        end = asked.start + asked.valid
        if policy.offload is not None:
            pages = rows.cache.pages_of(asked.groups)
            state = put_state(policy, spec, rows.state, carry.state, asked.slots, pages)
            cache = rows.cache.placed(asked.slots, asked.groups, end)
            rows = rows._replace(cache=cache, state=state)
        else:
            part = rows.cache.rows(asked.groups, end).after(carry.cache)
            if policy.evicts:
                rows = rows._replace(cache=rows.cache.with_pages_of(part))
                reading = put_state(policy, self._reading, reading, carry.state, asked.places)
            else:
                both = part, carry.state
                cache, state = put_rows(policy, spec, rows.cache, rows.state, both, asked.slots)
                rows = rows._replace(cache=cache, state=state)
        windows = (
            each.at[asked.places].set(new)
            for each, new in zip(slots.windows, carry.windows, strict=True)
        )
        hidden = slots.hidden.at[asked.slots].set(carry.last_hidden)
        return Slots(rows, hidden, tuple(windows), reading), end

    def refill(self, slots: Slots, which: Int32[Array, "n"], *, beside: ReadOnly) -> Slots:
        """Fills the tails of rows whose prompts have been read, from host memory."""
        note_trace()
        rows = slots.rows
        part = rows.cache.take(which)
        cache = with_newest(part.of_rows(), beside.host, resident=True)
        memory = rows.cache.put(part.after(cache), which)
        return slots._replace(rows=rows._replace(cache=memory))

    def leave(self, slots: Slots, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
        """Returns the newest pages of rows that decode, by layer, for host memory."""
        note_trace()
        return host_rows.tail_leaving(self._decoding, self._policy, slots.rows.cache, which)

    def evict(
        self, slots: Slots, asked: EvictRow, knobs: dict[str, Array], *, beside: ReadOnly
    ) -> Slots:
        """Compresses a prompt that has been read, into groups of its own.

        Its first pages are copied there before the policy reworks them: others may have the groups
        that it was read into, too.

        Raises:
            ValueError: the policy leaves a state of other sizes than it has for rows that decode.
        """
        note_trace()
        policy, spec, decoding, rows = self._policy, self._spec, self._decoding, slots.rows
        pages = min(decoding.num_pages, asked.groups.shape[1])
        kept, read = asked.kept[:, :pages], asked.groups[:, :pages]
        memory = rows.cache.copied(read, kept)
        # heads come to lie in the groups that the row keeps; what is behind these is only read
        first = jnp.where(kept == scratch_group(spec), read, kept)
        groups = jnp.concatenate([first, asked.groups[:, pages:]], axis=1)
        state = take_state(policy, self._reading, slots.reading, asked.places)
        cache, state = evict(
            policy,
            memory.rows(groups, asked.lengths).of_rows(),
            state,
            beside._replace(knobs=knobs or None),
            pages * spec.page_size,
        )
        expected = jax.eval_shape(lambda: policy.init(decoding._replace(batch=1)))
        if jax.tree.map(jax.typeof, state) != jax.tree.map(jax.typeof, expected):
            raise ValueError(
                f"policy={policy}: after_prompt must leave a state for {decoding.capacity} slots "
                "per head where rows join, as `max_length` says"
            )
        part = memory.rows(asked.kept, asked.lengths).by_head(cache)
        memory, state = put_rows(
            policy, decoding, rows.cache, rows.state, (part, state), asked.slots
        )
        return slots._replace(rows=rows._replace(cache=memory, state=state))

    def park(self, slots: Slots, moved: MovedGroups) -> Parked:
        """Returns the pages of some groups, which are given to others then."""
        note_trace()
        return joined(self._pages(slots, moved))

    def resume(self, slots: Slots, moved: MovedGroups, parked: Parked) -> Slots:
        """Puts pages that `park` returned into other groups of their row."""
        note_trace()
        rows, pages = slots.rows, slots.rows.cache.pages_of(moved.groups)
        back = parted(parked, jax.eval_shape(self._pages, slots, moved))
        places = moved.first[:, None] + jnp.arange(moved.groups.shape[1])
        cache = rows.cache.put_groups(moved.groups, back.pools)
        cache = cache.with_groups(moved.slots[:, None], places, moved.groups)
        state = put_pages(self._policy, self._decoding, rows.state, pages, back.state)
        return slots._replace(rows=rows._replace(cache=cache, state=state))

    def _pages(self, slots: Slots, moved: MovedGroups) -> GroupPages:
        rows, pages = slots.rows, slots.rows.cache.pages_of(moved.groups)
        state = take_pages(self._policy, self._decoding, rows.state, pages)
        return GroupPages(rows.cache.take_groups(moved.groups), state)

    def join(
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

    def decode(
        self,
        slots: Slots,
        asked: DecodeRows,
        *,
        choice: SamplingMode,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Packed]:
        """Runs decode steps of some rows; a program for all has them in their order."""
        static = self._decoder, self._policy, CHOICES[choice], self._sizes.steps, self._kept(choice)
        run = partial(inlined(decode_steps), *static, weights, beside)
        return self._decoded(slots, asked, lambda part: run(part, asked.counts))

    def round(
        self,
        slots: Slots,
        asked: DecodeRows,
        *,
        choice: SamplingMode,
        drafts: int,
        weights: Weights,
        beside: ReadOnly,
    ) -> tuple[Slots, Packed]:
        """Runs a round of speculation of some rows, as `decode` runs steps."""
        kept = self._kept(choice, pack_round)
        static = self._decoder, self._policy, CHOICES[choice], drafts, kept

        def run(part: Batch[SharedPages]) -> tuple[Batch[SharedPages], Packed]:
            limits, most = part.made + asked.counts, jnp.int32(drafts)
            return inlined(speculate)(*static, weights, beside, limits, most, part)

        return self._decoded(slots, asked, run)

    def _decoded(
        self,
        slots: Slots,
        asked: DecodeRows,
        run: Callable[[Batch[SharedPages]], tuple[Batch[SharedPages], Packed]],
    ) -> tuple[Slots, Packed]:
        """Returns the slots after `run` has decoded these rows as a batch, and its results."""
        policy, spec, rows = self._policy, self._decoding, slots.rows
        which, of_all = asked.slots, asked.slots.size == spec.batch
        places = which[:, None], asked.first[:, None] + jnp.arange(asked.groups.shape[1])
        rows = rows._replace(cache=rows.cache.with_groups(*places, asked.groups))
        part = rows if of_all else take(policy, spec, rows, which)
        part, packed = run(part._replace(cache=part.cache.with_prefixes(asked.prefixes)))
        part = part._replace(cache=part.cache.with_prefixes(None))
        rows = part if of_all else put(policy, spec, rows, part, which)
        return slots._replace(rows=rows), packed

    def service(
        self,
        slots: Slots,
        which: Int32[Array, "n"],
        *,
        service: ServiceKind,
        weights: Weights,
        beside: ReadOnly,
    ) -> Slots:
        """Runs one of the policy's services on some rows.

        One of them may be named repeatedly, unless the policy evicts: it would move the same tokens
        twice. Then numbers behind the last row stand for no row.
        """
        rows = serviced_rows(
            service,
            self._decoder,
            self._policy,
            self._decoding,
            weights=weights,
            beside=beside,
            batch=slots.rows,
            rows=which,
        )
        return slots._replace(rows=rows)

    def _kept(self, choice: SamplingMode, packs: Callable[..., Packed] = pack) -> Any:
        """Returns the function that packs the results of a step, or of a round, for the host."""
        wanted = {"layer_stats": self._made_for.layer_stats, "top": choice == "top"}
        return partial(packs, num_layers=self._spec.num_layers, **wanted)
