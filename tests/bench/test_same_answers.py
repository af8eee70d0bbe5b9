"""Tests bench.same_answers: its prompts and the comparison."""

import json
import sys
from pathlib import Path

import pytest

from bench import same_answers
from bench.same_answers import NUM_NEW, compare, lines, main, measure, questions
from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

TINY = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"


@pytest.fixture(autouse=True)
def _room_for_a_tiny_vocabulary(monkeypatch):
    monkeypatch.setattr(same_answers, "LENGTHS", (7000, 8000))


def answer(ids, gap=0.5, second=0):
    """Returns an answer of these ids and then 9.

    The gap is at the last of these ids; others are ten times as large.
    """
    gaps = [10 * gap] * NUM_NEW
    gaps[len(ids) - 1] = gap
    return {
        "ids": [*ids, *[9] * (NUM_NEW - len(ids))],
        "logprobs": [-1.0] * NUM_NEW,
        "gaps": gaps,
        "second_ids": [second] * NUM_NEW,
    }


def test_asks_every_task_at_every_length_within_the_budget():
    tokenizer = Tokenizer.from_gguf(GGUFFile(TINY).metadata)
    asked = questions(tokenizer, 12)
    names = ["passkey", "niah_single_1", "vt", "cwe", "fwe"]
    assert [question.task.name for question in asked] == [*names, *names, *names[:2]]
    assert [(question.length, question.index) for question in asked[::5]] == [
        (7000, 0),
        (8000, 1),
        (7000, 2),
    ]
    assert len({tuple(question.ids) for question in asked}) == 12
    for question in asked:
        assert tokenizer.decode(question.ids).endswith(question.sample.prefix)
        begin, *text = question.ids  # the token before every text counts in no budget
        assert begin == tokenizer.bos_token_id
        assert 0.6 * question.length < len(text) <= question.length - question.sample.max_new_tokens
    assert [question.ids for question in questions(tokenizer, 3)] == [
        question.ids for question in asked[:3]
    ]


def test_a_difference_has_its_place_its_gap_and_whether_it_was_the_second_best():
    whole, other = answer([1, 2, 3]), answer([1, 2, 4], gap=0.25, second=3)
    other["logprobs"] = [-1.0, -1.5, -7.0, *[-1.0] * (NUM_NEW - 3)]
    assert compare(whole, whole) == {
        "same_first_ids": NUM_NEW,
        "logprob_difference": 0.0,
        "gap": None,
        "took_second": None,
    }
    assert compare(whole, other) == {
        "same_first_ids": 2,
        "logprob_difference": 0.5,
        "gap": 0.25,
        "took_second": True,
    }
    assert compare(answer([5]), other) == {
        "same_first_ids": 0,
        "logprob_difference": 0.0,
        "gap": 2.5,
        "took_second": False,
    }


def test_both_get_the_same_ids_and_the_report_counts(monkeypatch):
    seen = {}

    def child(module, arguments, *, python, timeout_s):
        _, name, prompts, _, gguf = arguments
        seen[name] = (module, python, gguf, json.loads(Path(prompts).read_text()))
        answers = [
            answer([1, 2]),
            answer([1, 3 if name == "hf" else 2], gap=1e-6, second=2),
            answer([4]),
        ]
        side = {"device": "cpu", "dtype": "float32", "versions": {"numpy": "2"}, "seconds": 1.0}
        return side | {"answers": answers}

    monkeypatch.setattr(same_answers, "run_child", child)
    report = measure(TINY, "another/python", 3)
    asked = [
        question.ids for question in questions(Tokenizer.from_gguf(GGUFFile(TINY).metadata), 3)
    ]
    assert seen == {
        "hf": ("bench.same_answers", "another/python", str(TINY), asked),
        "jsparse": ("bench.same_answers", sys.executable, str(TINY), asked),
    }
    found = report["summary"]
    assert (found["prompts"], found["same_answers"], found["least_gap"]) == (3, 2, 1e-6)
    assert [row["prompt_tokens"] for row in report["results"]] == [len(ids) for ids in asked]
    assert report["results"][1]["ids"]["hf"][:2] == [1, 3]
    assert json.loads(json.dumps(report))["summary"] == found
    assert lines(report)[-1] == (
        "niah_single_1 7000 sample 0: first 1 ids agree, then a gap of 1.0e-06, "
        "jsparse took the second best"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "0"], "must be 1 or more"),
        (["--prompts", "1", "--hf-python", "no/such"], "no/such"),
    ],
)
def test_says_what_is_wrong(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["same_answers", "--gguf", str(TINY), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert said in f"{stopped.value} {capsys.readouterr().err}"
