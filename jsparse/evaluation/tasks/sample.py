"""Makes one sample of a task, and finds the maximum length of its text.

Every text has its own random generator, so that a sample depends only on its task, length and
index, not on previous samples, and a resumed run makes the same ones.
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
    """A prompt for a model, and its expected answers.

    Attributes:
        prompt: the user's message.
        prefix: the start of the answer, in the assistant's turn; "": none.
        answers: the texts to find in the generated text.
        max_new_tokens: the maximum number of generated tokens.
        meta: plain JSON values: context_tokens (those of prompt and prefix) and others of the task.
        question: a second turn between prompt and prefix, which the model gets only after an
            evicting policy has compressed the prompt; "": the prompt has the question.
    """

    prompt: str
    prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    meta: dict[str, Any]
    question: str = ""


@dataclass(frozen=True)
class Task:
    """A source of samples and their scoring.

    Attributes:
        sample: (encode, length, index) -> Sample. `length` is the budget in tokens for prompt,
            prefix and generated tokens together (without a chat template, as in RULER). Raises
            ValueError if it is too small, or there is no sample of that index.
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
    """Builds a task with texts of the maximum length that fits the budget.

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
    """Raises ValueError if there is no sample of that index."""
    if index < 0 or (num_samples is not None and index >= num_samples):
        number = "any number of" if num_samples is None else num_samples
        raise ValueError(f"index={index}: must be from 0, {name} has {number} samples")


def count_tokens(encode: EncodeFn, sample: Sample) -> int:
    """Counts the tokens of prompt and prefix separately: a chat template may be between them."""
    return len(encode(sample.prompt)) + len(encode(sample.prefix))


def largest(
    cost: Callable[[int], int], budget: int, min_size: int, max_size: int | None = None
) -> int:
    """Returns the largest size from `min_size` to `max_size` with a cost within the budget.

    RULER bisects; this fits a straight line through the known costs, which takes about four of
    them. `min_size` must fit, and costs must grow without bounds if `max_size` is None. Costs may
    decrease slightly: the result then fits, and the next size does not.
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
