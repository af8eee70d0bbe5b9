"""Makes one sample of a task, and finds how long its text may be.

Every text is made from a generator of its own, so that a sample depends on its task, length and
number alone, not on those made before it, and a run that goes on makes the same ones.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SEED = 42

EncodeFn = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


class Sample(NamedTuple):
    """Holds a prompt for a model, and its expected answers.

    Attributes:
        prompt: the user's message.
        prefix: the beginning of the answer, in the assistant's turn; "": none.
        answers: the texts that are looked for in the generated text.
        max_new_tokens: the most tokens that may be generated.
        meta: plain JSON values: context_tokens (those of prompt and prefix) and others of the task.
        question: a second turn between prompt and prefix, which reaches the model only after a
            policy that evicts has compressed the prompt; "": the prompt asks.
    """

    prompt: str
    prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    meta: dict[str, Any]
    question: str = ""


@dataclass(frozen=True)
class Task:
    """Describes a source of samples and their scoring.

    Attributes:
        sample: (encode, length, index) -> Sample. `length` is the budget in tokens for prompt,
            prefix and generated tokens together (without a chat template, as in RULER). Raises
            ValueError where it is too small, or there is no sample of that index.
        score: (generated text, Sample) -> a score from 0 to 1.
        num_samples: the number of samples; None: no limit.
        open_ended: whether samples ignore `length`, and the lengths of answers are recorded.
    """

    name: str
    sample: Callable[[EncodeFn, int, int], Sample] = field(repr=False)
    score: Callable[[str, Sample], float] = field(repr=False)
    num_samples: int | None = None
    open_ended: bool = False


MakeFn = Callable[[EncodeFn, random.Random, int, int, int], Sample]
"""(encode, rng, length, index, size) -> a sample whose text has `size` units of filler; `meta`
lacks context_tokens.
"""


def score_all(text: str, sample: Sample) -> float:
    """Returns the share of the answers in the text, ignoring case (RULER's string_match_all)."""
    return sum(answer.lower() in text.lower() for answer in sample.answers) / len(sample.answers)


def score_any(text: str, sample: Sample) -> float:
    """Returns 1 if any answer is in the text, ignoring case, else 0 (string_match_part)."""
    return float(any(answer.lower() in text.lower() for answer in sample.answers))


def filled(
    name: str,
    make: MakeFn,
    *,
    min_size: int,
    max_size: int | None = None,
    score: Callable[[str, Sample], float] = score_all,
    num_samples: int | None = None,
) -> Task:
    """Builds a task whose texts are as long as the budget allows.

    `make` takes a size of filler from `min_size` to `max_size` (None: any); the rest is as in
    `Task`.
    """

    def sample(encode: EncodeFn, length: int, index: int) -> Sample:
        check_index(name, index, num_samples)

        def made(at_length: int, size: int) -> Sample:
            rng = random.Random(f"{SEED}/{name}/{at_length}/{index}")
            return make(encode, rng, at_length, index, size)

        def cost(at_length: int, size: int) -> int:
            one = made(at_length, size)
            return count_tokens(encode, one) + one.max_new_tokens

        works = length
        while (needed := cost(works, min_size)) > works:
            works = needed
        if works > length:
            raise ValueError(
                f"length={length}: must be at least {works} for sample {index} of {name}"
            )
        size = largest(lambda size: cost(length, size), length, min_size, max_size)
        if size == max_size:
            raise ValueError(
                f"length={length}: must be less, {name} has words for {cost(length, size)} tokens "
                "only"
            )
        one = made(length, size)
        return one._replace(meta={**one.meta, "context_tokens": count_tokens(encode, one)})

    return Task(name, sample, score, num_samples)


def check_index(name: str, index: int, num_samples: int | None) -> None:
    """Raises ValueError where there is no sample of that number."""
    if index < 0 or (num_samples is not None and index >= num_samples):
        number = "any number of" if num_samples is None else num_samples
        raise ValueError(f"index={index}: must be from 0, {name} has {number} samples")


def count_tokens(encode: EncodeFn, sample: Sample) -> int:
    """Counts the tokens of prompt and prefix, each alone: a chat template may part them."""
    return len(encode(sample.prompt)) + len(encode(sample.prefix))


def largest(
    cost: Callable[[int], int], budget: int, min_size: int, max_size: int | None = None
) -> int:
    """Returns the largest size from `min_size` to `max_size` that costs no more than the budget.

    RULER bisects; this draws a straight line through the costs seen, which takes about four of
    them. `min_size` must fit, and costs must grow without bounds if `max_size` is None. Costs may
    fall back a little: the result then fits, and the next size does not.
    """
    fits, spent = min_size, cost(min_size)
    fails = math.inf if max_size is None else max_size + 1
    guess = min_size + max(min_size, 1)
    while fails - fits > 1:
        guess = int(min(max(guess, fits + 1), fails - 1))
        guessed = cost(guess)
        slope = max((guessed - spent) / (guess - fits), 0.1)
        if guessed <= budget:
            fits, spent = guess, guessed
        else:
            fails = guess
        guess = fits + int((budget - spent) / slope)
    return fits
