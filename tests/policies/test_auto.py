"""Tests that `auto` chooses by device and by the bytes of K and V, and runs the chosen policy."""

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.builder import dense
from jsparse.cache import CacheSpec
from jsparse.cli.app import app
from jsparse.evaluation.closeness import closeness
from jsparse.evaluation.teacher_forcing import force
from jsparse.policies.auto import auto, layer_bytes
from jsparse.policies.break_evens import BreakEvens
from jsparse.policies.expressions import parse
from jsparse.policy import resolved
from tests.support.tiny import random_prompts, tiny_params

MODULE = sys.modules[layer_bytes.__module__]
PROMPT = random_prompts((30,))[0]


def spec(batch=1, num_pages=64, kv_heads=2):
    return CacheSpec(1, batch, 2 * kv_heads, kv_heads, 16, 8, num_pages, np.float32)


@pytest.fixture
def measured(monkeypatch):
    """Makes this device a measured one, with a break-even of 64 KB."""
    monkeypatch.setattr(MODULE, "break_evens", lambda: BreakEvens(0, 2**16, None))


def test_unmeasured_devices_use_dense():
    assert resolved(auto(), spec(num_pages=2**20)) is dense()


def test_bytes_of_the_whole_batch_decide(measured):
    for batch, num_pages, sparse in ((1, 31, False), (1, 32, True), (2, 16, True), (2, 15, False)):
        sizes = spec(batch, num_pages)
        assert layer_bytes(sizes) == 2 * batch * 2 * num_pages * 8 * 16 * 4
        assert (resolved(auto(), sizes) is not dense()) == sparse, (batch, num_pages)


def test_it_runs_as_the_chosen_policy_and_reports_it(measured):
    options = {"max_new_tokens": 4, "page_size": 8, "max_length": 512}
    made = jsparse.generate(tiny_params(num_layers=1), PROMPT, policy="auto", **options)
    assert made.stats.policy.startswith("twilight(base=all_pages()")
    assert made.stats.attended_fraction < 1
    assert parse(made.stats.policy).name == made.stats.policy


def test_prompts_set_hyper_parameters_of_the_chosen_policy(measured):
    sampling = jsparse.SamplingParams(max_tokens=4, policy={"p": 0.01})
    options = {"page_size": 8, "max_length": 512, "sampling": sampling}
    made = jsparse.generate(tiny_params(num_layers=1), PROMPT, policy="auto", **options)
    assert made.stats.attended_fraction < 0.5
    options["max_length"] = 64
    with pytest.raises(ValueError, match=r"policy=\{'p': 0.01\}: dense\(\) lets rows set"):
        jsparse.generate(tiny_params(num_layers=1), PROMPT, policy="auto", **options)


def test_drafting_has_its_own_break_even(monkeypatch):
    """It is independent of the choice of `auto` without verification."""
    own = BreakEvens(0, np.inf, layer_bytes(spec(1, 32)))
    monkeypatch.setattr(MODULE, "break_evens", lambda: own)
    assert resolved(auto(), spec(1, 31), drafts=True) is dense()
    assert resolved(auto(), spec(1, 32), drafts=True) is MODULE.DRAFTING
    assert resolved(auto(), spec(1, 32)) is dense()


def test_unmeasured_devices_draft_with_dense(caplog):
    MODULE._log.cache_clear()
    options = {"max_new_tokens": 4, "page_size": 8, "max_length": 512, "exact": True}
    with caplog.at_level("WARNING", "jsparse.auto"):
        out = jsparse.generate(tiny_params(num_layers=1), PROMPT, policy="auto", **options)
    assert out.stats.policy == "dense()" and out.stats.drafted_tokens == 0
    assert "drafts have not been measured on this device" in caplog.text


@pytest.mark.slow
def test_it_drafts_as_the_chosen_policy(monkeypatch):
    monkeypatch.setattr(MODULE, "break_evens", lambda: BreakEvens(0, np.inf, 1))
    options = {"max_new_tokens": 4, "page_size": 8, "max_length": 512, "exact": True}
    out = jsparse.generate(
        tiny_params(num_layers=1), PROMPT, policy="auto", num_speculative_tokens=2, **options
    )
    assert out.stats.policy.startswith("verified(budget=512")
    # a budget of all tokens agrees with dense attention
    assert out.stats.drafted_tokens == out.stats.accepted_tokens > 0


def test_it_cannot_be_nested():
    with pytest.raises(ValueError, match=r"=auto\(\): must not be inside another policy"):
        parse("keep(auto)")
    with pytest.raises(ValueError, match=r"policy=auto\(\): must be a policy, not a placeholder"):
        parse("auto")


@pytest.mark.slow
def test_evaluation_runs_the_chosen_policy(measured):
    forcing = force(tiny_params(num_layers=1), ["auto"], [PROMPT], max_new_tokens=4, max_length=512)
    assert forcing.shared.names[1] == "auto()"
    assert forcing.shared.session(1).deployment.policy.name.startswith("twilight(base=all_pages()")
    found = closeness(forcing)
    assert found.policies == ("dense()", "auto()")
    short = force(tiny_params(num_layers=1), ["auto"], [PROMPT], max_new_tokens=4, max_length=64)
    assert closeness(short).kl[1].max() == 0


def test_info_prints_the_choice(measured, monkeypatch):
    def shown(*args):
        ran = CliRunner().invoke(app, ["info", "smollm2", "--policy", "auto", *args])
        assert ran.exit_code == 0
        return ran.stdout

    runs = json.loads(shown("--context", "4096", "--json"))["policy_that_runs"]
    assert runs.startswith("twilight(base=all_pages()")
    assert "auto() is twilight" in shown("--context", "4096")
    monkeypatch.setattr(MODULE, "break_evens", lambda: None)
    assert json.loads(shown("--json"))["policy_that_runs"] == "dense()"
