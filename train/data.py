"""Draws training batches: contexts, and the tokens that follow them.

A batch depends only on the seed of its source, its step and its size, so resumed training sees the
same batches. Rows are padded to a few widths, to compile few shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jsparse.models.tokenizer import Tokenizer

TokenIds = Int32[np.ndarray, " n"]


class TrainingBatch(NamedTuple):
    """The samples of one training step.

    Attributes:
        context: token ids, padded at the end with 0.
        length: the number of tokens before the padding, at least 1.
        target: the tokens after the context, always fed to the model as they are; padded with 0.
        scored: marks the answer's tokens, the only ones in the loss.
    """

    context: Int32[np.ndarray, "B S"]
    length: Int32[np.ndarray, " B"]
    target: Int32[np.ndarray, "B T"]
    scored: Bool[np.ndarray, "B T"]


class TrainingSample(NamedTuple):
    """A row of a batch, without padding."""

    context: TokenIds
    target: TokenIds
    scored: Bool[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Source:
    """A source of batches.

    Attributes:
        draw: (step, size) -> the samples of a step; a pure function.
        target_tokens: T, the width of targets.
        buckets: the widths that contexts are padded to, ascending.
        settings: plain JSON values that describe the source.
    """

    draw: Callable[[int, int], Sequence[TrainingSample]] = field(repr=False)
    target_tokens: int
    buckets: tuple[int, ...]
    settings: dict[str, Any]

    def batch(self, step: int, size: int) -> TrainingBatch:
        """Returns the batch of a step; S is the smallest bucket that fits its contexts."""
        check_at_least(0, step=step)
        check_at_least(1, size=size)
        contexts, targets, scored = zip(*self.draw(step, size), strict=True)
        lengths = np.array([len(ids) for ids in contexts], np.int32)
        width = next(bucket for bucket in self.buckets if bucket >= lengths.max())
        return TrainingBatch(
            _padded(contexts, width),
            lengths,
            _padded(targets, self.target_tokens),
            _padded(scored, self.target_tokens),
        )

    def describe(self) -> dict[str, Any]:
        """Returns the source and its settings as plain JSON values, for the record."""
        return {**self.settings, "buckets": list(self.buckets), "target_tokens": self.target_tokens}


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def check_at_least(minimum: int, **arguments: int) -> None:
    """Raises ValueError if any of the arguments is below `minimum`."""
    for name, value in arguments.items():
        if value < minimum:
            raise ValueError(f"{name}={value}: must be at least {minimum}")


def require_room(source: Source, max_length: int, limit: int) -> None:
    """Raises ValueError if contexts of `max_length` tokens with answers exceed a model's limit."""
    if source.buckets[-1] + source.target_tokens > limit:
        raise ValueError(
            f"max_length={max_length} and {source.target_tokens} tokens of answers: must be at "
            f"most {limit} together, the model's maximum"
        )


def continued(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Returns the ids of `text` after a word, without special tokens or a leading space.

    Raises:
        ValueError: the tokenizer merges the start of `text` with the word.
    """
    word = tokenizer.encode("zulu", add_special_tokens=False)
    both = tokenizer.encode("zulu" + text, add_special_tokens=False)
    if both[: len(word)] != word:
        raise ValueError(
            f"text={text!r}: must begin with a token of its own after a word, this tokenizer joins "
            "them"
        )
    return np.array(both[len(word) :], np.int32)
