"""Feeds every policy the tokens with which dense attention continues a prompt.

This is teacher forcing: each decode step takes one of the tokens. With n steps a continuation has
n + 1 tokens. Its first follows from the prefill's logits, which are dense for every policy, so it
is only fed; each of the others is what one decode step had to predict.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jsparse import generation, memory, prompts
from jsparse.evaluation.shared_prefill import Shared, as_policies, prime
from jsparse.host_reader import OnProgress
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy, State, dense
from jsparse.runtime import capacity, session
from jsparse.runtime.decode_step import StepStats
from jsparse.shapes import Rows


class ForcedStep(NamedTuple):
    """Holds one decode step, on the device.

    Attributes:
        logits: the logits after the token that was fed.
        target: the token that really follows; it is fed next.
        stats: how much was attended and read.
        state: the policy's state, which the next step takes.
    """

    logits: Float32[Array, "B V"]
    target: Rows
    stats: StepStats
    state: State


class Forcing(NamedTuple):
    """Holds prompts that were read once, and the tokens that every policy is fed.

    Attributes:
        params: the model.
        shared: the prompts read by dense() and, after it, the policies.
        reference: dense attention's steps. Their logits stay on the device: steps · B · V float32.
        tokens: the continuation, n + 1 arrays.
        report: the callback for progress.
    """

    params: Params
    shared: Shared
    reference: list[ForcedStep]
    tokens: list[Rows]
    report: OnProgress

    def steps(self, index: int) -> Iterator[ForcedStep]:
        """Iterates over the steps of policy `index` of `shared`, dispatched as they are asked for.

        Index 0 is the reference.
        """
        if index == 0:
            return iter(self.reference)
        return self._run(index)

    def _run(self, index: int) -> Iterator[ForcedStep]:
        count, policies = len(self.reference), self.shared.policies
        forced = _decode(
            self.params,
            policies[index],
            self.shared.primed(index),
            lambda i, _: self.tokens[i],
            count,
        )
        for i, step in enumerate(forced, 1):
            self.report("decode", index * count + i, len(policies) * count)
            yield step


def force(
    params: Params,
    policies: Sequence[Policy | str],
    prompt: Any,
    *,
    max_new_tokens: int,
    continuation: Any = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnProgress | None = None,
) -> Forcing:
    """Reads the prompts for dense() and all policies, and lets dense attention continue them.

    Dense logits of all steps stay on the device (64 steps of 4 rows of 49,152 words: 50 MB), beside
    two caches while a policy decodes.

    Args:
        params: the model that `jsparse.load` returned.
        policies: policies or their expressions; dense() is put before them and need not be named.
        prompt: a prompt as `jsparse.generate` takes it; prompts may differ in length.
        max_new_tokens: n, the number of decode steps; nothing ends a continuation early, not even
            end tokens.
        continuation: the tokens to force, integers [B, n + 1]; None means dense attention's own,
            greedily.
        max_length: the cache's capacity in tokens, as in `jsparse.generate`.
        page_size: tokens per page.
        on_progress: a callback with ("prefill" | "decode", done, total), which count tokens of the
            prompt and steps of all policies.

    Raises:
        ValueError: an argument is out of its range, or prompt, steps and dense's logits do not fit.
    """
    rows, _ = prompts.encode(params, prompt)
    chosen = (dense(), *(policy for policy in as_policies(policies) if policy is not dense()))
    spec = generation.cache_spec(params, rows, max_new_tokens, max_length, page_size)
    given = (
        None if continuation is None else _given(params, continuation, len(rows), max_new_tokens)
    )
    needed, there = (
        4 * max_new_tokens * len(rows) * params.config.vocab_size,
        memory.available_bytes(),
    )
    if needed + 2 * spec.nbytes > there:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} for {len(rows)} prompt(s) takes "
            f"{memory.size(needed)} of dense logits and two caches of "
            f"{memory.size(spec.nbytes)}: must fit in the {memory.size(there)} that are free"
        )
    report = on_progress or (lambda *_: None)
    shared = prime(params, chosen, rows, spec, report)
    choose = _greedy if given is None else lambda i, _: given[i]
    with capacity.exhaustion(spec):
        reference = list(_decode(params, chosen[0], shared.primed(0), choose, max_new_tokens))
    report("decode", max_new_tokens, len(chosen) * max_new_tokens)
    tokens = [choose(0, shared.logits), *(step.target for step in reference)]
    return Forcing(params, shared, reference, tokens, report)


def _decode(
    params: Params,
    policy: Policy,
    primed: session.Primed,
    choose: Callable[[int, Array], Rows],
    steps: int,
) -> Iterator[ForcedStep]:
    """Decodes, with maintenance and corrections.

    `choose(i, logits)` is the continuation's token i.
    """
    logits, cache, state = primed
    recent, tokens = session.recent_tokens(policy), choose(0, logits)
    try:
        for i in range(1, steps + 1):
            logits, cache, state, stats = session.advance(
                params, policy, i, recent, tokens, cache, state
            )
            tokens = choose(i, logits)
            yield ForcedStep(logits, tokens, stats, state)
    finally:
        jax.block_until_ready(logits)  # a process that exits under a running step is aborted


@jax.jit
def _argmax(logits: Float32[Array, "B V"]) -> Rows:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _greedy(i: int, logits: Float32[Array, "B V"]) -> Rows:
    return _argmax(logits)


def _given(params: Params, continuation: Any, batch: int, steps: int) -> Int32[Array, "n B"]:
    """Returns the tokens to force, by step.

    Raises:
        ValueError: they are not ids of the vocabulary, or not of the right number.
    """
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
