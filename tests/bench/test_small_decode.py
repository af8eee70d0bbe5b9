"""Tests bench.small_decode: its rows, its line of the table, and a run of the tiny model."""

import pytest

from bench import small_decode
from bench.small_decode import jsparse_decode, summary
from jsparse import generation
from tests.support.tiny import random_prompts, tiny_params


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
