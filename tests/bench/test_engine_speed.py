"""Tests that the engine's benchmark measures what it says, on a tiny model."""

import pytest

from bench import engine_speed, server_speed
from tests.support.tiny import tiny_params


@pytest.fixture
def tiny(monkeypatch):
    for name, size in (
        ("DOCUMENT", 64),
        ("QUESTION", 8),
        ("PROMPT", 32),
        ("NEW", 8),
        ("SERVED", 96),
    ):
        monkeypatch.setattr(engine_speed, name, size)
    return engine_speed.Bench(tiny_params(num_layers=2), shorten=16, slots=2)


@pytest.mark.slow
def test_parts_on_a_tiny_model(tiny):
    policy = "streaming(sink=1, recent=8)"
    made, _ = engine_speed.document(tiny, policy)
    assert made["requests"] == 64
    assert made["apart"]["requests"] == 2
    for name in ("again", "each_itself"):
        assert made[name]["requests"] == 64
    assert made["apart"]["computed_prompt_tokens"] == 2 * 72
    queued, static_batches = engine_speed.queued(tiny, policy)
    assert static_batches is not None
    workload, rows = static_batches
    assert (len(workload), rows) == (4, 2)
    assert queued["output_tokens"] == 4 * 8
    assert "again" not in queued
    static = tiny.static(policy, workload, 2)
    assert static["static_rows"] == 2
    assert static["static_seconds"] > 0


@pytest.mark.slow
def test_the_same_workloads_over_http(tiny, monkeypatch):
    report = {"rows": []}
    parts = ["queued", "ragged", "arrivals", "small"]
    monkeypatch.setattr(engine_speed, "SMALL", 64)
    server_speed.run_parts(tiny, "streaming(sink=1, recent=8)", 96, parts, report, None)
    rows = {row["part"]: row for row in report["rows"]}
    for part, row in rows.items():
        alone, served = row["engine"], row["server"]
        assert served["completed"] == alone["requests"], part
        assert served["total_input_tokens"] == alone["prompt_tokens"], part
        assert served["total_output_tokens"] == alone["output_tokens"], part
    assert rows["ragged"]["server"]["completed"] == 16
    assert rows["queued"]["share_of_engine"] > 0
    assert rows["arrivals"]["request_rate"] > 0
