"""Tests bench.past_attention: policies choose among recorded heads as they do while decoding."""

from itertools import pairwise

import numpy as np
import pytest

from bench.lib.head_replay import RecordedHeads
from bench.past_attention import forms, measure, replayed, table_of
from jsparse.policies.expressions import parse

TOKENS, STEPS, WINDOW, GROUP, DIM = 64, 6, 32, 2, 8


def random_heads(heads=2):
    rng = np.random.default_rng(0)
    return RecordedHeads(
        rng.normal(size=(heads, TOKENS, DIM)).astype(np.float32),
        (3 * rng.normal(size=(heads, WINDOW + STEPS, GROUP, DIM))).astype(np.float32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfps(budget=1.0)", "streaming(recent=99)"])
def test_a_policy_that_attends_to_everything_finds_everything(policy):
    found = replayed(parse(policy), random_heads(), STEPS, 0.25, None)
    np.testing.assert_allclose(found.mass, 1.0, rtol=1e-5)
    np.testing.assert_allclose(found.attended, 1.0)
    np.testing.assert_allclose(found.overlap, 1.0)


def test_steps_are_those_of_the_last_queries():
    """The newest token alone: its true share of each step's attention."""
    heads = random_heads()
    found = replayed(parse("streaming(sink=0, recent=1)"), heads, STEPS, 0.25, None)
    for nth in range(STEPS):
        position = TOKENS - STEPS + nth
        q, k = np.asarray(heads.queries)[:, WINDOW + nth], np.asarray(heads.keys)
        weights = np.exp(np.einsum("kgh,ksh->kgs", q, k[:, : position + 1]) * DIM**-0.5)
        share = (weights[..., -1] / weights.sum(-1)).mean()
        np.testing.assert_allclose(found.mass[nth], share, rtol=1e-4)
        np.testing.assert_allclose(found.attended[nth], 1 / (position + 1), rtol=1e-5)


def test_forms_differ_from_the_papers_by_one_thing_at_a_time():
    names = [parse(name).name for name in forms(0.02, 4096)]
    assert len(set(names)) == len(names)
    own = [arguments(name) for name in names if name.startswith("lfps(")]
    paper = {"candidates": "'threshold'", "a": "0.2", "exact": "True", "penalty": "0.5"}
    (whole,) = (form for form in own if form.items() >= {**paper, "aligned": "False"}.items())
    assert int(whole["wider"]) * 0.02 >= 1  # no candidate is cut off
    for changed in (
        {"aligned": "True"},
        {"aligned": "True", "penalty": "0.0"},
        {"aligned": "True", "candidates": "'top'", "wider": "3"},
    ):
        assert whole | changed in own


def arguments(name):
    return dict(pair.split("=") for pair in name.partition("(")[2].rstrip(")").split(", "))


@pytest.mark.slow
def test_no_policy_finds_more_than_the_best():
    rows = measure([random_heads()], STEPS, 0.25)
    matched = [row for row in rows if row["budget"] != 0.25]
    assert [row["policy"] for row in rows if row["budget"] == 0.25] == [*forms(0.25, TOKENS)]
    assert len(matched) == 2 * 3
    for row in rows:
        assert 0 < row["mass"] <= 1.02 * row["best"] < 1.02
        assert (row["marked"] is not None) == ("threshold" in row["policy"])
    for form, same in pairwise(rows):
        if same in matched:
            assert "threshold" in form["policy"] or form in matched
            assert abs(same["attended"] - form["attended"]) <= 1.5 / TOKENS
    marked = [row["marked"] for row in rows if "penalty" in row["policy"] and row["marked"]]
    assert marked[:4] == sorted(marked[:4], reverse=True)
    assert table_of(rows).row_count == len(rows)
