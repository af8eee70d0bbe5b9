"""Defines the engine's few programs, and compiles them ahead of the first request.

A program is compiled for the shapes of its arguments and for nothing that a request brings: no
request ever waits for a compilation but the first that samples, or that asks for likely tokens.
Compiled programs refuse other shapes, so none is traced again. Where they are not compiled ahead,
the first request begins to compile all that it will run, several at a time.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import CacheSpec, ReadOnly, StepView, read_slots
from jsparse.engine.scheduler import Sizes
from jsparse.engine.slots import (
    Reading,
    Slots,
    no_knob,
    pools_of,
    start_reading,
    start_slots,
    view,
)
from jsparse.model_facts.constants import constants
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import to_logits
from jsparse.policy import Policy, PrefillView
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.correct import correct
from jsparse.runtime.decode_step import StepStats, decode_step
from jsparse.runtime.owners import put_rows, row_arrays, take_rows, with_row_arrays
from jsparse.runtime.prefill import PrefillCarry, prefill_chunk
from jsparse.runtime.sampling import RowSampling, greedy, sampled, top_logprobs
from jsparse.runtime.session import maintain
from jsparse.shapes import Rows

# How tokens are chosen: all rows take the likeliest; each by its own options; and with the
# likeliest tokens beside the chosen one.
Choice = Literal["greedy", "sampled", "top"]
# What n steps chose for each row, as one array, since each transfer costs time: the token; the bits
# of its log-probability and of the shares attended and read; and where asked for the shares of each
# layer, and the likeliest tokens and their log-probabilities. `outputs.unpack` takes it apart.
Packed = Int32[Array, "n B w"]
CHOICES: tuple[Choice, ...] = ("greedy", "sampled", "top")

logger = logging.getLogger("jsparse.engine")


class Wanted(NamedTuple):
    """Names a program: what it does, the size that tells its shapes apart, its static arguments."""

    name: str
    size: int = 0
    static: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, size: int = 0, **static: Any) -> "Wanted":
        """Names the program that `Programs.run` runs when it is given these."""
        return cls(name, size, tuple(static.items()))


class Programs:
    """Holds the programs of one engine.

    `seconds` is the time for which requests waited for one to be compiled.
    """

    def __init__(
        self,
        params: Params,
        policy: Policy,
        spec: CacheSpec,
        sizes: Sizes,
        *,
        knobs: tuple[str, ...] = (),
        layer_stats: bool = False,
        sampling: RowSampling,
    ) -> None:
        """Prepares programs; `sampling` has the shapes of the options of one row."""
        self._decoder, self._weights = params.decoder, params.weights
        self._policy, self._spec, self._sizes = policy, spec, sizes
        self._constants = constants(params, policy)
        self._knobs, self._layer_stats, self._sampling = knobs, layer_stats, sampling
        self._made: dict[Wanted, Future[Callable[..., Any]]] = {}
        self.seconds = 0.0
        model = {"weights": self._weights, "constants": self._constants}
        self._programs = {
            "start": (program(self._start), {}),
            "begin": (program(self._begin), {}),
            "read": (
                program(self._read, static_argnames="last", donate_argnames=("slots", "reading")),
                model,
            ),
            "replay": (program(self._replay, donate_argnames=("slots", "reading")), model),
            "join": (program(self._join, static_argnames="choice", donate_argnames="slots"), model),
            "decode": (
                program(self._decode, static_argnames=("count", "choice"), donate_argnames="slots"),
                model,
            ),
            "correct": (program(self._correct, donate_argnames="slots"), model),
            "maintain": (program(self._maintain, donate_argnames="slots"), model),
        }

    @property
    def compiled(self) -> int:
        """The number of programs that have been compiled."""
        return sum(job.done() for job in list(self._made.values()))

    @property
    def compiling(self) -> bool:
        """Whether any is being compiled, or read from disk."""
        return self.compiled < len(self._made)

    def run(self, name: str, *arrays: Any, size: int = 0, **static: Any) -> Any:
        """Runs a program, which is compiled if it has not been; `size` tells shapes apart."""
        wanted = Wanted.of(name, size, **static)
        job = self._made.get(wanted)
        if job is None or not job.done():
            began = time.perf_counter()
            self.expect([wanted])
            job = self._made[wanted]
            job.result()
            self.seconds += time.perf_counter() - began
        return job.result()(*arrays, **self._programs[name][1])

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Begins to compile programs that have not been, several at a time, and returns at once."""
        for each in wanted:
            if each not in self._made:
                made, model = self._programs[each.name]
                arrays = self._arguments(each.name, each.size)
                self._made[each] = made.ahead(*arrays, **model, **dict(each.static))

    def expect_answer(
        self, start: int, end: int, new_tokens: int, slot: int, choice: Choice
    ) -> None:
        """Begins to compile what a request runs that is alone.

        Its prompt is read from the token `start` on up to `end`, and it decodes in `slot`.
        """
        wanted = [
            Wanted.of("read", size, last=last) for size, last in self._sizes.chunks(start, end)
        ]
        wanted.append(Wanted.of("join", choice=choice))
        if new_tokens > 1:
            rows = self._sizes.rows_for(slot)
            count = self._sizes.steps if new_tokens > self._sizes.steps else 1
            wanted.append(Wanted.of("decode", rows, count=count, choice=choice))
        self.expect(wanted)

    def prepare(self, choices: Iterable[Choice] = ("greedy", "sampled")) -> None:
        """Compiles all programs that requests of these kinds need, several at a time."""
        wanted = [Wanted.of("start"), Wanted.of("begin")]
        full = {size for _, size in self._sizes.ladder}
        for size in full | set(self._sizes.tails):
            for last in (True, False) if size in full else (True,):
                wanted.append(Wanted.of("read", size, last=last))
            if self._policy.shares == "keys" and size in full:
                wanted.append(Wanted.of("replay", size))
        for choice in choices:
            wanted.append(Wanted.of("join", choice=choice))
            for rows, count in product(self._sizes.rows, sorted({1, self._sizes.steps})):
                wanted.append(Wanted.of("decode", rows, count=count, choice=choice))
        wanted += [Wanted.of(name) for name in self._policy.services.every]
        wanted = [each for each in wanted if each not in self._made]
        self.expect(wanted)
        try:
            for nth, each in enumerate(wanted):
                logger.info("compiled %d of %d programs", nth, len(wanted))
                self._made[each].result()
        except BaseException:
            # whoever interrupts need not wait for those that have not begun
            for each in wanted:
                if self._made[each].cancel():
                    del self._made[each]
            raise

    def made_from(self) -> tuple[Any, ...]:
        """Returns all that programs depend on beside their arguments."""
        return (
            *(self._decoder, self._policy, self._spec, self._sizes),
            *(self._knobs, self._layer_stats),
        )

    @cached_property
    def _shapes(self) -> tuple[Slots, Reading]:
        return jax.eval_shape(self._start), jax.eval_shape(self._begin)

    def _arguments(self, name: str, size: int) -> tuple[Any, ...]:
        """Returns the shapes of the arguments with which a program of this size is run."""
        if name in ("start", "begin"):
            return ()
        slots, reading = self._shapes
        number, groups = jnp.int32(0), jnp.zeros(self._spec.num_pages, jnp.int32)
        if name in ("read", "replay"):
            tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
            return slots, reading, tokens, groups, number, number
        if name == "join":
            knobs = {name: no_knob(name, 1) for name in self._knobs}
            return slots, reading, number, groups, number, self._sampling, knobs
        return slots, (jnp.zeros(size, jnp.int32) if name == "decode" else number)

    def _view(self, slots: Slots, active: Bool[Array, "B"] | None = None):
        """Returns the cache; rows that are not active are empty there, and cost nothing."""
        lengths = slots.lengths if active is None else jnp.where(active, slots.lengths, 0)
        return view(slots.pools, slots.groups, lengths, self._spec.num_kv_heads)

    def _start(self) -> Slots:
        return start_slots(self._policy, self._spec, self._sampling, self._knobs)

    def _begin(self) -> Reading:
        return start_reading(self._decoder, self._policy, self._spec)

    def _read(
        self,
        slots: Slots,
        reading: Reading,
        tokens: Int32[Array, "1 T"],
        groups: Int32[Array, "M"],
        start: Int32[Array, ""],
        valid: Int32[Array, ""],
        *,
        last: bool,
        weights: Any,
        constants: Any,
    ) -> tuple[Slots, Reading, Int32[Array, ""]]:
        """Reads a chunk of a prompt, from the position `start` on, into its groups.

        The last result is the position where the next chunk begins.
        """
        note_trace()
        policy, spec = self._policy, self._spec
        carry = inlined(prefill_chunk)(
            *(self._decoder, policy, weights, tokens, valid[None]),
            PrefillCarry(
                view(slots.pools, groups[None], start[None], spec.num_kv_heads),
                with_row_arrays(policy, spec, slots.state, reading.rows),
                *(reading.last_hidden, reading.windows),
            ),
            ReadOnly(constants),
            last=last,
        )
        own = row_arrays(policy, spec, slots.state)
        state = with_row_arrays(policy, spec, carry.state, own)
        rows = row_arrays(policy, spec, carry.state)
        return (
            slots._replace(pools=pools_of(carry.cache), state=state),
            Reading(rows, carry.last_hidden, carry.windows),
            start + valid,
        )

    def _replay(
        self,
        slots: Slots,
        reading: Reading,
        tokens: Int32[Array, "1 T"],
        groups: Int32[Array, "M"],
        start: Int32[Array, ""],
        valid: Int32[Array, ""],
        *,
        weights: Any,
        constants: Any,
    ) -> tuple[Slots, Reading, Int32[Array, ""]]:
        """Shows the policy a chunk whose K and V other requests have computed; as `_read`."""
        note_trace()
        policy, spec = self._policy, self._spec
        after = (start + valid)[None]
        cache = view(slots.pools, groups[None], after, spec.num_kv_heads)
        step = StepView(cache._replace(positions=start[None]), constants)
        state = with_row_arrays(policy, spec, slots.state, reading.rows)
        at = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        by_head = jnp.broadcast_to(at, (1, spec.num_kv_heads, at.size))
        for layer, held in enumerate(cache.layers):
            k, v = (read_slots(pool, held, by_head).swapaxes(1, 2) for pool in (held.k, held.v))
            # queries are not shared: those of the window come with the chunks behind
            window = (
                reading.windows[layer]
                if reading.windows
                else jnp.zeros((1, 0, spec.num_heads, spec.head_dim), spec.dtype)
            )
            seen = jnp.minimum(after, policy.window)
            part = PrefillView(
                *(tokens, at[None], k, v, valid[None], step, window, seen), last=False
            )
            state = policy.prefill(state, layer, part)
        rows = row_arrays(policy, spec, state)
        own = row_arrays(policy, spec, slots.state)
        state = with_row_arrays(policy, spec, state, own)
        return slots._replace(state=state), reading._replace(rows=rows), start + valid

    def _join(
        self,
        slots: Slots,
        reading: Reading,
        slot: Int32[Array, ""],
        groups: Int32[Array, "M"],
        length: Int32[Array, ""],
        sampling: RowSampling,
        knobs: dict[str, Array],
        *,
        choice: Choice,
        weights: Any,
        constants: Any,
    ) -> tuple[Slots, Packed]:
        """Puts a prompt that has been read into a slot, and chooses its first token."""
        note_trace()
        policy, spec, rows = self._policy, self._spec, slot[None]
        logits = to_logits(self._decoder, weights, reading.last_hidden)
        token, sampling, packed = self._choose(choice, sampling, jnp.int32(0), logits, None)
        part = (
            view(slots.pools, groups[None], length[None], spec.num_kv_heads),
            with_row_arrays(policy, spec, slots.state, reading.rows),
        )
        _, state = put_rows(policy, spec, self._view(slots), slots.state, part, rows)

        def put(all_rows: Any, one: Any) -> Any:
            return jax.tree.map(lambda x, new: x.at[rows].set(new), all_rows, one)

        slots = slots._replace(
            state=state,
            groups=put(slots.groups, groups[None]),
            lengths=put(slots.lengths, length[None]),
            tokens=put(slots.tokens, token),
            recent=put(slots.recent, jnp.zeros_like(slots.recent[:1])),
            made=put(slots.made, jnp.ones(1, jnp.int32)),
            sampling=put(slots.sampling, sampling),
            knobs=put(slots.knobs, knobs),
        )
        return slots, packed[None]

    def _decode(
        self,
        slots: Slots,
        counts: Int32[Array, "n"],
        *,
        count: int,
        choice: Choice,
        weights: Any,
        constants: Any,
    ) -> tuple[Slots, Packed]:
        """Runs `count` steps of the first n rows; row b takes part in the first `counts[b]`."""
        note_trace()
        all_slots, slots = slots, self._first(slots, counts.size)

        def step(slots: Slots, nth: Int32[Array, ""]) -> tuple[Slots, Int32[Array, "B w"]]:
            active = nth < counts
            beside = ReadOnly(constants, slots.knobs or None)
            logits, cache, state, stats = decode_step(
                *(self._decoder, self._policy, weights, slots.tokens, self._view(slots, active)),
                *(slots.state, beside, active),
            )
            chosen, sampling, packed = self._choose(
                choice, _of_active(slots.sampling, active), slots.made, logits, stats
            )
            sampling = slots.sampling._replace(seen=sampling.seen, counts=sampling.counts)
            recent = jnp.concatenate([slots.recent, slots.tokens[:, None]], axis=1)[:, 1:]
            return slots._replace(
                pools=pools_of(cache),
                state=state,
                lengths=slots.lengths + active,
                tokens=jnp.where(active, chosen, slots.tokens),
                recent=jnp.where(active[:, None], recent, slots.recent),
                made=slots.made + active,
                sampling=sampling,
            ), packed

        slots, packed = jax.lax.scan(step, slots, jnp.arange(count, dtype=jnp.int32))
        return self._with_first(all_slots, slots), packed

    def _first(self, slots: Slots, n: int) -> Slots:
        """Returns the first n rows, over the pages of all."""
        if n == self._spec.batch:
            return slots
        rows = jnp.arange(n)
        _, state = take_rows(self._policy, self._spec, self._view(slots), slots.state, rows)
        few = jax.tree.map(lambda x: x[:n], slots._replace(pools=(), state=()))
        return few._replace(pools=slots.pools, state=state)

    def _with_first(self, slots: Slots, few: Slots) -> Slots:
        """Returns all rows, the first of them and all pages from `few`."""
        if few.lengths.size == self._spec.batch:
            return few
        rows, part = jnp.arange(few.lengths.size), (self._view(few), few.state)
        _, state = put_rows(*(self._policy, self._spec, self._view(slots), slots.state, part, rows))
        put = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, 0),
            *(all_or_few._replace(pools=(), state=()) for all_or_few in (slots, few)),
        )
        return put._replace(pools=few.pools, state=state)

    def _correct(
        self, slots: Slots, slot: Int32[Array, ""], *, weights: Any, constants: Any
    ) -> Slots:
        """Recomputes the newest tokens of one row."""
        note_trace()
        recent = jnp.take(slots.recent, slot[None], axis=0)

        def work(cache, state):
            return inlined(correct)(
                *(self._decoder, self._policy, weights, recent, cache, state),
                ReadOnly(constants, self._row_of(slots.knobs, slot)),
            )

        return self._on_row(slots, slot, work)

    def _maintain(
        self, slots: Slots, slot: Int32[Array, ""], *, weights: Any, constants: Any
    ) -> Slots:
        """Runs the policy's maintenance on one row."""
        note_trace()
        knobs = self._row_of(slots.knobs, slot)
        return self._on_row(
            slots,
            slot,
            lambda cache, state: inlined(maintain)(
                self._policy, cache, state, ReadOnly(constants, knobs)
            ),
        )

    def _on_row(self, slots: Slots, slot: Int32[Array, ""], work: Callable[..., Any]) -> Slots:
        policy, spec, cache = self._policy, self._spec, self._view(slots)
        part = work(*take_rows(policy, spec, cache, slots.state, slot[None]))
        cache, state = put_rows(policy, spec, cache, slots.state, part, slot[None])
        return slots._replace(pools=pools_of(cache), state=state)

    def _row_of(self, knobs: dict[str, Array], slot: Int32[Array, ""]) -> dict[str, Array] | None:
        return {name: jnp.take(rows, slot[None]) for name, rows in knobs.items()} or None

    def _choose(
        self,
        choice: Choice,
        sampling: RowSampling,
        nth: Array,
        logits: Float32[Array, "B V"],
        stats: StepStats | None,
    ) -> tuple[Rows, RowSampling, Int32[Array, "B w"]]:
        """Chooses token number `nth` of each row; returns it and what the host wants to know."""
        if choice == "greedy":
            tokens, logprobs, _ = greedy((), nth, logits)
        else:
            tokens, logprobs, sampling = sampled(sampling, nth, logits)
        batch = tokens.shape[0]
        if stats is None:
            none = jnp.zeros((self._spec.num_layers, batch), jnp.float32)
            stats = StepStats(none, none)
        means = stats.over_layers()
        floats = [logprobs, means.attended, means.read]
        if self._layer_stats:
            floats += [*stats.attended, *stats.read]
        columns = [tokens[:, None], _bits(jnp.stack(floats, axis=1))]
        if choice == "top":
            top = top_logprobs(logits)
            columns += [top.ids, _bits(top.logprobs)]
        return tokens, sampling, jnp.concatenate(columns, axis=1)


def _of_active(sampling: RowSampling, active: Bool[Array, "B"]) -> RowSampling:
    """Returns the options without those of inactive rows, for whom nothing need be computed."""
    off = {
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "min_tokens": 0,
    }
    rows = {
        name: jnp.where(active, own := getattr(sampling, name), jnp.asarray(value, own.dtype))
        for name, value in off.items()
    }
    bias = jnp.where(active[:, None], sampling.bias_values, 0)
    return sampling._replace(**rows, bias_values=bias)


def _bits(x: Float32[Array, "B n"]) -> Int32[Array, "B n"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
