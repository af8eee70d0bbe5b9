"""Hides pass keys of many words in filler, and asks for some of them.

"DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (Xiao et
al.), arXiv:2410.10819; "LycheeDecode" trains its gates on its data. There are three differences:
only some of the keys are asked for; contexts have exactly the drawn length, in tokens; the texts
around the keys are ours.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jsparse.models.tokenizer import Tokenizer
from jsparse.train.data import Source, TokenIds, TrainingSample, check_at_least, continued

_SPELLED = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar "
    "papa quebec romeo sierra tango uniform victor whiskey x-ray yankee zulu"
)
ALPHABET = _SPELLED.split()
INTRODUCTION = (
    "Pass keys are hidden in the text below. Remember them, you will be asked for some of them.\n\n"
)
SHALLOWEST, DEEPEST = 0.05, 0.95


class _Pieces(NamedTuple):
    """Tokens from which samples are made; pass key n's are at index n - 1."""

    introduction: TokenIds
    filler: TokenIds
    words: list[TokenIds]  # " alpha"
    opening: list[TokenIds]  # "\nPass key 3 is:"
    closing: TokenIds
    asking: TokenIds
    name: list[TokenIds]  # " pass key 3"
    joint: TokenIds
    prompt: TokenIds  # the end of the context
    first: list[TokenIds]  # " Pass key 3:", in the answer
    later: list[TokenIds]  # the same after other pass keys, on its own line


def _tokenized(tokenizer: Tokenizer, text: str, needles: int) -> _Pieces:
    def numbered(form: str) -> list[TokenIds]:
        return [continued(tokenizer, form.format(number)) for number in range(1, needles + 1)]

    return _Pieces(
        introduction=np.array(tokenizer.encode(INTRODUCTION), np.int32),
        filler=np.array(tokenizer.encode(text, add_special_tokens=False), np.int32),
        words=[continued(tokenizer, f" {word}") for word in ALPHABET],
        opening=numbered("\nPass key {} is:"),
        closing=continued(tokenizer, ".\n"),
        asking=continued(tokenizer, "\n\nRecite"),
        name=numbered(" pass key {}"),
        joint=continued(tokenizer, " and"),
        prompt=continued(tokenizer, ".\nAnswer:"),
        first=numbered(" Pass key {}:"),
        later=numbered("\nPass key {}:"),
    )


def _question(pieces: _Pieces, chosen: Sequence[int]) -> TokenIds:
    named = [piece for number in chosen for piece in (pieces.joint, pieces.name[number])]
    return np.concatenate([pieces.asking, *named[1:], pieces.prompt])


def _answer(
    pieces: _Pieces, keys: list[TokenIds], chosen: Sequence[int]
) -> tuple[TokenIds, np.ndarray]:
    """Returns the target, and a mask of its tokens that are words of keys."""
    headings = [pieces.first[chosen[0]], *(pieces.later[number] for number in chosen[1:])]
    spans = [
        span
        for number, heading in zip(chosen, headings, strict=True)
        for span in (heading, keys[number])
    ]
    return np.concatenate(spans), np.repeat(
        np.arange(len(spans)) % 2 == 1, [len(span) for span in spans]
    )


def _context(
    pieces: _Pieces, rng: np.random.Generator, keys: list[TokenIds], question: TokenIds, length: int
) -> TokenIds:
    """Puts the keys in random order at their own depths, in filler up to `length` tokens."""
    needles = [
        np.concatenate([pieces.opening[number], keys[number], pieces.closing])
        for number in rng.permutation(len(keys))
    ]
    size = max(0, length - sum(map(len, (pieces.introduction, *needles, question))))
    window = np.take(pieces.filler, rng.integers(len(pieces.filler)) + np.arange(size), mode="wrap")
    depths = np.sort(rng.uniform(SHALLOWEST, DEEPEST, len(keys)))
    before, *after = np.split(window, np.rint(depths * size).astype(int))
    hidden = [piece for pair in zip(needles, after, strict=True) for piece in pair]
    return np.concatenate([pieces.introduction, before, *hidden, question])


def _longest(pieces: Sequence[TokenIds], count: int = 1) -> int:
    """Returns the maximum tokens of `count` different pieces."""
    return sum(sorted(map(len, pieces), reverse=True)[:count])


def _longest_headings(pieces: _Pieces, asked: int) -> int:
    """Returns the maximum tokens of the headings of `asked` different pass keys in an answer."""
    return max(
        len(first) + _longest(pieces.later[:number] + pieces.later[number + 1 :], asked - 1)
        for number, first in enumerate(pieces.first)
    )


def _min_length(pieces: _Pieces, words: int, asked: int) -> int:
    """Counts the tokens of a context without filler, with words of average length."""
    needles = sum(map(len, pieces.opening)) + len(pieces.opening) * len(pieces.closing)
    question = (
        len(pieces.asking)
        + _longest(pieces.name, asked)
        + (asked - 1) * len(pieces.joint)
        + len(pieces.prompt)
    )
    keys = len(pieces.opening) * words * sum(map(len, pieces.words)) / len(pieces.words)
    return len(pieces.introduction) + needles + question + math.ceil(keys)


def passkeys(
    tokenizer: Tokenizer,
    text: str,
    *,
    min_length: int = 1024,
    max_length: int = 8192,
    needles: int = 10,
    words: int = 32,
    asked: int = 2,
    seed: int = 0,
) -> Source:
    """Draws contexts of filler that contain pass keys, a question for some keys, and the answer.

    The length of a context in tokens, including question and special tokens, is uniform in
    [min_length, max_length]; keys that do not fit are drawn again. Every context has a different
    window of the filler `text`. The keys' depths are uniform from 0.05 to 0.95 of the filler. A key
    has `words` words, each uniform over the 26. The answer recites the `asked` keys, and only their
    words are scored.

    Raises:
        ValueError: an argument is out of range, the text has no tokens, `asked` exceeds the number
            of keys, or keys of average length do not fit in `min_length`.
    """
    check_at_least(1, needles=needles, words=words, asked=asked)
    check_at_least(0, seed=seed)
    if asked > needles:
        raise ValueError(f"asked={asked}: must be at most needles={needles}")
    if max_length < min_length:
        raise ValueError(f"max_length={max_length}: must be at least min_length={min_length}")
    pieces = _tokenized(tokenizer, text, needles)
    if not pieces.filler.size:
        raise ValueError(f"text={text!r}: must have at least one token")
    minimum = _min_length(pieces, words, asked)
    if min_length < minimum:
        raise ValueError(
            f"min_length={min_length}: must be at least {minimum}, which needles={needles} of "
            f"words={words} and the question take on average"
        )

    def made(rng: np.random.Generator) -> TrainingSample:
        length = int(rng.integers(min_length, max_length, endpoint=True))
        while True:
            drawn = rng.integers(len(ALPHABET), size=(needles, words))
            keys = [np.concatenate([pieces.words[word] for word in key]) for key in drawn]
            chosen = rng.permutation(needles)[:asked].tolist()
            context = _context(pieces, rng, keys, _question(pieces, chosen), length)
            if len(context) == length:
                return TrainingSample(context, *_answer(pieces, keys, chosen))

    def draw(step: int, size: int) -> list[TrainingSample]:
        rng = np.random.default_rng((seed, step))
        return [made(rng) for _ in range(size)]

    return Source(
        draw=draw,
        target_tokens=_longest_headings(pieces, asked) + asked * words * _longest(pieces.words),
        buckets=(max_length // 2, max_length),
        settings={
            "source": "passkeys",
            "min_length": min_length,
            "max_length": max_length,
            "needles": needles,
            "words": words,
            "asked": asked,
            "seed": seed,
            "text_tokens": len(pieces.filler),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
    )
