"""Tests that the engine's benchmark measures what it says, on a tiny model."""

import pytest
from tiny import tiny_params

from bench import engine_speed


@pytest.fixture
def tiny(monkeypatch):
    for name, size in (("DOCUMENT", 64), ("QUESTION", 8), ("NEW", 6), ("SERVED", 96)):
        monkeypatch.setattr(engine_speed, name, size)
    return engine_speed.Bench(tiny_params(num_layers=2), shorten=16, slots=2)


@pytest.mark.slow
def test_parts_on_a_tiny_model(tiny):
    policy = "streaming(sink=1, recent=8)"
    made, _ = engine_speed.document(tiny, policy)
    assert made["requests"] == 64
    assert made["apart"]["requests"] == 2
    assert made["apart"]["computed_prompt_tokens"] == 2 * 72
    queued, static_batches = engine_speed.queued(tiny, policy)
    assert static_batches is not None
    workload, rows = static_batches
    assert (len(workload), rows) == (4, 2)
    assert queued["again"]["output_tokens"] == 4 * 6
    static = tiny.static(policy, workload, 2)
    assert static["static_rows"] == 2
    assert static["static_seconds"] > 0
