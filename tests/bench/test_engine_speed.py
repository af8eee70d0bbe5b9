"""Tests that the engine's benchmark measures what it says, on a tiny model."""

import pytest
from tiny import tiny_params

from bench import engine_speed


@pytest.fixture
def tiny(monkeypatch):
    for name, size in (("DOCUMENT", 64), ("QUESTION", 8), ("NEW", 6)):
        monkeypatch.setattr(engine_speed, name, size)
    return engine_speed.Bench(tiny_params(num_layers=2), shorten=16, slots=2)


@pytest.mark.slow
def test_parts_on_a_tiny_model(tiny):
    made = engine_speed.document(tiny, "streaming(sink=1, recent=8)")
    assert made["requests"] == 64
    assert made["without_cache_questions"] == 4
    assert made["without_cache"]["computed_prompt_tokens"] == 4 * 72
    queued = engine_speed.queued(tiny, "dense")
    assert queued["static_rows"] == 2
    assert queued["static_seconds"] > 0
