"""Reads questions about long texts from a file of JSON lines."""

import hashlib
import json
from pathlib import Path

import numpy as np

from jsparse.models.tokenizer import Tokenizer
from jsparse.train.data import Source, TrainingSample, check_at_least, continued

FIELDS = ("context", "question", "answer")
PROMPT = "{context}\n\nQuestion: {question}\nAnswer:"


def _sample(tokenizer: Tokenizer, line: bytes, max_length: int) -> TrainingSample:
    """Returns the sample of a line; raises ValueError if the line is malformed."""
    item = json.loads(line)
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in FIELDS):
        raise ValueError(f"must be an object that has the strings {', '.join(FIELDS)}")
    if not item["answer"].strip():
        raise ValueError(f"answer={item['answer']!r}: must not be blank")
    context = np.array(tokenizer.encode(PROMPT.format_map(item)), np.int32)
    if len(context) > max_length:
        raise ValueError(
            f"context and question have {len(context)} tokens: must be at most "
            f"max_length={max_length}"
        )
    target = continued(tokenizer, f" {item['answer']}")
    return TrainingSample(context, target, np.ones(len(target), bool))


def questions(
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    max_length: int,
    seed: int = 0,
) -> Source:
    r"""Draws the questions of a file, each once per epoch, in a different order in every epoch.

    Every line is an object with the strings context, question and answer. The model is given
    "{context}\n\nQuestion: {question}\nAnswer:", of at most `max_length` tokens, then " {answer}",
    which is scored completely. An epoch may end within a batch.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an argument is out of range, a line is malformed, or the file is empty.
    """
    check_at_least(1, max_length=max_length)
    check_at_least(0, seed=seed)
    content = Path(path).read_bytes()
    samples = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            samples.append(_sample(tokenizer, line, max_length))
        except ValueError as error:
            raise ValueError(f"{str(path)!r}, line {number}: {error}") from error
    if not samples:
        raise ValueError(f"path={str(path)!r}: must hold at least one line")

    def one(index: int) -> TrainingSample:
        epoch, place = divmod(index, len(samples))
        return samples[np.random.default_rng((seed, epoch)).permutation(len(samples))[place]]

    return Source(
        draw=lambda step, size: [one(index) for index in range(step * size, (step + 1) * size)],
        target_tokens=max(len(sample.target) for sample in samples),
        buckets=(max_length // 2, max_length),
        settings={
            "source": "questions",
            "path": str(path),
            "max_length": max_length,
            "seed": seed,
            "questions": len(samples),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
    )
