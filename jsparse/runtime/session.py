"""Runs a batch of requests over one cache: reads prompts, then decodes step by step.

There is one loop of decode steps, `Session.steps`. Generation, evaluation on given tokens and
benchmarks differ in how the next token is chosen (jsparse.runtime.sampling) and in what they do
with the results.

The host runs ahead: it never waits for a step before it dispatches the next (see
jsparse.runtime.host_reader). On a GPU several steps are one program, since the host takes longer to
start a program than the device to run a small model's step.
"""

import operator
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse import cache as kv_cache
from jsparse.cache import NOTHING, CacheSpec, KVCache, ReadOnly, step_view, without_host
from jsparse.host_memory.store import HostLayers, empty
from jsparse.model_facts.constants import constants
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import Decoder, Weights, to_logits
from jsparse.policy import AnyPolicy, Eviction, Policy, State, maintained
from jsparse.runtime import capacity, prefill
from jsparse.runtime.admission import admit
from jsparse.runtime.compilation import note_trace, program, traces
from jsparse.runtime.correct import correct
from jsparse.runtime.decode_step import StepStats, decode_step
from jsparse.runtime.owners import row_arrays, with_row_arrays
from jsparse.runtime.prefill import OnProgress, PrefillCarry, settle
from jsparse.runtime.sampling import ChooseFn
from jsparse.shapes import Rows


class StepResult(NamedTuple):
    """Holds the results of n steps of one program, on the device.

    Attributes:
        tokens, logprobs: the chosen tokens and their log-probabilities under the model's softmax.
        stats: how much was attended and read; None for the token that follows the prompt.
        overflow: the rows that had run out of room, whose tokens mean nothing from then on.
        logits: the logits that the tokens were chosen from; None unless asked for.
    """

    tokens: Int32[Array, "n B"]
    logprobs: Float32[Array, "n B"]
    stats: StepStats | None
    overflow: Bool[Array, "n B"]
    logits: Float32[Array, "n B V"] | None


class Carry(NamedTuple):
    """Holds what one decode step passes to the next; donated.

    Attributes:
        tokens: the newest token of each row, whose K and V the cache does not hold yet.
        cache, state: the cache and the policy's state.
        given: what the way to choose carries.
        nth: the number of the next token.
        recent: the newest tokens that the cache holds, as many as a correction recomputes.
    """

    tokens: Rows
    cache: KVCache
    state: State
    given: Any
    nth: Int32[Array, ""]
    recent: Int32[Array, "B n"]


@program(
    static_argnames=("decoder", "policy", "choose", "count", "keep_logits"),
    donate_argnames=("carry",),
)
def decode_steps(
    decoder: Decoder,
    policy: Policy,
    choose: ChooseFn,
    count: int,
    keep_logits: bool,
    weights: Weights,
    beside: ReadOnly,
    carry: Carry,
) -> tuple[Carry, StepResult]:
    """Runs `count` decode steps in one program, each of which chooses the token of the next."""
    note_trace()

    def step(carry: Carry, _: None) -> tuple[Carry, StepResult]:
        tokens, cache, state, given, nth, recent = carry
        logits, cache, state, stats = decode_step(
            decoder, policy, weights, tokens, cache, state, beside
        )
        chosen, logprobs, given = choose(given, nth, logits)
        recent = jnp.concatenate([recent, tokens[:, None]], axis=1)[:, 1:]
        result = StepResult(
            *(chosen, logprobs, stats.over_layers(), cache.overflow),
            logits if keep_logits else None,
        )
        return Carry(chosen, cache, state, given, nth + 1, recent), result

    if count > 1:
        return jax.lax.scan(step, carry, length=count)
    carry, result = step(carry, None)
    return carry, jax.tree.map(lambda x: x[None], result)


@program(static_argnames=("choose", "keep_logits"), donate_argnames=("given",))
def first_tokens(
    choose: ChooseFn,
    keep_logits: bool,
    given: Any,
    logits: Float32[Array, "B V"],
    overflow: Bool[Array, "B"],
) -> tuple[Rows, Any, StepResult]:
    """Chooses the tokens that follow the prompts."""
    tokens, logprobs, given = choose(given, jnp.int32(0), logits)
    result = StepResult(tokens, logprobs, None, overflow, logits if keep_logits else None)
    return tokens, given, jax.tree.map(lambda x: x[None], result)


first_logits = program(to_logits, static_argnames=("decoder",))


@program(static_argnames=("policy",), donate_argnames=("cache", "state"))
def maintain(
    policy: Policy, cache: KVCache, state: State, beside: ReadOnly = NOTHING
) -> tuple[KVCache, State]:
    """Runs the policy's maintenance on rows that are due: a batch, or what `take_rows` took."""
    note_trace()
    state, cache = maintained(policy, policy.services.maintain(state, step_view(cache, beside)))
    return without_host(cache), state


@partial(jax.jit, donate_argnames=("cache",))
def cut_back(cache: KVCache, positions: Rows) -> KVCache:
    """Drops all tokens from these positions on; all heads of a row hold the same tokens."""
    lengths = jnp.broadcast_to(positions[:, None], cache.layers[0].lengths.shape)
    layers = (kv_cache.truncate(layer, lengths) for layer in cache.layers)
    return cache._replace(
        layers=tuple(layers), positions=positions, overflow=jnp.zeros_like(cache.overflow)
    )


class Held(NamedTuple):
    """Holds the logits that follow the prompts, the cache and the policy's state."""

    logits: Float32[Array, "B V"]
    cache: KVCache
    state: State


class PromptEnd(NamedTuple):
    """Holds what a further turn starts from, besides K, V and page arrays."""

    positions: np.ndarray
    last_hidden: Array
    windows: tuple[Array, ...]
    rows: list[Array]


class Fresh(NamedTuple):
    """A session that has read nothing."""


class Ready(NamedTuple):
    """A session that has read prompts and not decoded since; `end` is None if none may follow."""

    held: Held
    end: PromptEnd | None


class Decoded(NamedTuple):
    """A session that has decoded since it read."""

    held: Held
    end: PromptEnd | None


class Busy(NamedTuple):
    """A session whose arrays a program has, or one that failed had."""

    end: PromptEnd | None = None


Stage = Fresh | Ready | Decoded | Busy
NOT_READY = "session: must have read prompts, and not be decoding"


class Session:
    """Holds a batch of rows, from their prompts on.

    Attributes:
        params, policy, spec: the model, the policy that runs and the sizes of the cache.
        store: where K and V lie.
        compiling: the seconds that steps have spent being compiled.
    """

    def __init__(
        self,
        params: Params,
        policy: AnyPolicy,
        spec: CacheSpec,
        *,
        resumable: bool = False,
        adopts: bool = False,
        steps_per_program: int | None = None,
    ) -> None:
        """Prepares an empty session; nothing is allocated before the prompts are read.

        Args:
            params: the model.
            policy: the policy that decodes.
            spec: the sizes of the cache, whose batch is the number of rows.
            resumable: whether `read` will be called again, for further turns; it keeps a copy of
                the arrays that rows own in the policy's state.
            adopts: whether it will take over prompts that were read elsewhere, so that their memory
                need not be free now.
            steps_per_program: the most decode steps per program; None is 8 on a GPU, 1 elsewhere.

        Raises:
            ValueError: the policy needs a constant that the model lacks, asks for what cannot be
                had together, or memory does not suffice.
        """
        admitted = admit(
            params,
            policy,
            spec,
            further_turns=resumable,
            steps_per_program=steps_per_program,
            allocates=not adopts,
        )
        self.params, self.policy, self.spec = params, admitted.policy, spec
        self.store, self._most_steps = admitted.store, admitted.steps
        self.compiling = 0.0
        self._resumable = resumable
        self._stage: Stage = Fresh()
        self._expected: Future[Any] | None = None
        self._age = 0

    @property
    def held(self) -> Held:
        """What the session holds now; steps take it away while they run.

        Raises:
            ValueError: there is nothing.
        """
        if not isinstance(self._stage, Ready | Decoded):
            raise ValueError(NOT_READY)
        return self._stage.held

    @property
    def can_read_on(self) -> bool:
        """Whether `read` can take a further turn."""
        return isinstance(self._stage, Ready | Decoded) and self._stage.end is not None

    def clock(self) -> float:
        """Returns a time in seconds that stands still while steps are compiled."""
        return time.perf_counter() - self.compiling

    def read(self, rows: Sequence[Sequence[int]], report: OnProgress = lambda *_: None) -> None:
        """Reads the prompts, densely.

        Called again, it reads a further turn: rows are cut back to the end of the last prompt, and
        `rows` are the tokens that follow there, those that were generated included. They are read
        densely, as a prompt is: K and V of generated tokens came from sparse attention.

        Raises:
            ValueError: there is not one list of tokens per row, they do not fit in the cache, the
                session cannot take a further turn, or is decoding. It is left as it was.
        """
        lengths = np.array([len(ids) for ids in rows], np.int32)
        if len(rows) != self.spec.batch:
            raise ValueError(f"rows has {len(rows)} entries: must be {self.spec.batch}")
        if not lengths.any():
            raise ValueError(f"rows={list(rows)}: must not all be empty")
        before = self._tokens_before()
        if (before + lengths).max() > self.spec.capacity:
            raise ValueError(
                f"rows of {(before + lengths).tolist()} tokens: must fit in the "
                f"{self.spec.capacity} of the cache"
            )
        carry = self.store.committed(self._start())
        tokens = np.zeros((len(rows), lengths.max()), np.int32)
        for b, ids in enumerate(rows):
            tokens[b, : len(ids)] = ids
        decoder, weights = self.params.decoder, self.params.weights
        carry = prefill.read_prompts(
            *(decoder, self.policy, weights, tokens, lengths, carry),
            beside=ReadOnly(constants(self.params, self.policy, report)),
            store=self.store,
            report=report,
        )
        end = None
        if self._resumable:
            own = [jnp.copy(x) for x in row_arrays(self.policy, self.spec, carry.state)]
            end = PromptEnd(before + lengths, carry.last_hidden, carry.windows, own)
        logits = first_logits(decoder, weights, carry.last_hidden)
        self._stage, self._age = Ready(Held(logits, carry.cache, carry.state), end), 0

    def expect(
        self,
        choose: ChooseFn,
        given: Any,
        *,
        limits: Sequence[int],
        knobs: dict[str, Array] | None = None,
        report: OnProgress = lambda *_: None,
    ) -> None:
        """Begins to compile the program that `steps` will run with these arguments.

        So it compiles while the prompts are read. Where the shapes are known only then, since the
        policy reworks the cache after the prompt or K and V move to host memory, nothing happens.
        """
        policy, spec = self.policy, self.spec
        if max(limits) < 2 or policy.evicts or self.store.single_steps:
            return
        cache, state = empty.eval_shape(spec, policy)
        recent = jnp.zeros((spec.batch, policy.services.correct_every), jnp.int32)
        carry = Carry(
            *(jnp.zeros(spec.batch, jnp.int32), cache, state, given, jnp.int32(1), recent)
        )
        self._expected = decode_steps.ahead(
            *(self.params.decoder, policy, choose, self._count(1, limits), False),
            *(self.params.weights, ReadOnly(constants(self.params, policy, report), knobs)),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), carry),
        )

    def adopt(self, held: Held, pages: HostLayers | None = None) -> None:
        """Takes over prompts that were read elsewhere for this policy, with K and V on the device.

        They go where the session's store keeps them; `pages` are those in host memory, if they have
        been copied there.
        """
        chunk = prefill.chunk_tokens(self.params.decoder, self.spec.batch)
        held = held._replace(cache=self.store.adopt(held.cache, chunk, pages))
        self._stage, self._age = Ready(held, None), 0

    def steps(
        self,
        choose: ChooseFn,
        given: Any,
        *,
        limits: Sequence[int],
        knobs: dict[str, Array] | None = None,
        keep_logits: bool = False,
    ) -> Generator[StepResult]:
        """Decodes, and yields the results of each program once it is dispatched.

        The first result is the token that follows the prompt. A program runs several steps, or one
        where fewer remain to a row's limit or to a due maintenance or correction. Whoever has seen
        enough stops iterating.

        Args:
            choose: the way to choose tokens.
            given: what it carries at first, which is donated.
            limits: the number of tokens of each row, from the first on; rows that have reached
                theirs decode on, for nothing, while others have not.
            knobs: hyper-parameters that differ by row.
            keep_logits: whether results hold the logits.

        Raises:
            ValueError: nothing has been read since the last steps, there is not one limit per row,
                or a shared pool has, or `after_prompt` left, less room than the policy says heads
                may need.
        """
        decoder, policy = self.params.decoder, self.policy
        beside = ReadOnly(constants(self.params, policy), knobs)
        stage = self._stage
        if isinstance(stage, Decoded):
            raise ValueError("session: must read before it decodes again")
        if len(limits) != self.spec.batch or min(limits) < 1:
            raise ValueError(
                f"limits={list(limits)}: must be {self.spec.batch} numbers of at least 1, one per "
                "row"
            )
        if not isinstance(stage, Ready):
            raise ValueError(NOT_READY)
        logits, cache, state = stage.held
        eviction = policy.eviction or Eviction()
        if eviction.most is not None and self.spec.pool_pages is not None:
            # rows take pages for as long as any decodes
            self._require_pages(self._wanted(cache, [max(limits)] * self.spec.batch))
        self._stage = Busy(stage.end)  # donated
        if eviction.after_prompt is not None:
            slots = capacity.slots_left(max(self._wanted(cache, limits)), self.spec)
            state, cache = eviction.after_prompt(state, step_view(cache, beside), slots)
            self._require_room(cache, slots)
        tokens, given, result = first_tokens(choose, keep_logits, given, logits, cache.overflow)
        recent = jnp.zeros((self.spec.batch, policy.services.correct_every), jnp.int32)
        carry = Carry(tokens, cache, state, given, jnp.int32(1), recent)
        carry = self.store.committed(carry)
        try:
            yield result
            done = 1
            while done < max(limits):
                count = self._count(done, limits)
                beside = beside._replace(host=self.store.pages)
                began, traced = time.perf_counter(), traces()
                expected, self._expected = self._expected, None
                if expected is not None:
                    expected.result()
                carry, result = decode_steps(
                    *(decoder, policy, choose, count, keep_logits),
                    *(self.params.weights, beside, carry),
                )
                done, self._age = done + count, self._age + count
                carry = self._serviced(carry, beside)
                if expected is not None or traces() != traced:
                    self.compiling += time.perf_counter() - began
                yield result
        finally:
            settle(carry, self.store.pages)
            # a program that failed may have taken what it was given
            if not any(array.is_deleted() for array in jax.tree.leaves(carry)):
                held = Held(logits, carry.cache, carry.state)
                self._stage = Decoded(held, stage.end)

    def _tokens_before(self) -> np.ndarray:
        """Returns the number of tokens of each row that the next prompt follows."""
        if isinstance(self._stage, Fresh):
            return np.zeros(self.spec.batch, np.int32)
        if self._stage.end is not None:
            return self._stage.end.positions
        if isinstance(self._stage, Busy):
            raise ValueError("session: must begin anew after a turn that failed")
        raise ValueError("resumable=False: must be True to read a further turn")

    def _start(self) -> PrefillCarry:
        """Returns the carry of the next prompt."""
        if isinstance(self._stage, Fresh):
            self._stage = Busy()
            chunk = prefill.chunk_tokens(self.params.decoder, self.spec.batch)
            return prefill.start(self.params.decoder, self.policy, *self.store.begin(chunk))
        held, end = self.held, self._stage.end
        assert end is not None
        self._stage = Busy()  # donated
        cache = self.store.after_cut(cut_back(held.cache, jnp.asarray(end.positions)))
        state = with_row_arrays(self.policy, self.spec, held.state, end.rows)
        return PrefillCarry(cache, state, end.last_hidden, end.windows)

    def _count(self, done: int, limits: Sequence[int]) -> int:
        """Returns the number of steps that the next program runs."""
        left = [limit - done for limit in limits if limit > done]
        due = [
            every - self._age % every
            for every in (*self.policy.services.every.values(), self.store.every)
            if every
        ]
        return self._most_steps if min(left + due) >= self._most_steps else 1

    def _serviced(self, carry: Carry, beside: ReadOnly) -> Carry:
        """Runs the corrections and the maintenance that are due; all rows are of one age."""
        policy, (cache, state) = self.policy, carry[1:3]
        due = [name for name, every in policy.services.every.items() if self._age % every == 0]
        if "correct" in due:
            cache, state = correct(
                *(self.params.decoder, policy, self.params.weights, carry.recent),
                *(cache, state, beside),
            )
        if "maintain" in due:
            # what it reads lies in the tail
            cache, state = maintain(policy, cache, state, beside._replace(host=None))
        if self.store.every and self._age % self.store.every == 0:
            self.store.after_steps(cache)
        return carry._replace(cache=cache, state=state)

    def _wanted(self, cache: KVCache, limits: Sequence[int]) -> list[int]:
        """Returns the slots that a head of each row may come to need, once the prompts are read."""
        eviction, prompts = self.policy.eviction, np.asarray(cache.positions).tolist()
        most = (eviction and eviction.most) or operator.add
        return [most(prompt, new) for prompt, new in zip(prompts, limits, strict=True)]

    def _require_pages(self, wanted: Sequence[int]) -> None:
        """Raises ValueError if a shared pool cannot hold what a policy says that heads may need."""
        spec = self.spec
        assert spec.pool_pages is not None
        pages = 1 + spec.num_kv_heads * sum(-(-slots // spec.page_size) for slots in wanted)
        if spec.pool_pages < pages:
            raise ValueError(
                f"pool_pages={spec.pool_pages}: must be at least {pages}, the scratch page and the "
                f"pages of heads of {list(wanted)} tokens, which {self.policy} may come to hold"
            )

    def _require_room(self, cache: KVCache, slots: int) -> None:
        """Raises ValueError if heads have less room than rows may need."""
        left = min(layer.capacity for layer in cache.layers)
        if left < slots:
            raise ValueError(
                f"policy={self.policy}: after_prompt left room for {left} tokens per head: must be "
                f"at least {slots}, as `most` says"
            )
