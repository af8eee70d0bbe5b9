"""Tests whole runs of questions from a user's file."""

import dataclasses
import json
from pathlib import Path

import pytest

import jsparse
from jsparse.evaluation import evaluators
from jsparse.evaluation.plan import plan, run
from jsparse.evaluation.store import ResultStore
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.host_reader import Generation, GenerationStats
from tests.support.own_questions import ROWS, written

TINY = Path(__file__).parents[2] / "fixtures" / "hf" / "llama3" / "model.gguf"


SINK = "streaming(sink=1, recent=1)"


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path, *map(json.dumps, ROWS))


@pytest.fixture(scope="module")
def params():
    return jsparse.load(str(TINY))


def measured(params, folder, store=None, tasks=("questions",), **more):
    """Runs the questions with up to 6 new tokens each; returns the report."""
    asked = plan(
        [SINK], tasks, [4096], 20, **{"batch": 2, "files": folder, "max_new_tokens": 6, **more}
    )
    store = store or ResultStore(folder / "report.json", {"model": "tiny", "samples": 20})
    run(params, asked, store)
    return store.finish({})


def test_correct_answers_lengths_and_truncations_are_counted(params, folder, monkeypatch):
    def made(text, tokens, reason):
        stats = GenerationStats(1, tokens, 0.0, None, 1.0, 1.0, "")
        return Generation(text, [0] * tokens, reason, stats)

    right = [made("\\boxed{42}", 2, "stop"), made("\\boxed{\\frac12}", 4, "stop")]
    wrong = [made("42 or 43", 6, "length"), made("", 6, "length")]
    monkeypatch.setattr(evaluators, "generate", lambda *_, **__: [right, wrong])
    report = measured(params, written(folder, *map(json.dumps, ROWS[:2])))
    dense, sparse = (cell["metrics"] for cell in report["cells"])
    assert (dense["score"]["mean"], sparse["score"]["mean"]) == (0.5, 0)
    assert sparse["score"]["difference"] == -0.5
    assert sparse["score"]["interval"] == [-1, 0]
    assert (dense["new_tokens"]["mean"], sparse["new_tokens"]["mean"]) == (3, 6)
    assert (dense["cut_off"]["mean"], sparse["cut_off"]["mean"]) == (0, 1)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_chat_template_is_used_if_there_is_one(params, folder, monkeypatch, template):
    tokenizer = Tokenizer(params.tokenizer._core, chat_template=template)
    prompts = []

    def generate(params, policies, rows, **options):
        prompts.extend(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluators, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        measured(dataclasses.replace(params, tokenizer=tokenizer), folder)
    question = ROWS[0]["question"]
    if template is None:
        assert prompts[0] == tokenizer.encode(question)
    else:
        asked = f"<user>{question}<assistant>"
        assert prompts[0] == tokenizer.encode(asked, add_special_tokens=False)


def test_killed_run_asks_only_the_missing_questions(params, folder, monkeypatch):
    whole = measured(params, folder)
    settings, path = {"model": "tiny", "samples": 20}, folder / "killed.json"
    add, answer, asked = ResultStore.add, evaluators.GreedyAnswers.__call__, []

    def dies(store, entries):
        add(store, entries)
        raise KeyboardInterrupt

    def counted(answers, policies, indices):
        asked.append(list(indices))
        return answer(answers, policies, indices)

    with monkeypatch.context() as patched:
        patched.setattr(ResultStore, "add", dies)
        with pytest.raises(KeyboardInterrupt):
            measured(params, folder, ResultStore(path, settings))
    monkeypatch.setattr(evaluators.GreedyAnswers, "__call__", counted)
    resumed = measured(params, folder, ResultStore(path, settings, resume=True))
    assert asked == [[2]]
    assert resumed["cells"] == whole["cells"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        ({"max_new_tokens": 8192}, r"=8192: must leave room .*\d+ tokens\) within 512"),
        ({"tasks": ("questions", "kl")}, "length=4096: must be at most 512"),
    ],
)
def test_limits_are_checked(params, folder, more, said):
    with pytest.raises(ValueError, match=said):
        measured(params, folder, **more)
