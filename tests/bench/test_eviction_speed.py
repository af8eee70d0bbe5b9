"""Tests bench.eviction_speed and its trace: replayed lengths, shared times, integrated rates."""

import jax
import numpy as np
import pytest
from tiny import random_prompts, tiny_params

from bench.eviction_speed import line, main, throughput
from bench.eviction_trace import record
from bench.lib.eviction_layers import LayerSizes, mixed_lengths, per_layer, replayed_lengths
from bench.lib.eviction_steps import filled, keeping_lengths, lengths_after, spec_of, tiny
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


@pytest.mark.parametrize("batch", [1, 64])
def test_replayed_lengths_have_the_traces_mean(batch):
    dealt = replayed_lengths(batch, 3, LayerSizes())
    assert set(dealt.flat) <= set(lengths_kept().flat)
    assert dealt.mean() == pytest.approx(1024, rel=0.1)
    assert (dealt != replayed_lengths(batch, 4, LayerSizes())).any()


def test_mixed_lengths_reach_from_the_floor_to_what_a_head_can_hold():
    dealt = mixed_lengths(8, 0, LayerSizes())
    assert (dealt.min(), dealt.max()) == (512, 2176)
    np.testing.assert_array_equal(
        np.sort(dealt.flat), np.sort(mixed_lengths(8, 1, LayerSizes()).flat)
    )


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


def test_times_of_several_layers_are_shared_out():
    row = {"bytes": 8, "us": {"median": 12.0, "min": 8.0}, "launches": 40, "order": [1, 2]}
    (shared,) = per_layer([row], 4)
    expected = {"bytes": 2.0, "us": {"median": 3.0, "min": 2.0}, "launches": 10.0, "layers": 4}
    assert shared == expected


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
def test_lengths_are_recorded_after_the_prompt_and_after_compressions():
    (prompt,) = random_prompts([90])
    first, last = record(tiny_params(), parse(SMALL), prompt, 2)
    assert (first["new_tokens"], last["new_tokens"]) == (0, 32)
    for entry in (first, last):
        assert np.mean(entry["lengths"], axis=1).tolist() == [64.0] * len(entry["lengths"])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["a", "b", "c", "d", "e"])
def test_a_tiny_run_has_no_failures(part, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["eviction_speed", "--tiny", "--parts", part])
    monkeypatch.setenv("JAX_PLATFORMS", jax.default_backend())
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert not any("failed" in text or "Error" in text for text in lines)
