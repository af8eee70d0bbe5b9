"""Tests the list of records: valid JSON, in which the value stands once and nothing else scores."""

import json
import re

import pytest
from encoders import words

from jsparse.evaluation.tasks import parse
from jsparse.evaluation.tasks.json_retrieval import ASKED


def records_of(sample):
    listed, question = sample.prompt.split("\n", 1)[1].rsplit("\n", 1)
    ((field, number),) = re.findall(r'"(\w+)" in the record with "id": (\d+)', question)
    return json.loads(listed), field, int(number)


def test_the_answer_is_the_field_of_the_record():
    (task,) = parse("json_retrieval")
    asked_for = set()
    for index in range(12):
        sample = task.sample(words, 1024, index)
        records, field, number = records_of(sample)
        (nth,) = (i for i, record in enumerate(records) if record["id"] == number)
        record = records[nth]
        (answer,) = sample.answers
        assert answer == str({**record, **record["address"]}[field])
        assert sample.prompt.count(answer) == 1
        assert nth == round(sample.meta["depth"] * (len(records) - 1))
        assert sample.meta["field"] == field
        asked_for.add(field)
    assert asked_for == set(ASKED)


def test_the_prefix_is_the_record_up_to_the_answer():
    (task,) = parse("json_retrieval")
    for index in range(6):
        sample = task.sample(words, 512, index)
        assert sample.prefix in sample.prompt
        (answer,) = sample.answers
        quote = '"' * (sample.meta["field"] != "balance")
        assert f"{sample.prefix} {quote}{answer}{quote}" in sample.prompt


def test_ids_and_values_that_are_asked_for_differ():
    records, *_ = records_of(parse("json_retrieval")[0].sample(words, 16384, 0))
    flat = [{**record, **record["address"]} for record in records]
    assert len(records) > 500
    for key in ("id", *ASKED):
        assert len({record[key] for record in flat}) == len(records)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (' "AB12 CD"\n    },', 1),
        (" AB12 CD.", 1),
        ("AB12 CD, and", 1),
        (' "AB12 CDE"', 0),
        (' "AB12"', 0),
        (' "ab12 cd"', 0),
        (' "AB12 CD', 0),
        ("It is AB12 CD", 0),
        ('""', 0),
        ("", 0),
    ],
)
def test_only_the_exact_value_counts(text, score):
    (task,) = parse("json_retrieval")
    sample = task.sample(words, 512, 0)._replace(answers=("AB12 CD",))
    assert task.score(text, sample) == score
