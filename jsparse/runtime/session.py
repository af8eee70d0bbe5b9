"""Runs a batch of requests over one cache: prefill, then decoding step by step.

All decode steps run in one loop, `Session.steps`. Generation, evaluation on given tokens and
benchmarks differ in how the next token is chosen (jsparse.runtime.sampling) and in how they use the
results.

The host runs ahead: it never waits for a step before it dispatches the next (see
jsparse.runtime.host_reader). On a GPU one program runs several steps, since the host takes longer
to start a program than the device takes for a small model's step.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jsparse.cache import CacheSpec, ReadOnly
from jsparse.host_memory.pages import HostLayers
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy
from jsparse.runtime import chunk_attention, room
from jsparse.runtime.admission import admit
from jsparse.runtime.compilation import when_made
from jsparse.runtime.decoding import (
    Decoding,
    Speculating,
    StepResult,
    with_logits,
    without_logits,
)
from jsparse.runtime.prefill import OnChunk, settle
from jsparse.runtime.sampling import ChooseFn, forced, forced_then_greedy
from jsparse.runtime.session_prefill import (
    PrefillResult,
    PromptEnd,
    SessionPrefill,
    TokenRows,
    padded,
)
from jsparse.runtime.spread_programs import on_host


class Fresh(NamedTuple):
    """A session before its first prefill."""


class Ready(NamedTuple):
    """A session after prefill, before decoding.

    Attributes:
        prefilled: the result of prefill.
        end: the state that a further turn starts from; None if none is possible.
        compressed: whether the policy's `after_prompt` has run.
    """

    prefilled: PrefillResult
    end: PromptEnd | None
    compressed: bool = False


class Decoded(NamedTuple):
    """A session that has decoded since its last prefill."""

    prefilled: PrefillResult
    end: PromptEnd | None


class Busy(NamedTuple):
    """A session whose arrays were donated: prefill or decoding is running, or has failed."""

    end: PromptEnd | None = None


Stage = Fresh | Ready | Decoded | Busy
NOT_READY = "session: must have prefilled prompts, and neither be decoding nor have failed"


class Session:
    """A batch of rows, from prefill to the last token.

    Attributes:
        deployment: the model, the policy that runs, the sizes of the cache, and the store of K and
            V.
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
        drafts: int | None = 0,
    ) -> None:
        """Creates an empty session; nothing is allocated before prefill.

        Args:
            params: the model.
            policy: the policy that decodes.
            spec: the sizes of the cache; its batch is the number of rows.
            resumable: whether `prefill` will be called again for further turns; the session then
                keeps a copy of the row arrays of the policy's state.
            adopts: whether the session will take over prefilled prompts, so that their memory need
                not be free now.
            steps_per_program: the maximum number of decode steps per program; None: 8 on a GPU, 1
                elsewhere.
            drafts: the number of tokens that the policy drafts per verification round, so that the
                output is dense attention's; 0: no drafting; None: the fastest number.

        Raises:
            ValueError: the policy needs a constant that the model lacks, its requirements conflict,
                it cannot draft, or memory does not suffice.
        """
        self.deployment = admit(
            params,
            policy,
            spec,
            further_turns=resumable,
            steps_per_program=steps_per_program,
            allocates=not adopts,
            drafts=drafts,
        )
        self._prefill = SessionPrefill(self.deployment, resumable=resumable)
        self._stage: Stage = Fresh()
        self._expected: Future[Any] | None = None

    @property
    def prefilled(self) -> PrefillResult:
        """The result of prefill and later steps; unavailable while steps run.

        Raises:
            ValueError: there is none.
        """
        if not isinstance(self._stage, Ready | Decoded):
            raise ValueError(NOT_READY)
        return self._stage.prefilled

    @property
    def can_continue(self) -> bool:
        """Whether `prefill` can run a further turn."""
        return isinstance(self._stage, Ready | Decoded) and self._stage.end is not None

    @property
    def prompt_lengths(self) -> list[int] | None:
        """The tokens of each row up to the end of its last prompt; None: no further turn."""
        end = None if isinstance(self._stage, Fresh) else self._stage.end
        return None if end is None else end.positions.tolist()

    @property
    def _positions(self) -> list[int]:
        """The number of tokens in the cache, per row."""
        return on_host(self.prefilled.cache.positions, self.deployment.params.mesh).tolist()

    def prefill(
        self,
        rows: TokenRows,
        report: OnChunk = lambda *_: None,
        *,
        start: Sequence[int] | None = None,
    ) -> None:
        """Prefills the prompts, densely.

        Later calls prefill a further turn: rows are truncated to the end of the last prompt, and
        `rows` are the tokens that follow it, including generated ones. These are recomputed
        densely, because sparse attention produced their K and V.

        If dense attention produced them (`Deployment.keeps_generated`), row b may keep its first
        `start[b]` tokens. For a policy with a window of W queries, at least W tokens must follow.

        Raises:
            ValueError: there is not one list of tokens per row, the tokens do not fit in the cache,
                the session cannot run a further turn or keep `start` tokens, or it is decoding. The
                session is unchanged.
        """
        end = self._last_end()
        kept = self._kept(start, end)
        prompts = padded(rows, self.deployment.spec, kept)
        window, goes_on = self.deployment.policy.window, end is not None and (kept > end.positions)
        if np.any(goes_on & (prompts.lengths < window)):
            raise ValueError(
                f"rows of {prompts.lengths.tolist()} tokens: must have at least {window} after an "
                f"output, the last queries that {self.deployment.policy} uses"
            )
        before = (
            None if end is None else (self.prefilled, end)
        )  # `prefilled` refuses a busy session
        self._stage = Busy()  # donated
        self._stage = Ready(*self._prefill.run(prompts, before, kept, report))

    def _kept(self, start: Sequence[int] | None, end: PromptEnd | None) -> np.ndarray:
        """Returns the tokens that rows keep in a further turn.

        Raises:
            ValueError: they cannot keep `start` tokens.
        """
        least = np.zeros(self.deployment.spec.batch, np.int32) if end is None else end.positions
        if start is None:
            return least
        most = least
        if end is not None and self.deployment.keeps_generated:
            most = np.asarray(self._positions)
        if (
            len(start) != len(least)
            or not all(isinstance(at, int | np.integer) for at in start)
            or not all(a <= at <= b for a, at, b in zip(least, start, most, strict=True))
        ):
            raise ValueError(
                f"start={list(start)}: must be one integer per row, from {least.tolist()} to "
                f"{most.tolist()}"
            )
        return np.asarray(start, np.int32)

    def expect(
        self,
        choose: ChooseFn,
        given: Any,
        *,
        prompts: Sequence[int],
        limits: Sequence[int],
        knobs: dict[str, Array] | None = None,
        keep_logits: bool = False,
        report: OnChunk = lambda *_: None,
    ) -> None:
        """Starts compiling the programs that `steps` will run with these arguments.

        They compile during prefill. `prompts` are the tokens in the cache after it, per row.
        Nothing happens if K and V move to host memory, since shapes are only known then.
        """
        self.deployment.constants(report)
        decoding = self._decoding(choose, limits, keep_logits=keep_logits)
        self._expected = decoding.expect(given, knobs, prompts)

    def adopt(
        self,
        prefilled: PrefillResult,
        pages: HostLayers | None = None,
        *,
        compressed: bool = False,
    ) -> None:
        """Takes over prompts prefilled elsewhere for this policy, with K and V on the device.

        The session's store takes K and V; `pages` are their copies in host memory, if there are
        any. `compressed`: the policy's `after_prompt` has run.
        """
        _, policy, spec, *_ = self.deployment
        chunk = chunk_attention.chunk_tokens(spec, policy.prefill_method)
        prefilled = prefilled._replace(
            cache=self.deployment.store.adopt(prefilled.cache, chunk, pages)
        )
        self._stage = Ready(prefilled, None, compressed)

    def compress(self, limits: Sequence[int], knobs: dict[str, Array] | None = None) -> None:
        """Runs the policy's `after_prompt`, if it has one and that has not been done.

        `limits` and `knobs` are those of `steps`, which calls it.

        Raises:
            ValueError: as `steps`.
        """
        stage = self._ready(limits)
        params, policy, spec, *_ = self.deployment
        if policy.eviction is None or stage.compressed:
            return
        prompts = self._positions  # blocks on the prompts
        room.require_pages(policy, spec, prompts, limits)
        self._stage = Busy(stage.end)
        read_only = ReadOnly(self.deployment.constants(), knobs)
        logits, cache, state = stage.prefilled
        cache, state = room.after_prompt(
            policy, spec, cache, state, read_only, prompts, limits, params.mesh
        )
        self._stage = Ready(PrefillResult(logits, cache, state), stage.end, compressed=True)

    def steps(
        self,
        choose: ChooseFn,
        given: Any,
        *,
        limits: Sequence[int],
        knobs: dict[str, Array] | None = None,
        keep_logits: bool = False,
        before_step: Callable[[Any], Any] | None = None,
    ) -> Generator[StepResult]:
        """Decodes, and yields the results of each program once it is dispatched.

        The first result is the token that follows the prompt. A program runs several steps, or one
        if fewer remain to a due maintenance or correction. Stop iterating to end early.

        Args:
            choose: the function that chooses tokens.
            given: its initial carry, which is donated.
            limits: the number of tokens of each row, including the first. Unless they draft, rows
                at their limit decode on, without use, until all rows are at theirs.
            knobs: hyper-parameters that differ by row.
            keep_logits: whether results hold the logits.
            before_step: returns the carry for a program, given that of the one before it, whose
                results the caller has; None: the same.

        Raises:
            ValueError: there was no prefill since the last steps, there is not one limit per row,
                or a shared pool, or the cache that `after_prompt` returned, has too little room for
                the policy.
        """
        self._ready(limits)
        decoding = self._decoding(choose, limits, keep_logits=keep_logits)
        self.compress(limits, knobs)
        stage = self._ready(limits)
        prefilled = stage.prefilled
        self._stage = Busy(stage.end)  # donated
        result = decoding.begin(prefilled, given, knobs)
        try:
            yield result
            while not decoding.finished:
                if before_step is not None:
                    batch = decoding.batch
                    decoding.batch = batch._replace(given=before_step(batch.given))
                yield self._advanced(decoding)
        finally:
            batch = decoding.batch
            settle(batch, self.deployment.store.pages)
            # a failed program may have consumed its donated arguments
            if not any(array.is_deleted() for array in jax.tree.leaves(batch)):
                self._stage = Decoded(
                    PrefillResult(prefilled.logits, batch.cache, batch.state), stage.end
                )

    def _ready(self, limits: Sequence[int]) -> Ready:
        """Returns the stage after prefill.

        Raises:
            ValueError: there is none, or `limits` is not one number of at least 1 per row.
        """
        if isinstance(self._stage, Decoded):
            raise ValueError("session: must prefill before it decodes again")
        batch = self.deployment.spec.batch
        if len(limits) != batch or min(limits) < 1:
            raise ValueError(
                f"limits={list(limits)}: must be {batch} numbers of at least 1, one per row"
            )
        if not isinstance(self._stage, Ready):
            raise ValueError(NOT_READY)
        return self._stage

    def _decoding(
        self,
        choose: ChooseFn,
        limits: Sequence[int],
        *,
        keep_logits: bool = False,
    ) -> Decoding:
        keep = with_logits if keep_logits else without_logits
        if self.deployment.drafts and (keep_logits or choose in (forced, forced_then_greedy)):
            raise ValueError("drafts: must be 0 to keep logits, or to decode given tokens")
        kind = Speculating if self.deployment.drafts else Decoding
        return kind(self.deployment, choose, keep, limits)

    def _advanced(self, decoding: Decoding) -> StepResult:
        """Dispatches the next program, once compiled; returns its results."""
        expected, self._expected = self._expected, None
        if expected is not None:
            when_made(expected)
        return decoding.advance()

    def _last_end(self) -> PromptEnd | None:
        """Returns the end of the last prompt; None for an empty cache.

        Raises:
            ValueError: the session cannot run a further turn.
        """
        if isinstance(self._stage, Fresh):
            return None
        if self._stage.end is not None:
            return self._stage.end
        if isinstance(self._stage, Busy):
            raise ValueError(
                "session: must not be decoding; after a failed turn, create a new session"
            )
        if self._prefill.resumable:
            raise ValueError("session: must have prefilled its own prompts to run a further turn")
        raise ValueError("resumable=False: must be True to run a further turn")
