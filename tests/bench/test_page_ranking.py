"""Tests bench.page_ranking: Quest's score is that of the op, and masses are those of the pages."""

import json
import sys
from functools import partial

import jax
import numpy as np
import pytest
from tiny import random_prompts, tiny_params

from bench import page_ranking
from bench.lib.head_replay import PAGE, RecordedHeads
from bench.page_ranking import SCORES, WINDOW, described, measure, recorded
from jsparse.pallas_kernels.page_bounds import page_bounds
from tests.kernels.cases.page_bounds import CASES, build


def random_heads(heads=3, tokens=160, group=4, head_dim=8):
    rng = np.random.default_rng(0)
    return RecordedHeads(
        rng.normal(size=(heads, tokens, head_dim)).astype(np.float32),
        rng.normal(size=(heads, WINDOW, group, head_dim)).astype(np.float32),
    )


def test_a_slack_of_1_is_the_bound_of_the_op():
    given = build(next(case for case in CASES if case.name == "one_row_one_head"))
    keys = np.asarray(given.layer.k).reshape(-1, given.layer.k.shape[-1])
    held = int(np.asarray(given.layer.lengths)[0, 0]) // given.layer.page_size
    q = np.asarray(given.q)[0] * np.float32(keys.shape[-1] ** -0.5)
    score = jax.jit(lambda q, keys: SCORES["slack 1"](q, described(keys)))(q, keys[: held * PAGE])
    bound = jax.jit(partial(page_bounds, implementation="reference"))(*given)
    np.testing.assert_allclose(np.asarray(score)[0], np.asarray(bound)[0, 0, :held], rtol=1e-5)


@pytest.mark.slow
def test_no_score_finds_more_mass_than_the_true_one():
    rows = measure([random_heads()], [32, 64, 144])
    assert len(rows) == 3 * (3 * len(SCORES) + 1)
    for budget in (32, 64, 144):
        found = {row["score"]: row["mass"] for row in rows if row["budget"] == budget}
        assert max(found.values()) == found["oracle"] < 1
        assert all(0 < mass <= found["oracle"] for mass in found.values())


def test_the_mass_is_that_of_the_newest_page_and_the_best_ranked():
    """One token of a page far back has all of the mass that the newest page lacks."""
    heads = random_heads(heads=1)
    keys = np.zeros(heads.keys.shape, np.float32)
    keys[0, 20, 0] = 50
    q = np.zeros(heads.queries.shape, np.float32)
    q[..., 0] = 1
    rows = measure([RecordedHeads(*map(jax.device_put, (keys, q)))], [PAGE, 2 * PAGE])
    held = np.arange(keys.shape[1] - WINDOW, keys.shape[1]) + 1
    peak = np.exp(50 * keys.shape[-1] ** -0.5)
    newest = np.mean(((held - 1) % PAGE + 1) / (held - 1 + peak))
    for row in rows:
        if row["budget"] == PAGE:
            assert row["mass"] == pytest.approx(newest, rel=1e-4)
        elif row["score"] in ("slack 0.6", "oracle"):
            assert row["mass"] > 0.99


@pytest.mark.slow
def test_recorded_queries_are_the_prompts_last():
    params = tiny_params()
    (ids,) = random_prompts([64])
    heads, earlier = (recorded(params, some) for some in (ids, ids[:48]))
    config = params.config
    group = config.num_heads // config.num_kv_heads
    count = config.num_layers * config.num_kv_heads
    assert heads.keys.shape == (count, 64, config.head_dim)
    assert heads.queries.shape == (count, WINDOW, group, config.head_dim)
    np.testing.assert_allclose(heads.keys[:, :48], earlier.keys, atol=1e-5)
    np.testing.assert_allclose(heads.queries[:, :16], earlier.queries[:, 16:], atol=1e-5)


@pytest.mark.slow
def test_the_command_records_both_models(monkeypatch, tmp_path, capsys):
    (ids,) = random_prompts([128])
    monkeypatch.setattr(page_ranking, "load", lambda name: tiny_params())
    monkeypatch.setattr(page_ranking, "text_tokens", lambda params: ids)
    heads, out = random_heads(), tmp_path / "out.json"
    np.savez(tmp_path / "other.npz", keys=heads.keys, queries=heads.queries)
    arguments = ["--length", "64", "--prompts", "2", "--budget", "32", "--json", str(out)]
    keys = ["--keys", str(tmp_path / "other.npz")]
    monkeypatch.setattr(sys, "argv", ["page_ranking", *arguments, *keys])
    page_ranking.main()
    report = json.loads(out.read_text())
    assert {(r["model"], r["tokens"]) for r in report["results"]} == {
        ("smollm2", 64),
        ("other", 160),
    }
    assert "oracle" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["page_ranking", "--length", "40"])
    with pytest.raises(SystemExit, match="2"):
        page_ranking.main()
