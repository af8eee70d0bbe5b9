"""Prefills the prompts of a session's turn and decodes the outputs."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.runtime import capacity
from jsparse.runtime.collecting import OutputBuilder
from jsparse.runtime.compilation import clock, keep_compilations, waited
from jsparse.runtime.host_reader import (
    Generation,
    OnChunk,
    OutputRow,
    Reader,
    Streamer,
    TokenStreamer,
)
from jsparse.runtime.request import Request, knobs
from jsparse.runtime.sampling import (
    ChooseFn,
    RowSampling,
    allowed_tokens,
    chooser,
    constrained,
    forced_then_greedy,
)
from jsparse.runtime.session import Session


def run(
    session: Session,
    requests: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    start: Sequence[int] | None = None,
) -> list[Generation]:
    """Prefills the prompts of a session's next turn and decodes the outputs.

    In a further turn, `start` is the number of tokens of each prompt that are already in the cache.

    Raises:
        ValueError: the device's memory does not suffice, or outputs with a structure would be
            drafted.
    """
    if session.deployment.drafts and any(request.constraint for request in requests):
        raise ValueError(
            "exact=True: must be False with structured_outputs or bad_words here; jsparse.LLM "
            "takes both"
        )
    keep_compilations()
    began, waits = clock(), waited()
    stream_prompts(requests, streamers)
    with capacity.exhaustion(session.deployment.spec):
        expect(session, requests, report)
        starts = [0] * len(requests) if start is None else start
        read = [request.ids[at:] for request, at in zip(requests, starts, strict=True)]
        session.prefill(read, report, start=start)
        return answers(session, requests, streamers, report, began, waits)


def stream_prompts(requests: Sequence[Request], streamers: Sequence[Streamer]) -> None:
    """Gives streamers of token ids the prompts, which they expect first."""
    for request, streamer in zip(requests, streamers, strict=True):
        if isinstance(streamer, TokenStreamer):
            streamer.put(np.array([request.ids]))


def expect(
    session: Session,
    requests: Sequence[Request],
    report: OnChunk,
    questions: Sequence[Sequence[int]] | None = None,
) -> None:
    """Starts compiling the programs that `answers` will run with these arguments."""
    session.expect(
        *_choice(session, requests, questions),
        prompts=[len(request.ids) for request in requests],
        limits=_limits(requests, questions),
        knobs=knobs(requests),
        report=report,
    )


def answers(
    session: Session,
    requests: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    began: float,
    waits: float,
    questions: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Decodes the outputs of prompts that the session has prefilled.

    `began` and `waits` are the values of `clock` and `waited` when the prompts were submitted.
    `questions` are tokens that follow each prompt; decode steps process them one by one and then
    decode greedily. A policy that compresses the prompt has not seen them.
    """
    tokenizer = session.deployment.params.tokenizer
    turns = [()] * len(requests) if questions is None else questions
    rows = [
        OutputRow(OutputBuilder(request, 0, tokenizer, turn=turn), emit, len(turn))
        for request, emit, turn in zip(requests, streamers, turns, strict=True)
    ]
    choose, given = _choice(session, requests, questions)
    reader = Reader(rows, report, clock, at_once=choose is constrained)
    before_step = None
    if choose is constrained:
        before_step = partial(_allowed, rows, session.deployment.params.config.vocab_size)
    limits, own = _limits(requests, questions), knobs(requests)
    steps = session.steps(choose, given, limits=limits, knobs=own, before_step=before_step)
    # so that the session is idle even while an exception is being inspected
    with closing(steps):
        reader.read_all(steps)
    return reader.generations(began, waited() - waits, session.deployment.policy.name)


def _choice(
    session: Session, requests: Sequence[Request], questions: Sequence[Sequence[int]] | None
) -> tuple[ChooseFn, Any]:
    """Returns the function that chooses the tokens, and its initial carry."""
    if questions is not None:
        return forced_then_greedy, _table(questions)
    return chooser(requests, session.deployment.params.config.vocab_size)


def _allowed(rows: Sequence[OutputRow], vocab_size: int, given: RowSampling) -> RowSampling:
    """Returns the carry with the tokens that may follow the outputs so far."""
    outputs = [row.builder for row in rows]
    states = [None if each.finish else each.constraint for each in outputs]
    words = allowed_tokens([each.request for each in outputs], states, vocab_size)
    # on several devices the first axis is ranks
    words = np.broadcast_to(words, given.allowed.shape)
    return given._replace(allowed=jax.device_put(words, given.allowed.sharding))


def _limits(requests: Sequence[Request], questions: Sequence[Sequence[int]] | None) -> list[int]:
    """Returns the maximum number of tokens of each row's steps, including its question."""
    given = map(len, [()] * len(requests) if questions is None else questions)
    return [n + request.sampling.max_tokens for n, request in zip(given, requests, strict=True)]


def _table(questions: Sequence[Sequence[int]]) -> Int32[Array, "n B"]:
    """Returns the questions by step, padded with -1; few sizes, since each compiles."""
    steps = capacity.bucket(max(1, *map(len, questions)), 1)
    table = np.full((steps, len(questions)), -1, np.int32)
    for row, question in enumerate(questions):
        table[: len(question), row] = question
    return jnp.asarray(table)
