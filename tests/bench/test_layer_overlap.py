"""Tests bench.layer_overlap: what TidalDecode covers next to a slow model, and its report."""

import json
import sys

import numpy as np
import pytest
from tiny import random_prompts, tiny_params

from bench import layer_overlap
from bench.layer_overlap import covered, tables_of
from jsparse.evaluation.inspection import Inspection


def test_covered_is_what_a_model_that_follows_the_layers_finds():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(200, 0.05), (5, 2))
    for again, share in enumerate(covered(weights, 80, 2)):
        if again < 2:
            assert np.isnan(share)
            continue
        tokens, total = None, 0.0
        for layer, of_layer in enumerate(weights):
            if layer < 2 or layer in (2, again):
                total += 1
            else:
                total += of_layer[:, sorted(tokens)].sum(-1).mean()
            if layer in (2, again):
                ranked = np.argsort(-of_layer.mean(0))
                kept = {*range(4), *range(200 - 64, 200)}
                rest = [token for token in ranked.tolist() if token not in kept]
                tokens = kept | set(rest[: 80 - 68])
        assert share == pytest.approx(total / 5)


def test_tables_name_the_best_layer_first():
    found = {
        "overlap": [{"heaviest": 4, "mean": 0.5, "least": 0.25, "most": 0.75}],
        "covered": [{"again": 2, "covered": 0.5}, {"again": 3, "covered": 0.75}],
    }
    near, again = tables_of(found)
    assert [list(column.cells) for column in near.columns] == [
        ["4"],
        ["50.0%"],
        ["25.0%"],
        ["75.0%"],
    ]
    assert list(again.columns[0].cells) == ["layer 3", "never"]


@pytest.mark.slow
def test_a_run_writes_a_report(monkeypatch, tmp_path):
    text, path = random_prompts((620,))[0], tmp_path / "x.json"
    params = tiny_params(num_layers=4)
    monkeypatch.setattr(layer_overlap, "load", lambda name: params)
    monkeypatch.setattr(layer_overlap, "text_tokens", lambda params: text)
    sizes = ["--length", "300", "--prompts", "2", "--budget", "100"]
    monkeypatch.setattr(sys, "argv", ["layer_overlap", *sizes, "--json", str(path)])
    layer_overlap.main()
    report = json.loads(path.read_text())["results"]
    assert np.array(report["overlap"][0]["by_layer_and_head"]).shape == (3, 2)
    assert [row["again"] for row in report["covered"]] == [2, 3]


def test_sizes_that_do_not_fit_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["layer_overlap", "--length", "100"])
    with pytest.raises(SystemExit):
        layer_overlap.main()
    assert "--length 100: must be at least 512" in " ".join(capsys.readouterr().err.split())


def test_a_mean_over_steps():
    steps = [
        Inspection("m", "dense()", ["x"] * 300, 299, "x", weights > 0, weights, ())
        for seed in (0, 1)
        for weights in [np.random.default_rng(seed).dirichlet(np.ones(300), (4, 2)).astype("f4")]
    ]
    found = layer_overlap.results(steps, 100)
    each = [step.overlap(64) for step in steps]
    np.testing.assert_allclose(
        found["overlap"][1]["by_layer_and_head"], np.mean(each, 0), rtol=1e-6
    )
    assert [row["again"] for row in found["covered"]] == [2, 3]
