"""Reads the prompts of a session's turn and decodes the answers."""

from collections.abc import Sequence
from contextlib import closing

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
from jsparse.runtime.sampling import chooser, forced_then_greedy
from jsparse.runtime.session import Session


def run(
    session: Session,
    asked: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    start: Sequence[int] | None = None,
) -> list[Generation]:
    """Reads the prompts of a session's next turn and decodes the answers.

    In a further turn, `start` are the tokens of each prompt that the session holds already.

    Raises:
        ValueError: the device's memory does not suffice.
    """
    keep_compilations()
    began, waits = clock(), waited()
    for request, streamer in zip(asked, streamers, strict=True):
        if isinstance(streamer, TokenStreamer):
            streamer.put(np.array([request.ids]))
    with capacity.exhaustion(session.deployment.spec):
        session.expect(
            *chooser(asked, session.deployment.params.config.vocab_size),
            limits=[request.sampling.max_tokens for request in asked],
            knobs=knobs(asked),
            report=report,
        )
        begins = [0] * len(asked) if start is None else start
        read = [request.ids[at:] for request, at in zip(asked, begins, strict=True)]
        session.prefill(read, report, start=start)
        return answers(session, asked, streamers, report, began, waits)


def answers(
    session: Session,
    asked: Sequence[Request],
    streamers: Sequence[Streamer],
    report: OnChunk,
    began: float,
    waits: float,
    questions: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Decodes the answers to prompts that the session has read.

    `began` and `waits` are `clock` and `waited` when the prompts were given. `questions` are tokens
    that follow each prompt and that decode steps process one by one, before they answer greedily: a
    policy that compresses the prompt has not seen them.
    """
    tokenizer = session.deployment.params.tokenizer
    turns = [()] * len(asked) if questions is None else questions
    rows = [
        OutputRow(OutputBuilder(request, 0, tokenizer, turn=turn), emit, len(turn))
        for request, emit, turn in zip(asked, streamers, turns, strict=True)
    ]
    reader = Reader(rows, report, clock)
    if questions is None:
        choose, given = chooser(asked, session.deployment.params.config.vocab_size)
    else:
        choose, given = forced_then_greedy, _table(questions)
    limits = [row.limit for row in rows]
    steps = session.steps(choose, given, limits=limits, knobs=knobs(asked))
    # so that the session is at rest even while someone looks at an exception
    with closing(steps):
        reader.read_all(steps)
    return reader.generations(began, waited() - waits, session.deployment.policy.name)


def _table(questions: Sequence[Sequence[int]]) -> Int32[Array, "n B"]:
    """Returns the questions by step, with -1 behind them; few sizes, since each compiles."""
    steps = capacity.bucket(max(1, *map(len, questions)), 1)
    table = np.full((steps, len(questions)), -1, np.int32)
    for row, question in enumerate(questions):
        table[: len(question), row] = question
    return jnp.asarray(table)
