"""Tests the list of records: valid JSON that contains the value once; nothing else scores."""

import json
from collections import Counter

import pytest

from jsparse.evaluation.tasks import parse
from tests.support.encoders import words

pytestmark = pytest.mark.pure


def records_of(sample):
    listed, _ = sample.prompt.split("\n", 1)[1].rsplit("\n", 1)
    return json.loads(listed)


def test_answer_is_the_rest_of_the_records_label():
    (task,) = parse("json_retrieval")
    for index in range(12):
        sample = task.sample(words, 1024, index)
        records, (answer,) = records_of(sample), sample.answers
        name = sample.prefix.rpartition('"')[2]
        (nth,) = (i for i, record in enumerate(records) if record["label"].startswith(f"{name} "))
        assert records[nth]["label"] == f"{name} {answer}"
        assert len(name.split()) == 2
        assert len(answer.split()) == 3
        assert nth == round(sample.meta["depth"] * (len(records) - 1))
        assert sample.prefix.startswith("\n  {\n")
        assert sample.prompt.count(f'{sample.prefix} {answer}"') == 1
        assert sample.prompt.count(answer) == sample.prompt.count(name) == 1


def test_labels_share_no_word():
    records = records_of(parse("json_retrieval")[0].sample(words, 4096, 0))
    assert len(records) > 150
    counts = Counter(word for record in records for word in record["label"].split()[:4])
    assert set(counts.values()) == {1}


def test_only_the_exact_rest_scores():
    (task,) = parse("json_retrieval")
    given = task.sample(words, 512, 0)
    for text, score in [
        (' oak river 41",\n    "owner": {', 1),
        (' "oak river 41"', 1),
        ("oak river 41.", 1),
        ("oak river 41, and", 1),
        (' oak river 412"', 0),
        (' oak river"', 0),
        (' Oak river 41"', 0),
        ("It is oak river 41", 0),
        ('""', 0),
        ("", 0),
    ]:
        sample = given._replace(answers=("oak river 41",))
        assert task.score(text, sample) == score, text
