"""Tests intervals against a slow bootstrap and by hand, and which tasks are averaged."""

import numpy as np
import pytest

from jsparse.evaluation import statistics
from jsparse.evaluation.statistics import (
    BY_STEP,
    RESAMPLES,
    SEED,
    YARDSTICK,
    averages,
    family,
    is_dense,
    mean,
    perplexity,
    ratio,
    summarize,
)
from tests.support.made_up_report import DENSE, entry

pytestmark = pytest.mark.pure

POLICY = "streaming(sink=4, recent=8)"


def interval(policy, dense, transform=mean) -> list[float]:
    return statistics._interval([(np.array(policy), np.array(dense))], transform)


def test_interval_is_that_of_paired_resamples():
    rng = np.random.default_rng(1)
    policy, dense = rng.normal(-2, 0.5, 17), rng.normal(-1.8, 0.5, 17)
    draws = np.random.default_rng(SEED).integers(17, size=(RESAMPLES, 17))
    for transform in (mean, perplexity):
        means = [[transform(column[drawn].mean()) for drawn in draws] for column in (policy, dense)]
        expected = np.percentile(np.subtract(*means), [2.5, 97.5])
        np.testing.assert_allclose(interval(policy, dense, transform), expected, rtol=1e-9)


def test_one_sample_has_no_interval():
    _, ours = summarize([entry(DENSE, "a", 64, 0, score=1), entry(POLICY, "a", 64, 0, score=0)])
    score = ours["metrics"]["score"]
    assert (score["difference"], score["interval"], score["pairs"]) == (-1, None, 1)


def test_ratio_to_a_yardstick_is_that_of_the_means():
    rng = np.random.default_rng(2)
    ours, theirs = rng.uniform(0.5, 1, 9), rng.uniform(0.1, 0.2, 9)
    made = ratio(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert made is not None
    assert made["mean"] == pytest.approx(ours.mean() / theirs.mean())
    draws = np.random.default_rng(SEED).integers(9, size=(RESAMPLES, 9))
    ratios = ours[draws].mean(1) / theirs[draws].mean(1)
    np.testing.assert_allclose(made["interval"], np.percentile(ratios, [2.5, 97.5]), rtol=1e-9)


def test_cell_with_a_yardstick_matches_hand_computation():
    """The ratio covers the samples with a yardstick; dense has no ratio."""
    cells = summarize(
        [
            *(entry(DENSE, "kl", 64, i, kl=0) for i in range(3)),
            *(entry(POLICY, "kl", 64, i, kl=kl, attended=0.5) for i, kl in enumerate((2, 4, 99))),
            *(entry(DENSE, YARDSTICK, 64, i, {"budget": 0}) for i in range(3)),
            *(entry(POLICY, YARDSTICK, 64, i, {"budget": 8}, kl=2) for i in range(2)),
            entry(POLICY, YARDSTICK, 64, 2, {"budget": 0}),
        ]
    )
    found = {(cell["policy"], cell["task"]): cell["metrics"] for cell in cells}
    assert found[DENSE, YARDSTICK] == {}
    kl = found[POLICY, YARDSTICK]["kl"]
    assert (kl["mean"], kl["samples"], kl["difference"]) == (2, 2, None)
    assert kl["ratio"] == {"mean": 1.5, "interval": [1.0, 2.0]}
    assert "ratio" not in found[POLICY, "kl"]["kl"]


def test_ratio_of_few_samples_or_to_zero():
    for ours, theirs, made in [
        ({0: 2.0}, {0: 1.0}, {"mean": 2.0, "interval": None}),
        ({0: 2.0}, {1: 1.0}, None),
        ({0: 2.0, 1: 1.0}, {0: 1.0, 1: 0.0}, None),
    ]:
        assert ratio(ours, theirs) == made, ours


def test_short_name_of_an_expression():
    for expression, name, dense in [
        (POLICY, "streaming", False),
        ("dense", "dense", True),
        ("dense()", "dense", True),
        ("dense_layers(dense(), 2)", "dense_layers", False),
    ]:
        assert (family(expression), is_dense(expression)) == (name, dense), expression


def test_cell_matches_hand_computation():
    dense = [entry(DENSE, "a", 64, i, score=s) for i, s in enumerate([1, 1, 1, 1])]
    policy = [entry(POLICY, "a", 64, i, score=s, read=0.5) for i, s in enumerate([1, 0, 0, 1])]
    ours, theirs = summarize([*policy, *dense])
    assert (ours["policy"], ours["task"], ours["length"]) == (POLICY, "a", 64)
    score = ours["metrics"]["score"]
    assert (score["mean"], score["samples"]) == (0.5, 4)
    assert (score["difference"], score["pairs"]) == (-0.5, 4)
    assert score["interval"] == [-1, 0]  # P(all four drawn from the two misses) is 1/16
    nothing = {"difference": None, "interval": None, "pairs": 0}
    assert ours["metrics"]["read"] == {"mean": 0.5, "samples": 4} | nothing
    assert theirs["metrics"] == {"score": {"mean": 1, "samples": 4} | nothing}
    assert ours["samples"][1] == {"index": 1, "values": {"score": 0, "read": 0.5}, "meta": {}}


def test_perplexity_is_that_of_the_mean_and_resamples_documents():
    logprobs = {DENSE: [-1.0, -2.0, -3.0], POLICY: [-1.5, -2.5, -3.8]}
    cells = summarize(
        entry(p, "text", 64, i, logprob=v)
        for p, column in logprobs.items()
        for i, v in enumerate(column)
    )
    found = cells[1]["metrics"]["perplexity"]
    assert found["mean"] == pytest.approx(np.exp(2.6))
    assert found["difference"] == pytest.approx(np.exp(2.6) - np.exp(2.0))
    assert found["interval"] == interval(logprobs[POLICY], logprobs[DENSE], perplexity)
    assert cells[0]["metrics"]["perplexity"]["mean"] == pytest.approx(np.exp(2.0))


def test_means_by_step_are_those_over_samples():
    """Perplexity is that of their mean; a cell with a sample without means by step has none."""
    entries = [
        entry(DENSE, "text", 64, i, logprob=-1.0)
        | {"meta": {BY_STEP: {"kl": [i, 2.0], "logprob": [-1.0 - i, -3.0]}}}
        for i in range(2)
    ]
    (cell,) = summarize(entries)
    assert cell[BY_STEP] == {
        "kl": [0.5, 2.0],
        "logprob": [-1.5, -3.0],
        "perplexity": pytest.approx([np.exp(1.5), np.exp(3.0)]),
    }
    (cell,) = summarize([*entries, entry(DENSE, "text", 64, 2, logprob=-1.0)])
    assert BY_STEP not in cell


def scores(**tasks):
    """Draws [scores] of dense and of a policy, at length 64."""
    return summarize(
        entry(policy, task, 64, i, score=score)
        for task, pair in tasks.items()
        for policy, column in zip((DENSE, POLICY), pair, strict=True)
        for i, score in enumerate(column)
    )


def test_task_that_dense_fails_is_listed_but_not_averaged():
    failed = [1] * 29 + [0] * 71
    just = [1] * 30 + [0] * 70
    rows = averages(scores(good=([1] * 100, just), bad=(failed, [1] * 100), edge=(just, failed)))
    dense, ours = rows
    for row, policy in ((dense, DENSE), (ours, POLICY)):
        assert (row["policy"], row["length"]) == (policy, 64)
        assert (row["tasks"], row["left_out"]) == (["good", "edge"], ["bad"])
    assert dense["mean"] == pytest.approx(0.65)
    assert dense["difference"] is dense["interval"] is None
    assert ours["mean"] == pytest.approx((0.30 + 0.29) / 2)
    assert ours["difference"] == pytest.approx((-0.70 - 0.01) / 2)
    low, high = ours["interval"]
    assert -0.42 < low < ours["difference"] < high < -0.29


def test_no_average_without_a_solved_task():
    for cells in (scores(a=([0, 0], [1, 1])), summarize([entry(POLICY, "a", 64, 0, score=1)])):
        row = averages(cells)[-1]
        assert (row["tasks"], row["left_out"]) == ([], ["a"])
        assert row["mean"] is None and row["difference"] is None and row["interval"] is None
    assert averages(summarize([entry(DENSE, "drift", 64, 0, kl=0)])) == []
