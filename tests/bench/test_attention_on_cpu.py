"""Tests bench.attention_on_cpu on a CPU: what its ways compute, and its report."""

import json
import sys

import jax
import numpy as np

from bench.attention_on_cpu import attend, main

CONTEXT = 128


def test_attend_is_softmax_attention_over_the_listed_rows():
    """Two rows whose KV heads list different tokens, against a loop in float64."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 3, 8))
    k, v = rng.standard_normal((2, 2 * 2 * CONTEXT, 8))
    heads = [rng.choice(CONTEXT, 5, False) + CONTEXT * head for head in range(4)]
    rows = np.array(heads, np.int32).reshape(2, 2, 5)
    args = [x.astype(np.float32) for x in (q / 8**0.5, k, v)]
    found = jax.jit(attend)(*args, rows)
    for batch, head, query in np.ndindex(2, 2, 3):
        at = rows[batch, head]
        logits = k[at] @ q[batch, head, query] / 8**0.5
        weights = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(found[batch, head, query], weights @ v[at], rtol=1e-4, atol=1e-5)


def test_a_run_times_every_way_and_records_what_is_refused(monkeypatch, tmp_path, capsys):
    """The ways that a CPU allows agree; the reference cannot read pinned memory in place."""
    path = tmp_path / "report.json"
    arguments = ["--context", str(CONTEXT), "--batch", "1", "--share", "0.1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench/attention_on_cpu.py", *arguments])
    main()
    report = json.loads(path.read_text())
    rows = {row["way"]: row for row in report["results"]}
    assert list(rows) == ["in place", "gather", "device", "compute_on", "cpu"]
    timed = [row for row in rows.values() if "us" in row]
    assert {"gather", "device", "compute_on", "cpu"} <= {row["way"] for row in timed}
    assert all(0 < row["us"]["min"] <= row["us"]["median"] for row in timed)
    assert all(row["difference"] < 0.02 for row in timed)
    assert report["settings"]["share"] == 0.1
    assert "compute_on" in capsys.readouterr().out
