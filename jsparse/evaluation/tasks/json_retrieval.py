"""Asks for one value of one record in a long list of made-up records, as pretty-printed JSON.

Brackets, braces and line ends say where a record begins and ends, and all records have the same
keys: nothing but the record's id tells it from the others. The answer begins as the record does, up
to the key that is asked for, so that a small model need only go on copying; the value must be right
to the letter. LycheeCluster (arXiv:2603.08453, Figures 1 and 2) expects the most of its chunks,
which end where the text's own units do, on texts of this kind; records and question are ours.
"""

import itertools
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsparse.evaluation.tasks.niah import distinct
from jsparse.evaluation.tasks.sample import Encode, Sample, Task, filled

PROMPT = (
    "Here is a list of records in JSON.\n{records}\n"
    'What is the value of "{field}" in the record with "id": {id}?'
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
TAGS = ("active", "basic", "gold", "guest", "local", "new", "online", "premium", "silver", "trial")
ASKED = ("email", "postcode", "balance")
MOST_RECORDS = 50_000  # no two balances are the same, of which there are 72,900
VALUE = re.compile(r'\s*(?:"([^"\n]*)"|([^",}\]\n]+))')


def json_retrieval(name: str, files: Path | None) -> Task:
    """Builds the task of a record's email, postcode or balance, each of which occurs once.

    `meta` has the field that is asked for, and the depth, the share of the other records that come
    before the one that is asked about.
    """

    def make(encode: Encode, rng: random.Random, length: int, index: int, size: int) -> Sample:
        field, depth = rng.choice(ASKED), round(rng.random(), 3)
        records = list(itertools.islice(_records(rng), size))
        asked = records[round(depth * (size - 1))]
        before, _, rest = _pretty([asked]).partition(f'"{field}":')
        return Sample(
            PROMPT.format(records=_pretty(records), field=field, id=asked["id"]),
            f'{before.removeprefix("[")}"{field}":',
            (_value(rest),),
            24,
            {"depth": depth, "field": field},
        )

    return filled(name, make, least=2, most=MOST_RECORDS, score=score_value)


def score_value(text: str, sample: Sample) -> float:
    """Returns 1 where the text begins with the answer, as a JSON value or without quotes, else 0.

    A value without quotes ends at a comma, a bracket or the line's end; a full stop behind it does
    not count.
    """
    return float(_value(text) == sample.answers[0])


def _value(text: str) -> str:
    found = VALUE.match(text)
    return "" if found is None else found[1] or (found[2] or "").strip().removesuffix(".")


def _pretty(records: list[dict[str, Any]]) -> str:
    return json.dumps(records, indent=2)


def _records(rng: random.Random) -> Iterator[dict[str, Any]]:
    ids = distinct(lambda: str(rng.randint(10000, 99999)))
    postcodes = distinct(lambda: f"{_letters(rng)}{rng.randint(10, 99)} {_letters(rng)}")
    emails = distinct(lambda: f"{_letters(rng).lower()}{rng.randint(1000, 9999)}@example.org")
    # without a 0 behind the point, which JSON would drop
    balances = distinct(lambda: f"{rng.randint(100, 999)}.{rng.randint(1, 9)}{rng.randint(1, 9)}")
    for number, postcode, email, balance in zip(ids, postcodes, emails, balances, strict=True):
        yield {
            "id": int(number),
            "name": f"{rng.choice(FIRST)} {rng.choice(LAST)}",
            "email": email,
            "address": {"city": rng.choice(CITIES), "postcode": postcode},
            "tags": rng.sample(TAGS, 2),
            "balance": float(balance),
        }


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=2))


TASKS: dict[str, Callable[[str, Path | None], Task]] = {"json_retrieval": json_retrieval}
