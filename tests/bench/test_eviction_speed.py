"""Tests bench.eviction_speed: replayed lengths and integrated rates."""

import jax
import numpy as np
import pytest

from bench.eviction_speed import line, main, throughput
from bench.lib.eviction_steps import (
    LayerSizes,
    filled,
    keeping_lengths,
    lengths_after,
    replayed_lengths,
    spec_of,
    tiny,
)
from bench.lib.replay import lengths_kept
from jsparse.policies.expressions import parse
from jsparse.runtime.rows import maintain

SMALL = "hard_kv(budget=64, floor=48, cap=128, period=16, window=8)"


def test_the_trace_shares_out_the_default_budget():
    lengths = lengths_kept()
    np.testing.assert_array_equal(lengths.mean(axis=1), 1024)
    assert lengths.min() >= 512
    assert lengths.max() <= 2048
    assert lengths.std() > 100


def test_replayed_lengths_have_the_traces_mean():
    for batch in [64]:
        dealt = replayed_lengths(batch, 3, LayerSizes())
        assert set(dealt.flat) <= set(lengths_kept().flat), batch
        assert dealt.mean() == pytest.approx(1024, rel=0.1), batch
        assert (dealt != replayed_lengths(batch, 4, LayerSizes())).any(), batch


@pytest.mark.slow
def test_heads_have_the_replayed_lengths_after_every_compression():
    scale, batch = tiny(), 2
    lengths = lengths_after(SMALL, scale, batch)
    policy = keeping_lengths(parse(SMALL), lengths)
    spec = spec_of(scale, batch, scale.sizes.capacity)
    held = filled(spec, policy, [n + scale.sizes.period for n in lengths], 500)
    before = np.asarray(held.cache.layers[0].k)
    cache, _ = maintain(policy, held.cache, held.state)
    for layer, wanted in zip(cache.layers, lengths, strict=True):
        np.testing.assert_array_equal(layer.lengths, wanted)
    assert (np.asarray(cache.layers[0].k) != before).any()


def test_uniform_heads_have_their_budget():
    scale = tiny()
    uniform = lengths_after(SMALL.replace(")", ", budgets='uniform')"), scale, 3)
    assert {int(n) for layer in uniform for n in layer.flat} == {64}


def test_rates_are_integrated_over_lengths():
    """Steps that take 1 ms at 0 tokens and 3 ms at 100 take 2 ms on average."""
    point = {"part": "d", "case": "27", "policy": "dense", "batch": 27}
    lengths = [{"slots": at, "step": {"median": 1e-3 + 2e-5 * at}} for at in (0, 30, 100)]
    flat = {**point, "policy": SMALL, "batch": 8, "step": {"median": 4e-3}}
    dense, evicting = throughput(
        [{**point, "lengths": lengths}, flat, {**point, "error": "no"}], False
    )
    assert dense["tokens_per_second"] == pytest.approx(27 / 2e-3)
    assert evicting["tokens_per_second"] == pytest.approx(8 / 4e-3)
    assert "integrated" in line(dense)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["c", "d", "e"])
def test_a_tiny_run_has_no_failures(part, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["eviction_speed", "--tiny", "--parts", part])
    monkeypatch.setenv("JAX_PLATFORMS", jax.default_backend())
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert not any("failed" in text or "Error" in text for text in lines)
