"""Tests the loop that drives both engines of bench.peers, and the config.json that vLLM reads."""

import json
from dataclasses import replace

import pytest

from bench.lib.engine_driver import BLOCK, SKIPPED, Case, drive, figures, step_times
from bench.lib.subprocesses import stream_child
from bench.peers import by_shape, hf_config, shape_of
from jsparse.models.config_files import read_config

pytestmark = pytest.mark.pure

VLLM = """
__version__ = "0"

class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]

class Output:
    def __init__(self, name, count):
        self.request_id, self.outputs = name, [self]
        self.token_ids = [0] * count

class LLM:
    def __init__(self, model, **options):
        assert options["max_num_seqs"] == 16 and options["kv_cache_dtype"] == "fp8", options
        self.llm_engine, self.counts, self.wanted = self, {}, {}

    def add_request(self, name, prompt, sampling):
        assert len(prompt["prompt_token_ids"]) > 10
        self.counts[name + "-suffix"], self.wanted[name + "-suffix"] = -1, sampling.tokens

    def step(self):
        self.counts = {n: c + 1 for n, c in self.counts.items() if c < self.wanted[n]}
        return [Output(name, count) for name, count in self.counts.items()]
"""


class Counting:
    """An engine that gives every request two tokens per step."""

    def __init__(self):
        self.running, self.most, self.all = {}, 0, 0

    def add(self, name, ids, tokens):
        self.running[name] = [0, tokens]
        self.all += 1
        self.most = max(self.most, len(self.running))

    def step(self):
        for counts in self.running.values():
            counts[0] = min(counts[0] + 2, counts[1])
        counts = {name: has for name, (has, _) in self.running.items()}
        self.running = {name: each for name, each in self.running.items() if each[0] < each[1]}
        return counts


def test_no_more_than_at_once_are_served():
    engine = Counting()
    moments = drive(engine, [([1], 5)] * 7, at_once=3)
    assert engine.most == 3
    assert [[count for _, count in each] for each in moments] == [[2, 4, 5]] * 7


def test_steps_are_timed_while_all_rows_decode():
    # the first row decodes alone for 10 s, with 1 token per second; then both take 2 s per token
    first = [(float(t), t + 1) for t in range(10)]
    first += [(10.0 + 2 * t, 11 + t) for t in range(SKIPPED + 2 * BLOCK)]
    second = [(10.0 + 2 * t, 1 + t) for t in range(SKIPPED + 5 * BLOCK)]
    assert step_times([first, second]) == pytest.approx([2000.0])
    second += [(second[-1][0] + 500, second[-1][1] + 100)]
    assert step_times([second]) == pytest.approx([2000.0] * 4 + [(63 * 2000 + 500_000) / 163])


def test_figures_of_requests_that_wait_have_no_steps():
    case = Case("x", "8b", 6, prompt=20, new=400, varied=0.5, at_once=2)
    lengths = [(len(ids), tokens) for ids, tokens in case.requests(100)]
    assert len({*lengths}) > 3
    assert all(10 <= prompt <= 30 and 200 <= new <= 600 for prompt, new in lengths)
    found = figures(case, Counting(), 100)
    assert found["step_ms"] is None and found["read_seconds"] is None
    engine = Counting()
    found = figures(replace(case, at_once=None, varied=0.0, runs=3), engine, 100)
    assert found["steps"] > 3 and found["output_tokens_per_second"] > 0
    assert engine.all == 3 * 6, "what warms the engine up is not counted"


def test_vllm_reads_the_same_shape(tmp_path):
    for name in ("8b", "135m"):
        shape = shape_of(name)
        (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
        assert read_config(tmp_path) == shape


def test_child_of_vllm_prints_every_case(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape_of("8b"))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = json.dumps({"kv_cache_dtype": "fp8"})
    (case,) = by_shape(["one"])
    (row,) = stream_child("bench.lib.vllm_engine", [str(tmp_path), options, *case])
    assert row["case"] == "one" and row["vllm"] == "0" and row["steps"] > 3
    options = json.dumps({"kv_cache_dtype": "auto"})
    with pytest.raises(RuntimeError, match=r"vllm_engine[\s\S]*AssertionError"):
        list(stream_child("bench.lib.vllm_engine", [str(tmp_path), options, "one"]))
