"""Tests questions of a file: each once per epoch, none truncated, and bad lines refused."""

import json

import numpy as np
import pytest

from jsparse.train.questions import questions
from tests.support.model_tokenizers import NAMES, tokenizer_of

pytestmark = pytest.mark.pure

ITEMS = [
    {
        "context": "The river was wide. " * (i + 1),
        "question": f"How wide was it in {i}?",
        "answer": f"{i + 3} miles",
    }
    for i in range(7)
]


def written(folder, items=ITEMS):
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), "utf-8")
    return file


def prompt(item):
    return f"{item['context']}\n\nQuestion: {item['question']}\nAnswer:"


@pytest.mark.parametrize("name", NAMES)
def test_rows_hold_question_and_answer(name, tmp_path):
    tokenizer = tokenizer_of(name)
    source = questions(tokenizer, written(tmp_path), max_length=200)
    expected = {tuple(tokenizer.encode(prompt(item))): item["answer"] for item in ITEMS}
    seen = {}
    for step in range(7):
        batch = source.batch(step, 1)
        assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, bool]
        (context, length, target, scored) = (array[0] for array in batch)
        assert scored[: scored.sum()].all()
        assert not context[length:].any() and not target[~scored].any()
        seen[tuple(context[:length].tolist())] = tokenizer.decode(target[scored]).strip()
    assert seen == expected
    assert source.target_tokens == max(int(source.batch(step, 1).scored.sum()) for step in range(7))


def test_answer_is_tokenised_as_in_a_whole_text(tmp_path):
    tokenizer = tokenizer_of("smollm2")
    source = questions(tokenizer, written(tmp_path, ITEMS[:1]), max_length=200)
    batch = source.batch(0, 1)
    together = [*batch.context[0, : batch.length[0]], *batch.target[0][batch.scored[0]]]
    assert together == tokenizer.encode(f"{prompt(ITEMS[0])} {ITEMS[0]['answer']}")


def test_every_question_comes_once_an_epoch(tmp_path):
    source = questions(tokenizer_of("smollm2"), written(tmp_path), max_length=200, seed=5)
    drawn = [int(length) for step in range(35) for length in source.batch(step, 3).length]
    epochs = [tuple(drawn[start : start + 7]) for start in range(0, 105, 7)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(set(drawn)))}
    assert len(set(epochs)) > 12


def test_resumed_training_sees_the_same_batches(tmp_path):
    tokenizer, file = tokenizer_of("smollm2"), written(tmp_path)
    source = questions(tokenizer, file, max_length=200, seed=5)
    lengths = [source.batch(step, 2).length.tolist() for step in range(8)]
    again, other = (questions(tokenizer, file, max_length=200, seed=seed) for seed in (5, 6))
    assert again.batch(7, 2).length.tolist() == lengths[7]
    assert [other.batch(step, 2).length.tolist() for step in range(8)] != lengths


GOOD = json.dumps(ITEMS[0])


def test_lines_without_a_question_are_refused(tmp_path):
    strings = "must be an object that has the strings context, question, answer"
    for line, rule in [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[1, 2]", strings),
        ('{"context": "a", "question": "b"}', strings),
        ('{"context": "a", "question": "b", "answer": 3}', strings),
        ('{"context": "a", "question": "b", "answer": " "}', "answer=' ': must not be blank"),
        (json.dumps(ITEMS[0] | {"context": "wide " * 300}), r"3\d\d tokens: .* max_length=200"),
        ('{"context": "\\ud800", "question": "b", "answer": "c"}', "UTF-8 cannot encode"),
        (b'{"context": "\xff", "question": "b", "answer": "c"}', "codec can't decode"),
    ]:
        file = tmp_path / "questions.jsonl"
        lines = [GOOD, GOOD, line, GOOD]
        file.write_bytes(
            b"\n".join(text if isinstance(text, bytes) else text.encode() for text in lines)
        )
        with pytest.raises(ValueError, match=rf"questions\.jsonl', line 3: .*{rule}"):
            questions(tokenizer_of("smollm2"), file, max_length=200)


def test_arguments_out_of_range_are_refused(tmp_path):
    for options, message in [
        ({"max_length": 0}, "max_length=0: must be at least 1"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
    ]:
        arguments = {"path": written(tmp_path), "max_length": 200, **options}
        with pytest.raises(ValueError, match=message):
            questions(tokenizer_of("smollm2"), **arguments)


def test_files_without_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="path=.*must hold at least one line"):
        questions(tokenizer_of("smollm2"), written(tmp_path, []), max_length=200)
    with pytest.raises(FileNotFoundError):
        questions(tokenizer_of("smollm2"), tmp_path / "none.jsonl", max_length=200)
