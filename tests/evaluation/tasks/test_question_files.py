"""Tests questions from a user's file: which answer scores, and the rules of the file."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.evaluation.tasks import parse
from jsparse.evaluation.tasks.questions import final_answer, same
from tests.support.encoders import words
from tests.support.own_questions import ROWS, written

pytestmark = pytest.mark.pure


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path, *map(json.dumps, ROWS))


def test_answer_is_the_last_box_or_else_the_last_number():
    for text, answer in [
        ("so \\boxed{4}, no: \\boxed{5}, which is not 6", "5"),
        ("\\boxed{\\frac{1}{2}} at last", "\\frac{1}{2}"),
        ("\\boxed {\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\boxed{8}}", "8"),
        ("\\boxed{3} and then \\boxed{\\frac{1}", "3"),
        ("\\boxed{} or 3", ""),
        ("first 12, then -3.50.", "-3.50"),
        ("10-3", "3"),
        ("it costs $1,234,567.", "1,234,567"),
        ("f(1,2345)", "2345"),
        ("x = \N{MINUS SIGN}7", "\N{MINUS SIGN}7"),
        ("\\boxed{12", "12"),
        ("I do not know", None),
        ("", None),
    ]:
        assert final_answer(text) == answer, text


def test_numbers_are_compared_as_numbers_and_other_answers_as_text():
    for said, answer, right in [
        ("70", "070", True),
        ("1,000", "1000.0", True),
        ("\N{MINUS SIGN}3", "-3.0", True),
        ("$ 5 $", "+5", True),
        ("9" * 5000, "9" * 5000 + ".0", True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("0.1", "0.10000000000000000001", False),
        ("\\frac{1} {2}", "$\\frac{1}{2}$", True),
        ("1/2", "0.5", False),
        ("1,2", "12", False),
        ("Paris", "paris", False),
        ("", "0", False),
    ]:
        assert same(said, answer) == same(answer, said) == right, said


@given(st.integers(), st.text("ab {}\\boxed1.,-", max_size=40))
def test_box_at_the_end_wins_over_any_text_before(number, text):
    assert same(final_answer(f"{text}\\boxed{{{number}}}") or "", f"{number}.0")


def test_line_becomes_a_sample(folder):
    (task,) = parse("questions", folder, 100)
    assert (task.num_samples, task.open_ended) == (3, True)
    first, second, third = (task.sample(words, 0, index) for index in range(3))
    assert (first.prompt, first.prefix, first.max_new_tokens) == (ROWS[0]["question"], "", 100)
    assert first.meta == {"id": "sum", "context_tokens": 6}
    assert [sample.meta["id"] for sample in (second, third)] == ["2", "7"]
    assert parse("questions", folder)[0].sample(words, 0, 0).max_new_tokens == 8192
    said = "\\boxed{42} or \\boxed{ \\frac{1}{2} }"
    assert [task.score(said, sample) for sample in (first, second, third)] == [0, 1, 0]
    assert [task.score("42 of 1000", sample) for sample in (first, second, third)] == [0, 0, 1]
    assert task.score("no idea", first) == 0
    with pytest.raises(ValueError, match="index=3: must be from 0, questions has 3 samples"):
        task.sample(words, 0, 3)


def test_bad_line_is_named_with_its_rule(tmp_path):
    for line, said in [
        ('{"question": "a", "answer": 1', "is not JSON"),
        ('["a", 1]', "is '[\"a\", 1]': must be an object"),
        ('{"answer": 1}', "question=None: must be text that is not blank"),
        ('{"question": " ", "answer": 1}', "question=' ': must be text"),
        ('{"question": 5, "answer": 1}', "question=5: must be text"),
        ('{"question": "a"}', "answer=None: must be a number, or text that is not blank"),
        ('{"question": "a", "answer": "$ $"}', "answer='$ $': must be"),
        ('{"question": "a", "answer": true}', "answer=True: must be"),
        ('{"question": "a", "answer": [1]}', "answer=[1]: must be"),
        ('{"question": "a", "answer": 1, "id": null}', "id=None: must be text or a number"),
    ]:
        with pytest.raises(ValueError, match=f"questions.jsonl', line 2:? {re.escape(said)}"):
            parse("questions", written(tmp_path, json.dumps(ROWS[0]), line))


def test_files_without_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="files=None: questions needs questions.jsonl"):
        parse("questions")
    with pytest.raises(ValueError, match="questions needs questions.jsonl .* which is not there"):
        parse("questions", tmp_path)
    with pytest.raises(ValueError, match="is empty: must hold at least one question"):
        parse("questions", written(tmp_path, " "))
    (tmp_path / "questions.jsonl").write_bytes(b'{"question": "\xff", "answer": 1}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        parse("questions", tmp_path)
