"""Tests bench.past_attention: policies choose among recorded heads as they do while decoding."""

import numpy as np
import pytest

from bench.lib.head_replay import Heads
from bench.past_attention import expressions, measure, replayed, table_of
from jsparse.policies.expressions import parse

TOKENS, STEPS, WINDOW, GROUP, DIM = 64, 6, 32, 2, 8


def random_heads(heads=2):
    rng = np.random.default_rng(0)
    return Heads(
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


@pytest.mark.slow
def test_no_policy_finds_more_than_the_best():
    rows = measure([random_heads()], STEPS, 0.25)
    assert [row["policy"] for row in rows] == list(expressions(0.25, TOKENS))
    for row in rows:
        assert 0 < row["mass"] <= 1.02 * row["best"] < 1.02
        assert (row["marked"] is not None) == ("threshold" in row["policy"])
    marked = [row["marked"] for row in rows if row["marked"] is not None]
    assert marked == sorted(marked, reverse=True)
    assert table_of(rows).row_count == len(rows)
