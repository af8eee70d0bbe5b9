"""Tests bench.eviction_error: what a replay sees is what a run of the policy does."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompts, random_tokens, tiny_params

from bench import eviction_error, plot_eviction
from bench.eviction_error import catch_up, compared, expressions, measure, record, replay
from jsparse.policies.expressions import parse
from jsparse.runtime.sampling import forced
from jsparse.runtime.session import Session

STEPS, PROMPT = 24, 60
PROMPTS, FOLLOW = random_prompts((PROMPT, PROMPT)), random_tokens(2, STEPS)
COMMON = "period=8, window=6, sink=2"
SMALL = f"hard_kv(budget=24, floor=12, cap=40, {COMMON}"


@pytest.fixture(scope="module", autouse=True)
def window():
    """Records as few queries as these policies have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction_error, "WINDOW", 6)
        yield


@pytest.fixture(scope="module")
def recorded(window):
    return record(tiny_params(num_layers=2), PROMPTS, FOLLOW)


def replayed(recorded, expression, layer=0):
    arguments = recorded.layers[layer], recorded.windows[layer], recorded.queries[layer]
    return jax.device_get(replay(parse(expression), recorded.spec, recorded.prompt, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", merge=False", ", metric='r_kv', budgets='uniform'"])
def test_the_first_layer_is_replayed_as_it_runs(recorded, more):
    """What the first layer is asked does not depend on the policy."""
    params, policy = tiny_params(num_layers=2), parse(f"{SMALL}{more})")
    session = Session(params, policy, recorded.spec, steps_per_program=1)
    session.read(PROMPTS)
    table = jnp.asarray(np.pad(FOLLOW.T, ((0, 1), (0, 0))))
    for _ in session.steps(forced, table, limits=[STEPS + 1] * 2):
        pass
    found = replayed(recorded, policy.name)
    np.testing.assert_array_equal(found.kept[-1], session.held.cache.layers[0].lengths)
    assert found.slots.shape == (STEPS, 2, 2) and found.kept.shape == (4, 2, 2)
    grown = found.kept[:-1, None] + np.arange(1, 9)[:, None, None]
    np.testing.assert_array_equal(found.slots, grown.reshape(STEPS, 2, 2))


@pytest.mark.slow
def test_what_drops_nothing_has_no_error(recorded):
    found = replayed(recorded, f"hard_kv(budget=1000, floor=1000, cap=1000, {COMMON})", layer=1)
    np.testing.assert_allclose(found.error, 0, atol=1e-5)
    np.testing.assert_allclose(found.drift, 0, atol=1e-5)
    assert (found.kept[-1] == PROMPT + STEPS).all()


@pytest.mark.slow
def test_errors_are_those_of_slow_attention(recorded):
    """The first step's, next to float64 over the slots that the first compression leaves."""
    expression = f"{SMALL}, merge=False)"
    params, policy = tiny_params(num_layers=2), parse(expression)
    session = Session(params, policy, recorded.spec, steps_per_program=1)
    session.read(PROMPTS)
    steps = session.steps(forced, jnp.asarray(FOLLOW.T), limits=[3] * 2)
    list(itertools.islice(steps, 2))
    steps.close()
    held, whole = session.held.cache.layers[0], recorded.layers[0]
    kept = np.asarray(held.lengths)

    def heads(pool, layer):
        return np.asarray(pool, np.float64).reshape(2, 2, layer.capacity, -1)

    q = np.asarray(recorded.queries[0][0], np.float64).reshape(2, 2, 2, -1)
    found = replayed(recorded, expression)
    for row, head, member in np.ndindex(2, 2, 2):
        outs, sums = [], []
        for layer, length in ((held, kept[row, head]), (whole, PROMPT + 1)):
            k, v = (heads(pool, layer)[row, head, :length] for pool in (layer.k, layer.v))
            weights = np.exp(k @ q[row, head, member] / 4)
            outs.append(weights @ v / weights.sum())
            sums.append(np.log(weights.sum()))
        error = np.linalg.norm(outs[0] - outs[1]) / np.linalg.norm(outs[1])
        at = 0, row, 2 * head + member
        assert found.error[at] == pytest.approx(error, rel=1e-3, abs=1e-5)
        assert found.drift[at] == pytest.approx(sums[0] - sums[1], rel=1e-3, abs=1e-5)
        assert found.drift[at] < 0


@pytest.mark.slow
def test_temperatures_are_solved_anew(recorded):
    # a share of attention has the temperature 1
    expression = f"{SMALL}, metric='h2o', budgets='calibrated')"
    row = measure(recorded, expression)
    solved = np.array(row["temperatures_by_head"])
    assert solved.shape == (4, 2, 2) and (solved > 0).all()
    assert not np.allclose(solved[0], solved[-1])
    assert "temperatures_by_head" not in measure(recorded, f"{SMALL})")


def test_a_compression_is_worth_the_reading_that_it_saves():
    """After 100 tokens 40 are kept: 50 + 80 slots are moved, and 60 less are read per step."""
    slots = np.arange(41, 61)
    found = catch_up(10, 100, slots, np.array([40, 40, 40]))
    assert found == pytest.approx([130 / 60, (25 + 80) / 70, (30 + 80) / 80], abs=1e-3)


def test_pairs_are_compared():
    """Each expression with merging is compared with the same without; calibrated ones merge."""
    chosen = expressions(64, ("attention", "snapkv"), ("joint", "uniform", "calibrated"))
    assert len(chosen) == len(set(chosen)) == 2 * 3 + 2
    assert all(parse(expression).evicts for expression in chosen)
    chosen = [expression for expression in chosen if "calibrated" not in expression]
    errors = [[[0.1, 0.3]], [[0.2, 0.2]]] * 3
    rows = [
        {"policy": policy, "error": np.mean(error), "error_by_head": error}
        for policy, error in zip(chosen, errors, strict=True)
    ]
    pairs = compared(rows)
    assert [pair["policy"] for pair in pairs] == chosen[::2]
    assert pairs[0]["reduction"] == pytest.approx(0) and pairs[0]["lower_in_heads"] == 0.5


@pytest.mark.slow
def test_the_report_is_drawn(monkeypatch, tmp_path):
    """From the command to the figures, on the tiny model."""
    path = tmp_path / "report.json"
    monkeypatch.setattr(eviction_error, "load", lambda name: tiny_params(num_layers=2))
    monkeypatch.setattr(eviction_error, "text_tokens", lambda params: random_prompts((800,))[0])
    arguments = ["--prompt", "100", "--prompts", "2", "--steps", "128", "--budget", "48"]
    arguments += ["--metrics", "attention", "--budgets", "joint", "calibrated"]
    monkeypatch.setattr(sys, "argv", ["eviction_error", "--json", str(path), *arguments])
    eviction_error.main()
    report = json.loads(path.read_text())
    assert len(report["results"]) == 3 and len(report["merging"]) == 1
    monkeypatch.setattr(sys, "argv", ["plot_eviction", str(path)])
    plot_eviction.main()
    assert {file.name for file in tmp_path.glob("*.png")} == set(plot_eviction.FIGURES)


def test_other_steps_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(eviction_error, "load", lambda name: tiny_params(num_layers=2))
    monkeypatch.setattr(eviction_error, "text_tokens", lambda params: random_prompts((800,))[0])
    for arguments, said in (
        (["--steps", "100"], "--steps 100: must be a multiple of the period of 128"),
        (["--steps", "128"], "--prompts 4 of 4224 tokens: must be from 1 to 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["eviction_error", *arguments])
        with pytest.raises(SystemExit):
            eviction_error.main()
        assert said in capsys.readouterr().err
