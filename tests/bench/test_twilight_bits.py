"""Tests bench.twilight_bits: rounding by hand, masses next to a slow model, and its report."""

import json
import sys

import numpy as np
import pytest
from tiny import random_prompts, tiny_params

from bench import twilight_bits
from bench.lib.head_replay import RecordedHeads
from bench.twilight_bits import rounded, shares


def test_rounding_keeps_the_ends_and_so_many_levels():
    k = np.array([[0.0, 1.0, 1.6, 3.0], [-2.0, -2.0, -2.0, -2.0]], np.float32)
    np.testing.assert_allclose(rounded(k, 2), [[0, 1, 2, 3], [-2, -2, -2, -2]])
    many = np.linspace(-1, 1, 1000, dtype=np.float32)[None]
    for bits in (2, 4, 8):
        left = np.asarray(rounded(many, bits))
        assert len(np.unique(left)) == 2**bits
        assert np.abs(left - many).max() <= 1.001 / (2**bits - 1)


@pytest.mark.parametrize("framed", [False, True])
def test_masses_are_those_of_a_slow_model(framed):
    rng, frequencies = np.random.default_rng(0), np.float32(100.0 ** -np.linspace(0, 1, 8))
    keys = rng.normal(size=(2, 160, 16)).astype("f4")
    keys[..., 7] += 3
    queries = 2 * rng.normal(size=(2, 3, 2, 16)).astype("f4")
    found = shares(RecordedHeads(keys, queries), frequencies, bits=8, framed=framed)
    for nth, p in enumerate(twilight_bits.THRESHOLDS):
        for head in range(2):
            for w in range(3):
                seen = 160 - 3 + w + 1
                for g in range(2):
                    logits = keys[head, :seen] @ queries[head, w, g] / 4
                    weights = np.sort(np.exp(logits))[::-1] / np.exp(logits).sum()
                    count = np.searchsorted(np.cumsum(weights), p) + 1
                    # 8 bits are nearly exact, in the frame and out of it
                    mass, tokens = (found[name][nth, head, w, g] for name in ("mass", "tokens"))
                    assert mass == pytest.approx(weights[:count].sum(), abs=0.02)
                    assert tokens * seen == pytest.approx(count, abs=3)


@pytest.mark.slow
def test_a_run_writes_a_report(monkeypatch, tmp_path):
    params, path = tiny_params(num_layers=1), tmp_path / "x.json"
    monkeypatch.setattr(twilight_bits, "load", lambda name: params)
    monkeypatch.setattr(twilight_bits, "text_tokens", lambda params: random_prompts((96,))[0])
    monkeypatch.setattr(twilight_bits, "BITS", (4,))
    small = RecordedHeads(np.ones((1, 64, 8), "f4"), np.ones((1, 32, 2, 8), "f4"))
    monkeypatch.setattr(twilight_bits, "from_file", lambda path: small)
    monkeypatch.setattr(
        sys, "argv", ["twilight_bits", "--length", "96", "--prompts", "1", "--json", str(path)]
    )
    twilight_bits.main()
    rows = json.loads(path.read_text())["results"]
    assert [row["model"] for row in rows] == ["smollm2"] * 4 + ["qwen2.5-0.5b"] * 4
    assert all(0 < row["least_hundredth"] <= row["mass"] <= 1 for row in rows)


def test_lengths_of_no_whole_pages_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["twilight_bits", "--length", "100"])
    with pytest.raises(SystemExit):
        twilight_bits.main()
    assert "--length 100: must be a multiple of 16" in " ".join(capsys.readouterr().err.split())
