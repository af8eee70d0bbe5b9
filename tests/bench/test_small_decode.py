"""Tests bench.small_decode: its rows, its line of the table, and a run of the tiny model."""

import sys

import pytest

from bench import small_decode
from bench.small_decode import contenders, jsparse_decode, main, summary
from jsparse import generation
from tests.support.tiny import VOCAB, random_prompts, tiny_params


def test_only_jsparse_has_policies_and_steps_per_program():
    rows = contenders(["jsparse", "hf-compile"], ["dense", "quest(budget=256)"], [1, 8])
    assert [tuple(row.values()) for row in rows] == [
        ("jsparse", "dense", 1),
        ("jsparse", "dense", 8),
        ("jsparse", "quest(budget=256)", 1),
        ("jsparse", "quest(budget=256)", 8),
        ("hf-compile", "dense", 1),
    ]


@pytest.mark.slow
def test_a_run_has_a_row_with_rates(monkeypatch):
    made, (prompt,) = [], random_prompts([40])

    class Session(generation.Session):
        def __init__(self, *arguments, **options):
            made.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("jsparse.runtime.session.Session", Session)
    monkeypatch.setattr(small_decode, "model_and_prompt", lambda *_: (tiny_params(), prompt))
    row = jsparse_decode("random", "streaming(sink=1, recent=7)", 2, len(prompt), 6, 3)
    assert made == [{"steps_per_program": 2}] * 4
    assert generation.Session is not Session
    rate = row["decode_tokens_per_second"]
    assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert row["dtype"] == "float32" and 0 < row["attended_fraction"] < 0.25
    line = summary({"name": "jsparse", "policy": "p", "steps_per_program": 2, **row})
    assert f"2 per program {rate['median']:8.1f} tokens/s" in line


@pytest.mark.slow
def test_random_weights_have_ids_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr("bench.lib.smollm2.SMOLLM2", tiny_params().config)
    params, prompt = small_decode.model_and_prompt("random", 50)
    assert params.config == tiny_params().config and params.tokenizer is None
    assert len(prompt) == 50 and max(prompt) < VOCAB


def test_a_contender_that_fails_is_a_line_with_its_error():
    row = {"name": "hf-compile", "policy": "dense", "steps_per_program": 1, "error": "no torch"}
    assert summary(row).endswith("failed: no torch")


def test_sizes_that_leave_nothing_to_time_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["small_decode", "--new-tokens", "1"])
    with pytest.raises(SystemExit):
        main()
    assert "--new-tokens must be at least 2" in capsys.readouterr().err
