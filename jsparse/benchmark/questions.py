"""Makes the prompts that a server is asked: random, with shared beginnings, or from a file."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jsparse.benchmark.serve import BenchRequest
from jsparse.hyper_parameters import whole_number
from jsparse.models.tokenizer import Tokenizer

Words = Callable[[np.random.Generator, int], list[int]]


def tokenizer_of(model: str) -> Tokenizer:
    """Reads a model's tokenizer without its weights, from a folder, a GGUF file or the Hub.

    Raises:
        ValueError: there is none; the message names --tokenizer.
    """
    from jsparse.models.gguf import GGUFFile
    from jsparse.models.hub import locate

    try:
        path = locate(model, weights=False)
        if path.is_dir():
            return Tokenizer.from_folder(path)
        return Tokenizer.from_gguf(GGUFFile(path).metadata)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer {model!r} has no tokenizer to draw prompts with: {error}; name a model's "
            "folder, or give --vocab-size"
        ) from None


def words_of(tokenizer: Tokenizer) -> Words:
    """Returns a function that draws ids of tokens that are text, none of which ends a prompt."""
    control = set(tokenizer.control_token_ids())
    usable = np.array([nth for nth in range(tokenizer.vocab_size) if nth not in control])
    return lambda rng, count: rng.choice(usable, count).tolist()


def words_below(vocab_size: int) -> Words:
    """Returns a function that draws ids below `vocab_size`."""
    whole_number("--vocab-size", vocab_size, 1)
    return lambda rng, count: rng.integers(vocab_size, size=count).tolist()


def drawn_with(
    tokenizer: Tokenizer, draw: Callable[[Words], list[BenchRequest]], as_text: bool
) -> list[BenchRequest]:
    """Returns the requests that `draw` makes of a tokenizer's words, as text for a chat."""
    drawn = draw(words_of(tokenizer))
    if not as_text:
        return drawn
    return [BenchRequest(tokenizer.decode(each.prompt), each.tokens) for each in drawn]


def random_questions(
    rng: np.random.Generator,
    words: Words,
    *,
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
) -> list[BenchRequest]:
    """Returns random prompts; lengths are uniform within `range_ratio` of those given.

    All prompts begin with the same `prefix_len` tokens, which `input_len` does not count.

    Raises:
        ValueError: an argument is out of its range; the message names its option.
    """
    whole_number("--random-prefix-len", prefix_len, 0)
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio {range_ratio!r}: must be from 0 to below 1")
    prefix = words(rng, prefix_len)
    inputs = _around(rng, "--random-input-len", input_len, range_ratio, count)
    outputs = _around(rng, "--random-output-len", output_len, range_ratio, count)
    return [
        BenchRequest(prefix + words(rng, own), new)
        for own, new in zip(inputs, outputs, strict=True)
    ]


def prefix_questions(
    rng: np.random.Generator,
    words: Words,
    *,
    count: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[BenchRequest]:
    """Returns prompts, in random order, of which as many begin with each of a few prefixes.

    Raises:
        ValueError: an argument is out of its range; the message names its option.
    """
    whole_number("--prefix-repetition-num-prefixes", num_prefixes, 1)
    whole_number("--prefix-repetition-prefix-len", prefix_len, 1)
    whole_number("--prefix-repetition-suffix-len", suffix_len, 0)
    whole_number("--prefix-repetition-output-len", output_len, 1)
    prefixes = [words(rng, prefix_len) for _ in range(num_prefixes)]
    whose = rng.permutation(np.arange(count) % num_prefixes)
    return [BenchRequest(prefixes[nth] + words(rng, suffix_len), output_len) for nth in whose]


def questions_of(path: Path, count: int | None, output_len: int) -> list[BenchRequest]:
    """Reads prompts, one JSON object per line: {"prompt": …, "output_tokens": …}.

    Args:
        path: the file.
        count: how many to take from its beginning; None is all.
        output_len: the most tokens of an answer where a line does not say.

    Raises:
        ValueError: the file cannot be read, a line is malformed, or there are fewer than `count`.
    """
    whole_number("--custom-output-len", output_len, 1)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset-path {str(path)!r} cannot be read: {error}") from None
    rows = [(nth, line) for nth, line in enumerate(lines, 1) if line.strip()]
    if not rows or len(rows) < (count or 1):
        raise ValueError(
            f"--num-prompts {count or 1}: --dataset-path {str(path)!r} has {len(rows)} prompts"
        )
    return [_question(f"{path}:{nth}", line, output_len) for nth, line in rows[:count]]


def _question(where: str, line: str, output_len: int) -> BenchRequest:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where}: must be an object with a text "prompt"')
    tokens = row.get("output_tokens")
    tokens = output_len if tokens is None else tokens
    whole_number(f"{where}: output_tokens", tokens, 1)
    return BenchRequest(prompt, tokens)


def _around(
    rng: np.random.Generator, option: str, length: int, ratio: float, count: int
) -> list[int]:
    whole_number(option, length, 1)
    minimum, maximum = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return rng.integers(minimum, maximum + 1, count).tolist()
