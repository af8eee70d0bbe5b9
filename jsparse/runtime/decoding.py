"""Decodes the rows of a session, which start together, program by program."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import KVCache, ReadOnly
from jsparse.hooks import State
from jsparse.policy import Policy
from jsparse.runtime import room
from jsparse.runtime.admission import Deployment
from jsparse.runtime.decode_step import StepStats
from jsparse.runtime.draft_length import MOST_STEPS, Acceptance, DraftLength, Remaining
from jsparse.runtime.pauses import due, next_steps, until_due
from jsparse.runtime.rows import Batch, Step, decode_steps, first_tokens, no_recent, services_on
from jsparse.runtime.sampling import ChooseFn, constrained
from jsparse.runtime.session_prefill import PrefillResult
from jsparse.runtime.speculation import VerificationRound, speculate, verify_steps
from jsparse.runtime.spread_programs import by_rank, placed
from jsparse.runtime.store import empty_rows_on
from jsparse.shapes import Rows

# the verification rounds in flight when the oldest one's result helps to choose the draft length
LAG = 2
# The minimum number of tokens for which a program without drafts is worth compiling on a CPU,
# unless rounds of an earlier generation drafted nothing.
MIN_PROGRAM_TOKENS = 256


logger = logging.getLogger("jsparse.exact")


class Drafts(NamedTuple):
    """The outcome of a verification round, by row.

    Attributes:
        counts: the number of valid tokens per row (a prefix).
        drafted: the number of drafted tokens; if there are any, `counts - 1` were accepted.
    """

    counts: Rows
    drafted: Rows


class StepResult(NamedTuple):
    """The results of n steps of one program, on the device.

    Attributes:
        tokens, logprobs: the chosen tokens and their log-probabilities under the model's softmax.
        stats: the shares attended and read; None for the first token.
        overflow: the rows that had run out of room; their tokens are invalid from then on.
        logits: the logits that the tokens were chosen from; None unless requested.
        drafts: for a verification round, how many of the n tokens are valid in each row; None: all
            n.
    """

    tokens: Int32[Array, "n B"]
    logprobs: Float32[Array, "n B"]
    stats: StepStats | None
    overflow: Bool[Array, "n B"]
    logits: Float32[Array, "n B V"] | None
    drafts: Drafts | None = None


def without_logits(step: Step) -> StepResult:
    """Returns a step's results without its logits."""
    return with_logits(step)._replace(logits=None)


def with_logits(step: Step) -> StepResult:
    """Returns a step's results."""
    stats = step.stats and step.stats.over_layers()
    return StepResult(step.tokens, step.logprobs, stats, step.overflow, step.logits)


def of_round(made: VerificationRound) -> StepResult:
    """Returns a verification round's results without its logits."""
    over_layers = made.shares.over_layers()
    stats = StepStats(*(jnp.broadcast_to(share, made.tokens.shape) for share in over_layers))
    overflow = jnp.broadcast_to(made.overflow, made.tokens.shape)
    drafts = Drafts(made.counts, made.drafted)
    return StepResult(made.tokens, made.logprobs, stats, overflow, None, drafts)


def begun(
    tokens: Rows,
    cache: KVCache,
    state: State,
    given: Any,
    knobs: dict[str, Array] | None,
    *,
    policy: Policy,
    by_row: bool,
) -> Batch[KVCache]:
    """Returns a batch of rows that have chosen their first tokens, counted together or by row."""
    made = jnp.ones(tokens.shape, jnp.int32) if by_row else jnp.int32(1)
    recent = no_recent(policy, *tokens.shape)
    return Batch(tokens, cache, state, given, made, recent, knobs)


class Decoding:
    """Decoding of rows that start together, up to the largest of their limits.

    Attributes:
        batch: the rows; every program donates them.
        done: the number of tokens chosen per row, including the first, which `begin` chooses.
    """

    batch: Batch[KVCache]

    def __init__(
        self,
        deployment: Deployment,
        choose: ChooseFn,
        keep: Callable[[Step], StepResult],
        limits: Sequence[int],
    ) -> None:
        """Prepares to decode `limits[b]` tokens of row b; `keep` picks the results of a step."""
        self._deployment, self._limits = deployment, limits
        self._choose, self._keep, self.done = choose, keep, 1
        self._policy, self._store, mesh = (
            deployment.policy,
            deployment.store,
            deployment.params.mesh,
        )
        self._run, self._constants = self._program.on(mesh), deployment.constants()
        static = {"policy": self._policy, "by_row": self._counts_by_row}
        sharded, arrays = ("cache", "state"), ("tokens", "cache", "state", "given")
        begin = by_rank(begun, mesh, sharded=sharded, static=tuple(static), donated=arrays)
        self._begun: Callable[..., Batch[KVCache]] = partial(begin, **static)

    @property
    def finished(self) -> bool:
        """Whether all rows have reached their limits."""
        return self.done >= max(self._limits)

    def begin(
        self, prefilled: PrefillResult, given: Any, knobs: dict[str, Array] | None
    ) -> StepResult:
        """Chooses the tokens that follow the prompts.

        `given` is donated here; the cache and state of `prefilled` are donated by the first
        `advance`.
        """
        tokens, given, result = first_tokens.on(self._deployment.params.mesh)(
            self._choose, self._keep, given, prefilled.logits, prefilled.cache.overflow
        )
        knobs = jax.tree.map(jnp.copy, knobs)  # the batch is donated; the caller keeps its own copy
        batch = self._begun(tokens, prefilled.cache, prefilled.state, given, knobs)
        self.batch = self._store.committed(batch)
        return result

    def expect(
        self, given: Any, knobs: dict[str, Array] | None, prompts: Sequence[int]
    ) -> Future[Any] | None:
        """Starts compiling the first program, and the eviction of prompts of these lengths.

        Nothing happens if K and V move to host memory, since shapes are only known then.
        """
        if self.finished or self._store.single_steps:
            return None
        mesh, spec = self._deployment.params.mesh, self._deployment.spec
        tokens = jax.ShapeDtypeStruct((spec.batch,), jnp.int32)
        cache, state = empty_rows_on(mesh).eval_shape(spec, self._policy)
        if mesh is not None:
            cache, state = placed((cache, state), mesh)
        read_only = ReadOnly(self._constants, knobs)
        evicted = room.expect_eviction(
            self._policy, spec, cache, state, read_only, prompts, self._limits, mesh
        )
        shapes = jax.eval_shape(self._begun, tokens, *evicted, given, knobs)
        if mesh is not None:
            shapes = placed(shapes, mesh)
        return self._compile_ahead(shapes)

    def _compile_ahead(self, batch: Batch[KVCache]) -> Future[Any]:
        """Starts compiling the first program for a batch of these shapes."""
        return self._run.ahead(*self._arguments(), batch)

    def advance(self) -> StepResult:
        """Dispatches a program, and then the due services of the rows.

        A program runs several steps, or one if fewer remain to a service. Results of steps after
        the largest limit are dropped: they take less time than another program takes to compile.
        """
        count, left = self._count, max(self._limits) - self.done
        self.batch, result = self._run(*self._arguments(), self.batch)
        self.done += count
        if count > left:
            return jax.tree.map(lambda x: x[:left], result)
        params, read_only = self._deployment.params, self._read_only
        for service in due(self._policy.services.every, self._age):
            model = params.decoder, self._policy, params.weights
            self.batch = services_on(params.mesh)(service, *model, read_only, self.batch)
        # last: it replaces the pages in host memory that services read
        if self._store.every and self._age % self._store.every == 0:
            self._store.after_steps(self.batch.cache)
        return result

    @property
    def _age(self) -> int:
        """The number of steps that rows have run; the first token took none."""
        return self.done - 1

    @property
    def _count(self) -> int:
        """The number of steps of the next program."""
        if self._choose is constrained:
            return 1
        periods = [*self._policy.services.every.values(), self._store.every]
        pauses = until_due(filter(None, periods), self._age)
        return next_steps(self._deployment.max_steps, pauses)

    _program, _counts_by_row = decode_steps, False

    def _arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of the next program, before the batch."""
        static = self._policy, self._choose, self._count, self._keep
        params = self._deployment.params
        return params.decoder, *static, params.weights, self._read_only

    @property
    def _read_only(self) -> ReadOnly:
        return ReadOnly(self._constants, host=self._store.pages)


class Speculating(Decoding):
    """Decoding in verification rounds: the policy drafts, dense attention verifies.

    Rows advance by different numbers of tokens, which only the device knows; `done` is the minimum.
    If drafting does not pay, a program runs several rounds without drafts.
    """

    _program, _counts_by_row = speculate, True

    def __init__(self, deployment: Deployment, *others: Any) -> None:
        """Prepares to decode, as `Decoding` does; no draft is accepted yet."""
        super().__init__(deployment, *others)
        program = deployment.params.decoder, self._policy, deployment.spec, deployment.drafts
        self._length = DraftLength.continuing(program, adapts=deployment.adapts)
        # whether rounds without drafts get a program of their own
        self._apart = deployment.adapts and (
            jax.default_backend() == "gpu"
            or max(self._limits) >= MIN_PROGRAM_TOKENS
            or self._length.idles
        )
        self._on_device = jnp.asarray(self._limits, jnp.int32)
        self._narrow: Future[Callable[..., Any]] | None = None
        # each round's outcome, and whether the program of rounds without drafts ran it
        self._in_flight: deque[tuple[Drafts, bool]] = deque()
        self._looked = math.inf
        self._rows = [Remaining(limit - 1, Acceptance()) for limit in self._limits]

    def begin(
        self, prefilled: PrefillResult, given: Any, knobs: dict[str, Array] | None
    ) -> StepResult:
        """Chooses the first tokens, as `Decoding` does, and prepares programs without drafts."""
        result = super().begin(prefilled, given, knobs)
        if self._apart:
            self._narrow = self._compile_without_drafts(self.batch)
            self._narrow.add_done_callback(_log_failure)
        return result

    def advance(self) -> StepResult:
        """Dispatches a verification round, with the due services of the rows."""
        self._look_back()
        remaining, without = [row for row in self._rows if row.tokens > 0], self._without_drafts()
        most = self._length.choose(
            self._deployment.drafts, remaining=remaining, steps=without is not None
        )
        without = without if most == 0 else None
        if without is None:
            self.batch, result = self._run(*self._static, *self._given, _int32(most), self.batch)
            self.done += 1
        else:
            self.batch, result = without(*self._given, self.batch)
            self.done += len(result.tokens)
        self._in_flight.append((result.drafts, without is not None))
        return result

    def _compile_ahead(self, batch: Batch[KVCache]) -> Future[Any]:
        """Also starts compiling the program of rounds without drafts."""
        made = super()._compile_ahead(batch)
        if self._apart:
            self._compile_without_drafts(batch)
        return made

    def _compile_without_drafts(self, batch: Batch[KVCache]) -> Future[Callable[..., Any]]:
        """Starts compiling a program of rounds that each take the time of a dense step."""
        deployment = self._deployment
        count = min(deployment.max_steps, MOST_STEPS)
        static = deployment.params.decoder, self._policy, self._choose, count
        run = verify_steps.on(deployment.params.mesh)
        return run.ahead(*static, of_round, *self._given, batch)

    def _without_drafts(self) -> Callable[..., Any] | None:
        """Returns the program of rounds without drafts; None until it is compiled."""
        if self._narrow is None or not self._narrow.done() or self._narrow.exception():
            return None
        return self._narrow.result()

    def _look_back(self) -> None:
        """Observes the round before the last, while the last one keeps the device busy.

        Its time is counted from the end of the round before it. Rows that have reached an end of
        their own also count: they draft until the last row ends.
        """
        if len(self._in_flight) < LAG:
            return
        of_round, steps = self._in_flight.popleft()
        counts, drafted = map(np.asarray, of_round)
        before, self._looked = self._looked, time.perf_counter()
        took_part = counts > 0
        if not took_part.any():
            return
        self._length.observe(drafted[took_part].tolist(), (counts[took_part] - 1).tolist())
        for row, (wanted, acceptance) in enumerate(self._rows):
            acceptance.observe([int(drafted[row])], [max(int(counts[row]) - 1, 0)])
            self._rows[row] = Remaining(wanted - int(counts[row]), acceptance)
        if self._looked > before:
            rounds = int(counts.max()) if steps else 0
            self._length.took(1, int(drafted.max()), self._looked - before, steps=rounds)

    def _arguments(self) -> tuple[Any, ...]:
        return *self._static, *self._given, _int32(0)

    @property
    def _static(self) -> tuple[Any, ...]:
        """The arguments that determine the program of a round with drafts."""
        deployment = self._deployment
        return deployment.params.decoder, self._policy, self._choose, deployment.drafts, of_round

    @property
    def _given(self) -> tuple[Any, ...]:
        """The arguments of all programs before the batch or the number of drafts."""
        return self._deployment.params.weights, self._read_only, self._on_device


def _int32(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)


def _log_failure(job: Future[Any]) -> None:
    """Logs why rounds without drafts have no program of their own; larger programs run them."""
    if not job.cancelled() and job.exception() is not None:
        logger.warning("rounds without drafts cannot be compiled alone: %r", job.exception())
