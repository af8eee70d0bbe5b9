"""Tests bench.chunk_recall: recall and mass by hand, and how steady given choices are."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import random_prompts, tiny_params

from bench import chunk_recall
from bench.chunk_recall import (
    BEFORE,
    NEWEST,
    SINK,
    ChoiceRecord,
    HeadSource,
    compared,
    follow,
    measure,
    texts,
)
from bench.lib.head_replay import RecordedHeads
from jsparse.cache import LayerCache
from jsparse.selection import Selection

TOKENS, STEPS, GROUP, DIM = 64, 4, 2, 8


def random_source():
    rng = np.random.default_rng(0)
    return HeadSource(
        RecordedHeads(
            jax.device_put(rng.normal(size=(2, TOKENS, DIM))),
            jax.device_put(3 * rng.normal(size=(2, STEPS, GROUP, DIM))),
        ),
        None,
    )


@pytest.mark.slow
def test_the_oracle_finds_the_true_top_k():
    (row,) = measure(["oracle_top_k(budget=16)"], [random_source()], STEPS, 16)
    assert (row["recall"], row["attended"]) == (1.0, pytest.approx(16, abs=1))
    assert 0 < row["mass"] < 1


def test_recall_and_mass_are_those_of_a_window():
    """The newest 8 tokens: how many are among the 16 of largest weight, and what they weigh."""
    source = random_source()
    (row,) = measure(["streaming(sink=0, recent=8)"], [source], STEPS, 16)
    recalls, masses = [], []
    for nth in range(STEPS):
        held = TOKENS - STEPS + nth + 1
        for keys, queries in zip(*map(np.asarray, source.heads), strict=True):
            weights = np.exp(queries[nth] @ keys[:held].T * DIM**-0.5)
            weights /= weights.sum(-1, keepdims=True)
            best = np.argsort(-weights.max(0))[:16]
            recalls.append(np.mean(best >= held - 8))
            masses.append(weights[:, held - 8 :].sum(-1).mean())
    assert row["recall"] == pytest.approx(np.mean(recalls))
    assert row["mass"] == pytest.approx(np.mean(masses), rel=1e-4)
    assert row["attended"] == 8


def test_too_few_queries_are_refused():
    with pytest.raises(ValueError, match="heads with 4 queries: must have at least 5"):
        measure(["streaming()"], [random_source()], STEPS + 1, 16)


def test_choices_are_compared_with_those_before():
    """Sets of three slots in one head, of which some come again; sinks and newest do not count."""
    sets = [{20, 21, 22}, {21, 22, 23}, {21, 22, 23}, {20, 30, 31}, set()]
    length = SINK + NEWEST + BEFORE + 40
    pool = np.zeros((length // 16 + 1, 16, 4), np.float32)
    held = LayerCache(pool, pool, np.full((1, 1), length, np.int32))
    none = np.full((len(sets), 1, 1), np.nan, np.float32)
    never = np.full((1, 1, held.capacity), -BEFORE - 1, np.int32)
    own, step = (
        ChoiceRecord(*map(jax.device_put, (never, np.int32(0), none, none))),
        jax.jit(compared),
    )
    for slots in sets:
        listed = sorted({0, *slots, length - 2})
        ids = np.zeros((1, 1, 6), np.int32)  # one size, or each length is a program
        ids[..., : len(listed)] = listed
        counted = ids, np.full((1, 1), len(listed), np.int32)
        chosen = Selection(*map(jax.device_put, counted), granularity="token")
        own = step(own, chosen, held)
    np.testing.assert_allclose(np.ravel(own.jaccard), [np.nan, 2 / 4, 1, 0, 0])
    np.testing.assert_allclose(np.ravel(own.hits), [np.nan, 2 / 3, 1, 1 / 3, np.nan])


def test_dense_heads_choose_nothing_that_could_be_compared():
    held = LayerCache(
        *map(jax.device_put, (*[np.zeros((20, 16, 4), np.float32)] * 2, np.full((1, 1), 300)))
    )
    none = np.full((2, 1, 1), np.nan, np.float32)
    begun = np.zeros((1, 1, 320), np.int32), np.int32(1), none, none
    ids, count, marks = (
        np.zeros((1, 1, 0), np.int32),
        np.zeros((1, 1), np.int32),
        np.ones((1, 1), bool),
    )
    dense = Selection(*map(jax.device_put, (ids, count)), dense=jax.device_put(marks))
    own = ChoiceRecord(*map(jax.device_put, begun))
    assert np.isnan(jax.jit(compared)(own, dense, held).jaccard).all()


def test_texts_are_long_enough_or_refused(monkeypatch):
    words = SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    monkeypatch.setattr(chunk_recall, "tokenizer_of", lambda params, wanted: words)
    found = texts(tiny_params(), ("code", "json"), 600)
    assert all(len(ids) >= 600 for ids in found.values())
    with pytest.raises(ValueError, match="texts=code: has .* must have at least 1000000"):
        texts(tiny_params(), ("code",), 1000000)


@pytest.mark.slow
def test_one_that_keeps_everything_is_steady():
    (ids,) = random_prompts([240])
    row = follow(tiny_params(), "all_pages()", ids, 12, block=4)
    assert row["hits"] == row["jaccard"] == 1
    assert len(row["jaccard_by_block"]) == len(row["hits_by_block"]) == 3


@pytest.mark.slow
def test_the_command_measures_texts_and_heads_of_a_file(monkeypatch, tmp_path, capsys):
    (ids,) = random_prompts([256])
    monkeypatch.setattr(chunk_recall, "load", lambda name: tiny_params())
    monkeypatch.setattr(chunk_recall, "texts", lambda params, names, number: {"prose": ids})
    heads, out = random_source().heads, tmp_path / "out.json"
    np.savez(tmp_path / "other.npz", keys=heads.keys, queries=heads.queries)
    given = ["--length", "128", "--steps", "4", "--budget", "32", "48", "--json", str(out)]
    given += ["--policy", "quest(budget=BUDGET)", "--keys", str(tmp_path / "other.npz")]
    monkeypatch.setattr(sys, "argv", ["chunk_recall", *given])
    chunk_recall.main()
    rows = json.loads(out.read_text())["results"]
    assert [(row["text"], row["tokens"], row["policy"]) for row in rows] == [
        (text, tokens, f"quest(budget={budget})")
        for text, tokens in (("prose", 128), ("other", 64))
        for budget in (32, 48)
    ]
    assert "recall" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["chunk_recall", "--length", "40"])
    with pytest.raises(SystemExit, match="2"):
        chunk_recall.main()
