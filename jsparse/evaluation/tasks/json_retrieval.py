"""Asks for the rest of one record's label in a long list of records, as pretty-printed JSON.

Brackets, braces and line ends delimit records, and all records have the same keys. A label is two
words that name the record, two more words and a number. No word of a label occurs in another label
until a word list is used up. The answer's prefix is the start of the record, up to and including
its name, so that a small model need only continue copying; the rest must match exactly. The name
occurs nowhere else: when the question also had it, SmolLM2 continued as the question did, and when
all records had a number after a key, it took any record's number.

LycheeCluster (arXiv:2603.08453, Figures 1 and 2) expects the largest gain from its chunks, which
end at the text's own units, on texts of this kind; records and question are ours.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jsparse.evaluation.tasks.niah import distinct, word_list
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, filled

PROMPT = (
    "Here is a list of records in JSON.\n{records}\n"
    "One of the records begins as follows. How does it go on?"
)
FIRST = (
    *("Ada", "Bruno", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Ivan", "Julia"),
    *("Karl", "Laura", "Mark", "Nina", "Oscar", "Paula", "Robert", "Sarah", "Tom", "Vera"),
)
LAST = (
    *("Adams", "Brown", "Clark", "Davis", "Evans", "Foster", "Green", "Hill", "Irwin", "Jones"),
    *("King", "Lewis", "Miller", "Nelson", "Parker", "Quinn", "Reed", "Scott", "Turner", "Young"),
)
CITIES = ("Berlin", "Boston", "Cairo", "Dublin", "Lima", "London", "Madrid", "Paris", "Rome")
MAX_RECORDS = 50_000  # names are unique; there are more than a million
PLAIN = re.compile("[a-z]{3,9}")
REST = re.compile(r'\s*"?([^",}\]\n]*)')


def json_retrieval(name: str, files: Path | None) -> Task:
    """Builds the task of the rest of a record's label, which occurs once.

    `meta` has the depth, the share of the other records that come before.
    """
    adjectives = _plain(word_list("adjective"))
    nouns = _plain(set(word_list("noun")) - set(adjectives))

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        depth = round(rng.random(), 3)
        labels = list(itertools.islice(_labels(rng, adjectives, nouns), size))
        records = [_record(rng, " ".join(label)) for label in labels]
        target = round(depth * (size - 1))
        _, rest = labels[target]
        before, _, _ = _pretty([records[target]]).partition(f" {rest}")
        return Sample(
            PROMPT.format(records=_pretty(records)),
            before.removeprefix("["),
            (rest,),
            24,
            {"depth": depth},
        )

    return filled(name, make, min_size=2, max_size=MAX_RECORDS, score=score_rest)


def score_rest(text: str, sample: Sample) -> float:
    """Returns 1 if the text starts with the answer, with or without quotes, else 0."""
    match = REST.match(text)
    assert match is not None
    return float(match[1].strip().removesuffix(".") == sample.answers[0])


def _pretty(records: list[dict[str, Any]]) -> str:
    return json.dumps(records, indent=2)


def _plain(words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if PLAIN.fullmatch(word)})


def _labels(
    rng: random.Random, adjectives: Sequence[str], nouns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields the names of records, and the rests of their labels."""
    shuffled = rng.sample(nouns, len(nouns))
    first, *others = (_again_and_again(rng, shuffled[part::3]) for part in range(3))
    adjective = _again_and_again(rng, adjectives)
    names = distinct(lambda: f"{next(adjective)} {next(first)}")
    rests = distinct(lambda: f"{' '.join(map(next, others))} {rng.randint(10, 99)}")
    yield from zip(names, rests, strict=True)


def _again_and_again(rng: random.Random, words: Sequence[str]) -> Iterator[str]:
    """Yields all words in random order, then in another random order, endlessly."""
    while True:
        yield from rng.sample(words, len(words))


def _record(rng: random.Random, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "owner": {
            "name": f"{rng.choice(FIRST)} {rng.choice(LAST)}",
            "active": rng.random() < 0.5,
            "cities": rng.sample(CITIES, 2),
        },
        "items": rng.randint(10, 99),
    }


TASKS: dict[str, Callable[[str, Path | None], Task]] = {"json_retrieval": json_retrieval}
