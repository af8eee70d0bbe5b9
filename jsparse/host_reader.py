"""Reads results back from the device and turns them into ids, text and statistics.

The host reads each step a few steps after it was dispatched, so that the device never waits for it.
A stop rule or a full cache that it finds then ends the loop; the few steps made in the meantime are
dropped.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jsparse.runtime.decode_step import StepStats
from jsparse.text_stream import TextStream

HOST_LAG = 2
Streamer = Callable[[str], Any]
OnProgress = Callable[[str, int, int], Any]


@dataclass(frozen=True)
class GenerationStats:
    """Holds the statistics of one prompt's generation; times are of the whole batch.

    Attributes:
        prompt_tokens, new_tokens: this prompt's number of tokens, and of new tokens.
        prefill_seconds: the time until the first token of the batch was known, including prefill's
            compilation, if there was any.
        decode_tokens_per_second: the speed of all rows together, from the second token on and so
            without compilation; None for fewer than three tokens.
        attended_fraction: tokens attended over positions so far, averaged over steps, layers and KV
            heads; None if no decode step was run.
        read_fraction: the same fraction for tokens whose K and V were read.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_tokens_per_second: float | None
    attended_fraction: float | None
    read_fraction: float | None


@dataclass(frozen=True)
class Generation:
    """Holds what was generated for one prompt.

    Attributes:
        text: the new text, without special tokens and the stop string; "" if the model has no
            tokenizer.
        token_ids: the new ids, including the end token if one came.
        logprobs: the ids' natural log-probabilities under the model's own softmax, before sampling
            options; None unless asked for.
        finish_reason: "stop" (an end token or a stop string) or "length".
        stats: counts, times and attended fractions.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[float] | None = None


class StepResult(NamedTuple):
    """Holds one step's results, still on the device."""

    tokens: Array
    logprobs: Array
    stats: StepStats | None
    overflow: Array


@dataclass
class Row:
    """Collects one prompt's growing output on the host."""

    stream: TextStream
    ends: frozenset[int]
    emit: Streamer
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    attended: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    finish: str | None = None

    def take(self, token: int, logprob: float, attended: float | None, read: float | None) -> None:
        if self.finish:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if attended is not None and read is not None:
            self.attended.append(attended)
            self.read.append(read)
        piece = "" if token in self.ends else self.stream.push(token)
        if piece:
            self.emit(piece)
        if token in self.ends or self.stream.stopped:
            self.close("stop")

    def close(self, reason: str) -> None:
        """Ends the row and emits what was held back, unless it completes a stop string."""
        if self.finish is None:
            if piece := self.stream.finish():
                self.emit(piece)
            self.finish = "stop" if self.stream.stopped else reason


@dataclass
class Reader:
    """Reads steps late, gives each row its token, and knows when all rows are done."""

    rows: list[Row]
    max_new_tokens: int
    report: OnProgress
    pending: deque[StepResult] = field(default_factory=deque)
    times: list[float] = field(default_factory=list)

    def push(self, step: StepResult) -> None:
        for array in jax.tree.leaves(step):
            array.copy_to_host_async()
        self.pending.append(step)
        # wait for the first token, so that it is shown before the decode step compiles
        while len(self.pending) > (HOST_LAG if self.times else 0):
            self._read()

    def drain(self) -> None:
        while self.pending:
            self._read()
        for row in self.rows:
            row.close("length")

    @property
    def finished(self) -> bool:
        return all(row.finish for row in self.rows)

    def _read(self) -> None:
        step = jax.device_get(self.pending.popleft())
        if self.finished:
            return
        if step.overflow:
            raise RuntimeError(
                "the cache's page pool ran out: nothing after this token would be right"
            )
        self.times.append(time.perf_counter())
        for b, row in enumerate(self.rows):
            shares = (
                (None, None)
                if step.stats is None
                else (float(step.stats.attended[b]), float(step.stats.read[b]))
            )
            row.take(int(step.tokens[b]), float(step.logprobs[b]), *shares)
        self.report("decode", len(self.times), self.max_new_tokens)

    def generation(
        self, index: int, prompt_tokens: int, began: float, logprobs: bool
    ) -> Generation:
        row, times = self.rows[index], self.times
        # the first interval holds the compilation of the step
        made = sum(max(len(row.ids) - 2, 0) for row in self.rows)
        rate = made / (times[-1] - times[1]) if len(times) > 2 else None
        stats = GenerationStats(
            prompt_tokens=prompt_tokens,
            new_tokens=len(row.ids),
            prefill_seconds=times[0] - began,
            decode_tokens_per_second=rate,
            attended_fraction=float(np.mean(row.attended)) if row.attended else None,
            read_fraction=float(np.mean(row.read)) if row.read else None,
        )
        return Generation(
            row.stream.text,
            row.ids,
            row.finish or "length",
            stats,
            row.logprobs if logprobs else None,
        )
