"""Tests workloads and the figures measured on them."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.benchmark.throughput import measure, run
from jsparse.benchmark.workload import WorkloadRequest, random_workload
from jsparse.cli.app import app
from jsparse.engine import core
from jsparse.engine.core import Engine
from tests.support.serving import tiny_llm
from tests.support.tiny import tiny_params


def test_lengths_prefixes_and_arrivals_match_the_request():
    asked = {"num_prompts": 200, "input_len": (4, 32), "output_len": 3}
    asked |= {"shared_prefix": 7, "request_rate": 10.0}
    made = random_workload(50, **asked)
    assert {tuple(each.ids[:7]) for each in made} == {tuple(made[0].ids[:7])}
    lengths = [len(each.ids) - 7 for each in made]
    assert min(lengths) == 4
    assert max(lengths) == 32
    # half of them are below the geometric mean
    assert 70 < sum(length < 11 for length in lengths) < 130
    assert {each.tokens for each in made} == {3}
    arrivals = [each.arrival for each in made]
    assert arrivals == sorted(arrivals)
    assert 14 < arrivals[-1] < 27
    assert made == random_workload(50, **asked)


def test_workloads_out_of_range():
    for options, message in [
        ({"num_prompts": 0}, "num_prompts=0: must be an integer of at least 1"),
        ({"input_len": 0}, "input_len=0: must be an integer of at least 1"),
        ({"output_len": (5, 4)}, "output_len=4: must be an integer of at least 5"),
        ({"shared_prefix": -1}, "shared_prefix=-1: must be an integer of at least 0"),
        ({"request_rate": 0}, "request_rate=0: must be a number above 0"),
    ]:
        sizes = {"num_prompts": 5, "input_len": 6, "output_len": 3}
        with pytest.raises(ValueError, match=message):
            random_workload(50, **sizes | options)


def test_token_counts_add_up():
    params = tiny_params(num_layers=1)
    engine = tiny_llm(params=params, steps_per_program=2, ladder=((0, 16),)).engine
    workload = random_workload(
        300, num_prompts=6, input_len=(3, 9), output_len=(2, 12), shared_prefix=16
    )
    measured = measure(engine, workload)
    new = sum(each.tokens for each in workload)
    assert measured["output_tokens"] == new
    # decode steps produce all but the first token of each sequence
    rows = measured["rows_per_step"] * measured["decode_steps"]
    assert rows == pytest.approx(new - 6)
    prompt = sum(len(each.ids) for each in workload)
    assert measured["prompt_tokens"] == prompt
    assert measured["computed_prompt_tokens"] == prompt - 5 * 16
    assert measured["output_tokens_per_second"] == pytest.approx(new / measured["seconds"])
    assert 0 < measured["ttft_p50_ms"] <= measured["ttft_p99_ms"]
    assert measured["attended_fraction"] == pytest.approx(1)
    again = measure(engine, workload)
    assert again["computed_prompt_tokens"] == prompt - 6 * 16


def test_requests_arrive_on_schedule_and_outputs_keep_their_order():
    engine = tiny_llm(params=tiny_params(num_layers=1), steps_per_program=2).engine
    workload = [
        WorkloadRequest([1, 2, 3], 2, arrival=0.3),
        WorkloadRequest([4, 5], 4),
        WorkloadRequest([6], 3, arrival=0.1),
    ]
    outs = run(engine, workload)
    assert [len(out.outputs[0].token_ids) for out in outs] == [2, 4, 3]
    times = [out.metrics.arrived for out in outs]
    assert times[1] < times[2] < times[0]


@pytest.mark.slow
def test_command_prints_its_measurements(tmp_path, monkeypatch):
    def unprepared(*model):  # compile programs on demand
        return Engine(*model[:-1], replace(model[-1], prepare=False))

    monkeypatch.setattr(core, "Engine", unprepared)
    monkeypatch.setattr(Engine, "prepare", lambda engine, choices: None)
    jsparse.save(tiny_params(num_layers=1), tmp_path / "model")
    given = ["bench", "throughput", f"{tmp_path}/model", "--num-prompts", "3", "--json"]
    given += ["--input-len", "4:8", "--output-len", "3", "--max-num-seqs", "2"]
    result = CliRunner().invoke(app, [*given, "--policy", "streaming(sink=1, recent=2)"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["requests"], printed["output_tokens"]) == (3, 9)
    assert printed["policy"] == "streaming(sink=1, recent=2)"
    assert printed["attended_fraction"] < 1


def test_command_refuses_malformed_lengths():
    for length in ["x", "1:2:3", ""]:
        result = CliRunner().invoke(app, ["bench", "throughput", "smollm2", "--input-len", length])
        assert result.exit_code == 2, length
        assert f"--input-len '{length}': must be a number, or MIN:MAX" in result.output, length
