"""Tests bench.sink_heads: distances by hand, outputs next to slow attention, and its tables."""

import json
import sys

import jax
import numpy as np
import pytest
from tiny import random_prompts, random_tokens, tiny_params

from bench import sink_heads
from bench.eviction_error import record
from bench.sink_heads import OUTPUTS, bypasses, distances, measure, near, tables_of

PROMPT, STEPS, SINKS = 92, 3, 4


@pytest.fixture(scope="module")
def recorded():
    return record(tiny_params(num_layers=1), random_prompts((PROMPT,)), random_tokens(1, STEPS))


def test_neighbours_are_other_marks():
    marks = np.zeros((2, 40), bool)
    marks[0, [0, 1, 5, 13, 39]] = True  # 1, 1, 4, 8 and 26 from the nearest other
    marks[1, 7] = True
    expected = [[0.4, 0], [0.4, 0], [0.6, 0], [0.8, 0]]
    np.testing.assert_allclose(jax.jit(near)(marks), expected, rtol=1e-6)


@pytest.mark.slow
def test_a_layer_is_that_of_slow_attention(recorded):
    found = measure(recorded)
    (held,), (window,), (queries,) = recorded.layers, recorded.windows, recorded.queries
    k, v = (np.asarray(pool, np.float64).reshape(2, held.capacity, -1) for pool in (held.k, held.v))
    last, asked = (np.asarray(x, np.float64) for x in (window[0, -1], queries[:, 0]))
    scale = last.shape[-1] ** -0.5
    for step in range(STEPS):
        t = PROMPT + step
        for h in range(2):
            group = asked[step, 2 * h : 2 * h + 2]
            logits = group @ k[h, : t + 1].T * scale
            weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            heaviest = np.argsort(-weights.max(0))
            listed = heaviest[: -(-2 * (t + 1) // 100)]
            middle = k[h, SINKS:PROMPT]
            for g in range(2):
                n, q = 2 * h + g, group[g]
                spread = np.var(middle @ last[n] * scale) / (last[n] @ last[n])
                rest = (PROMPT - SINKS) * np.exp(middle.mean(0) @ q * scale + q @ q * spread / 2)
                raw, mean = np.exp(logits[g]), v[h, SINKS:PROMPT].mean(0)
                first, total = raw[:SINKS] @ v[h, :SINKS], raw[:SINKS].sum()
                rho = total / (total + rest + raw[t - 6 : t].sum())
                np.testing.assert_allclose(np.exp(found.log_rho[0, step, h, g]), rho, rtol=1e-3)
                outputs = (
                    raw[listed] @ v[h, listed] / raw[listed].sum(),
                    first / total,
                    (first + rest * mean) / (total + rest),
                    mean,
                )
                full = weights[g] @ v[h, : t + 1]
                errors = [np.linalg.norm(o - full) / np.linalg.norm(full) for o in outputs]
                np.testing.assert_allclose(found.errors[0, step, :, h, g], errors, rtol=1e-3)
            for newest, within in zip((0, 64), found.within[0, step], strict=True):
                counted = [i for i in heaviest if SINKS <= i <= t - newest]
                marks = np.zeros(t + 1, bool)
                marks[counted[: -(-4 * (t + 1) // 100)]] = True
                np.testing.assert_allclose(within[1, :, h], jax.jit(near)(marks), rtol=1e-6)


def test_heads_pass_alone_or_with_their_group():
    rho = np.array([[[0.96, 0.1], [0.86, 0.88]]])  # one step, two KV heads of two query heads
    errors = np.arange(16.0).reshape(1, 4, 2, 2)
    rows = {(r["of"], r["epsilon"]): r for r in bypasses(np.log(rho), errors)}
    assert [rows["query heads", e]["heads"] for e in (0.95, 0.9, 0.85, 0.7)] == [
        0.25,
        0.25,
        0.75,
        0.75,
    ]
    assert [rows["KV heads", e]["heads"] for e in (0.95, 0.9, 0.85, 0.7)] == [0, 0, 0.5, 0.5]
    assert [rows["query heads", 0.9][name] for name in OUTPUTS] == [0, 4, 8, 12]
    assert [rows["KV heads", 0.85][name] for name in OUTPUTS] == [2.5, 6.5, 10.5, 14.5]
    assert {rows["KV heads", 0.9][name] for name in OUTPUTS} == {None}
    assert tables_of({"distances": [], "bypasses": list(rows.values())})[1].row_count == 12


def test_distances_are_means_over_all_but_their_own_axes():
    within = np.arange(2 * 2 * 2 * 4 * 2).reshape(2, 2, 2, 4, 2) / 64
    rows = distances(within)
    assert [r["newest_left_out"] for r in rows] == [0, 0, 64, 64]
    assert [r["budget"] for r in rows] == [0.02, 0.04, 0.02, 0.04]
    np.testing.assert_allclose(rows[2]["within"], within[:, 1, 0].mean((0, 2)))
    np.testing.assert_allclose(rows[1]["by_chance"][0], 1 - 0.96**2)


@pytest.mark.slow
def test_a_run_writes_a_report(monkeypatch, tmp_path):
    text = random_prompts((2 * (PROMPT + STEPS),))[0]
    monkeypatch.setattr(sink_heads, "load", lambda name: tiny_params(num_layers=1))
    monkeypatch.setattr(sink_heads, "text_tokens", lambda params: text)
    path, sizes = tmp_path / "x.json", ["--length", str(PROMPT + STEPS), "--steps", str(STEPS)]
    monkeypatch.setattr(sys, "argv", ["sink_heads", "--prompts", "2", *sizes, "--json", str(path)])
    sink_heads.main()
    report = json.loads(path.read_text())
    assert report["settings"]["dtype"] == "float32"
    assert len(report["results"]["distances"]) == 4 and len(report["results"]["bypasses"]) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--length", "132", "--steps", "64"], "--length 132: must be at least 133"),
        (["--steps", "0"], "--steps and --prompts must be at least 1"),
    ],
)
def test_sizes_of_nothing_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["sink_heads", *arguments])
    with pytest.raises(SystemExit):
        sink_heads.main()
    assert said in " ".join(capsys.readouterr().err.split())
