"""Hides needles in a haystack, in RULER's words: sentences with values of keys.

The haystack is noise, essays or more needles.
"""

import functools
import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from jsparse.evaluation.tasks.ruler_files import among_sentences, essay_words
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, filled
from jsparse.machine.extras import install

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"


@functools.cache
def word_list(kind: Literal["noun", "adjective", "verb"]) -> list[str]:
    """Returns the words of wonderwords.

    Raises:
        ValueError: wonderwords is not installed.
    """
    try:
        folder = resources.files("wonderwords.assets")
    except ModuleNotFoundError:
        raise ValueError(f"RULER's words need the package wonderwords: {install('eval')}") from None
    return [word.rstrip() for word in (folder / f"{kind}list.txt").read_text("utf-8").splitlines()]


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _word(rng: random.Random) -> str:
    return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


DRAW = {"numbers": _number, "words": _word, "uuids": _uuid}


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Yields drawn items without repetition."""
    seen: set[str] = set()
    while True:
        item = draw()
        if item not in seen:
            seen.add(item)
            yield item


def among_lines(rng: random.Random, lines: list[str], items: list[str]) -> str:
    """Puts the items before some of the lines, in the order of the items."""
    placed = list(lines)
    positions = sorted(rng.sample(range(len(lines)), len(items)))
    for before, (position, item) in enumerate(zip(positions, items, strict=True)):
        placed.insert(position + before, item)
    return "\n".join(placed)


def ask(kind: str, values: dict[str, list[str]], keys: list[str], context: str) -> Sample:
    """Asks for the values of some of the keys; meta's depth is the first answer's position."""
    answers = tuple(value for key in keys for value in values[key])
    template, prefix = TEMPLATE, PREFIX
    if len(answers) == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        prefix, kind = prefix.replace("are", "is"), kind.removesuffix("s")
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    return Sample(
        prompt=template.format(type_needle_v=kind, context=context, query=query),
        prefix=prefix.format(type_needle_v=kind, query=query),
        answers=answers,
        max_new_tokens=128,
        meta={"depth": round(context.index(answers[0]) / len(context), 3)},
    )


@dataclass(frozen=True)
class Niah:
    """A needle task, with RULER's num_needle_k, num_needle_v and num_needle_q."""

    haystack: Literal["noise", "needle", "essay"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def task(self, name: str, files: Path | None) -> Task:
        """Builds the task of that name; ValueError: the word lists or the essays are missing."""
        essay = essay_words(name, files) if self.haystack == "essay" else []
        if self.key == "words":
            word_list("noun")

        def make(
            encode: EncodeFn, rng: random.Random, length: int, index: int, size: int
        ) -> Sample:
            new_key = distinct(lambda: DRAW[self.key](rng))
            new_value = distinct(lambda: DRAW[self.value](rng))
            keys = list(itertools.islice(new_key, max(self.num_keys, self.num_queries)))
            values = {key: list(itertools.islice(new_value, self.num_values)) for key in keys}
            needles = [self.needle(key, value) for key in keys for value in values[key]]
            queries = rng.sample(keys, self.num_queries)
            rng.shuffle(needles)
            match self.haystack:
                case "noise":
                    context = among_lines(rng, [NOISE] * size, needles)
                case "needle":
                    others = [self.needle(next(new_key), next(new_value)) for _ in range(size)]
                    context = among_lines(rng, others, needles)
                case "essay":
                    context = among_sentences(
                        rng, itertools.islice(itertools.cycle(essay), size), needles
                    )
            return ask(self.value, values, queries, context)

        return filled(name, make, min_size=1)

    def needle(self, key: str, value: str) -> str:
        """Returns the sentence that gives the key's value."""
        return NEEDLE.format(type_needle_v=self.value, key=key, value=value)
