"""Feeds every policy the tokens with which dense attention continues a prompt.

This is teacher forcing: each decode step takes one of the tokens. With n steps a continuation has n
+ 1 tokens. Its first follows from the prefill's logits, which are dense for every policy, so it is
only fed; each of the others is the target of one decode step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jsparse.builder import dense
from jsparse.evaluation.shared_prefill import SharedPrefill, as_policies, prime
from jsparse.hooks import State
from jsparse.machine import memory
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime import capacity
from jsparse.runtime.decode_step import StepStats
from jsparse.runtime.host_reader import OnChunk
from jsparse.runtime.sampling import ChooseFn, forced, greedy
from jsparse.runtime.session import Session
from jsparse.shapes import Rows
from jsparse.text import prompts


class ForcedStep(NamedTuple):
    """One decode step, on the device; `target` is the true next token, fed next."""

    logits: Float32[Array, "B V"]
    target: Rows
    stats: StepStats


class Forcing(NamedTuple):
    """Prefilled prompts, and the tokens that every policy is fed.

    `shared` has the prompts prefilled for dense() and the policies after it; `reference` has the
    steps of dense attention over K and V in the model's type, whose logits stay on the device:
    steps · B · V float32.
    """

    shared: SharedPrefill
    reference: list[ForcedStep]
    tokens: Int32[Array, "n B"]
    report: OnChunk

    def steps(self, index: int) -> Iterator[ForcedStep]:
        """Iterates over the steps of policy `index` of `shared`, dispatched on demand."""
        if index == 0 and self.shared.spec.kv_cache_dtype == "auto":
            return iter(self.reference)
        return self._run(index, self.shared.session(index))

    def steps_beside(self, policy: Policy, knobs: dict[str, Array]) -> Iterator[ForcedStep]:
        """Iterates over the steps of a further policy, which must not have a state.

        `knobs`: its hyper-parameters by name, a number per row. No progress is reported.
        """
        session, count = self.shared.with_policy(policy).session(0), len(self.reference)
        return _decode(session, forced, jnp.copy(self.tokens), count, knobs)

    def last_state(self, index: int) -> State:
        """Returns the state of policy `index` after all steps, which it runs again."""
        session = self.shared.session(index)
        for _ in self._run(index, session):
            pass
        return session.prefilled.state

    def _run(self, index: int, session: Session) -> Iterator[ForcedStep]:
        count, policies = len(self.reference), len(self.shared.policies)
        for i, step in enumerate(_decode(session, forced, jnp.copy(self.tokens), count), 1):
            self.report("decode", index * count + i, policies * count)
            yield step


def force(
    params: Params,
    policies: Sequence[AnyPolicy | str],
    prompt: Any,
    *,
    max_new_tokens: int,
    continuation: Any = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
) -> Forcing:
    """Prefills the prompts for dense() and all policies, and continues them with dense attention.

    Dense logits of all steps stay on the device (64 steps of 4 rows of 49,152 words: 50 MB), plus
    two caches while a policy decodes. dense() precedes the policies and need not be named.
    `max_new_tokens` is n, the number of decode steps; not even end tokens end a continuation early.
    K and V of the reference are in the model's type, even if those of the policies are in 8 bits.
    `continuation` has the tokens to force, integers [B, n + 1]; None: dense attention's own,
    greedily. `on_progress` receives ("prefill" | "decode", done, total), in tokens of the prompt
    and steps of all policies. The others are arguments of `jsparse.generate`.

    Raises:
        ValueError: an argument is out of range, or prompt, steps and dense's logits do not fit.
    """
    rows, _ = prompts.encode(params, prompt)
    chosen = (dense(), *(policy for policy in as_policies(policies) if policy is not dense()))
    spec = capacity.cache_spec(params, rows, max_new_tokens, max_length, page_size)
    given = (
        None if continuation is None else _given(params, continuation, len(rows), max_new_tokens)
    )
    exact = spec._replace(kv_cache_dtype="auto")
    rounded, largest = spec != exact, max(spec.nbytes, exact.nbytes)
    needed, there = (
        4 * max_new_tokens * len(rows) * params.config.vocab_size,
        memory.available_bytes(),
    )
    if needed + 2 * largest > there:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} for {len(rows)} prompt(s) takes "
            f"{memory.size(needed)} of dense logits and two caches of "
            f"{memory.size(largest)}: must fit in the {memory.size(there)} that are free"
        )
    report = on_progress or (lambda *_: None)
    table = jax.ShapeDtypeStruct((max_new_tokens + 1, len(rows)), jnp.int32)
    choose = (greedy, ()) if given is None else (forced, table)

    def expect(index: int, session: Session) -> None:
        of_reference = index == 0 and session.deployment.spec.kv_cache_dtype == "auto"
        lengths, limits = list(map(len, rows)), [max_new_tokens + 1] * len(rows)
        choice = choose if of_reference else (forced, table)
        session.expect(*choice, prompts=lengths, limits=limits, keep_logits=True)

    def reference_of(whole: SharedPrefill) -> tuple[list[ForcedStep], Rows]:
        """Returns dense attention's steps and the first token."""
        own = (greedy, ()) if given is None else (forced, jnp.copy(given))
        with capacity.exhaustion(whole.spec):
            steps = list(_decode(whole.session(0), *own, max_new_tokens))
        report("decode", max_new_tokens, len(chosen) * max_new_tokens)
        likeliest = jnp.argmax(whole.prefilled[0].logits, axis=-1).astype(jnp.int32)
        return steps, likeliest if given is None else given[0]

    if rounded:  # first, so that its cache is gone before there are others
        unrounded = replace(params, kv_cache_dtype="auto")
        reference, first = reference_of(
            prime(unrounded, (dense(),), rows, exact, report, expect=expect)
        )
        shared = prime(params, chosen, rows, spec, report, expect=expect)
    else:
        shared = prime(params, chosen, rows, spec, report, expect=expect)
        reference, first = reference_of(shared)
    tokens = jnp.stack([first, *(step.target for step in reference)])
    return Forcing(shared, reference, tokens, report)


def _decode(
    session: Session,
    choose: ChooseFn,
    given: Any,
    steps: int,
    knobs: dict[str, Array] | None = None,
) -> Iterator[ForcedStep]:
    """Decodes a number of steps, after the token that follows the prompt."""
    limits = [steps + 1] * session.deployment.spec.batch
    results = session.steps(choose, given, limits=limits, knobs=knobs, keep_logits=True)
    next(results)
    for result in results:
        logits, stats = result.logits, result.stats
        assert logits is not None
        assert stats is not None
        yield from map(ForcedStep, logits, result.tokens, map(StepStats, *stats))


def _given(params: Params, continuation: Any, batch: int, steps: int) -> Int32[Array, "n B"]:
    """Returns the tokens to force, by step; ValueError if ids or their number are wrong."""
    try:
        ids = np.asarray(continuation)
    except ValueError as error:
        raise ValueError(
            f"continuation: must be integers [B, n], all rows of one length ({error})"
        ) from None
    if ids.shape != (batch, steps + 1) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"continuation of shape {ids.shape} and type {ids.dtype}: must be integers "
            f"{(batch, steps + 1)}, one token more than max_new_tokens={steps} for each of the "
            f"{batch} prompt(s)"
        )
    if ids.min() < 0 or ids.max() >= params.config.vocab_size:
        raise ValueError(
            f"continuation ranges from {ids.min()} to {ids.max()}: must lie in 0 … "
            f"{params.config.vocab_size - 1}"
        )
    return jnp.asarray(ids.T, jnp.int32)
