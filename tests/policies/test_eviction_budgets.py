"""Budget rules against float64 numpy: what temperatures keep, and how many slots heads get."""

import jax
import numpy as np
import pytest
import slow_eviction as slow

from jsparse.policies.eviction import budgets
from jsparse.policies.eviction.budgets import Bounds

SLOTS, WIDE = 200, Bounds(0, 10**6, 0)
# of heads: nearly flat, plain, peaked
SHARPNESS = (0.3, 1.5, 4.0)
UNKNOWN = np.zeros((1, 3), np.float32)


def counted(count, scores, competing, temperatures=UNKNOWN):
    """What a rule gives for one row: counts and temperatures."""
    return jax.tree.map(np.asarray, jax.jit(count)(scores, competing, temperatures))


def attention_like(seed, slots=SLOTS):
    """Weights of one row's three heads that sum to 1, and slots of which some do not compete."""
    rng = np.random.default_rng(seed)
    logits = np.array(SHARPNESS)[:, None] * rng.standard_normal((3, slots))
    competing = np.arange(slots) < np.array([[slots], [slots - 11], [slots - 60]])
    weights = np.where(competing, np.exp(logits), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    return weights.astype(np.float32)[None], competing[None]


def kept_mass(scores, temperature, count):
    """The share, in float64, of the `count` best of softmax(scores / largest / T)."""
    best = np.sort(scores.astype(np.float64))[::-1] / scores.max()
    return slow.softmax(best / float(temperature))[:count].sum()


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_the_kept_mass_of_a_temperature_is_p(p):
    """To 1e-6 in float64 arithmetic, and the temperature is that of a float64 solver."""
    scores, competing = attention_like(0)
    count = np.array([[slow.fewest(x[c], p) for x, c in zip(scores[0], competing[0], strict=True)]])
    assert ((count > 1) & (count < p * competing.sum(-1))).all()
    found = np.asarray(jax.jit(budgets.temperature)(scores, competing, count.astype(np.int32), p))
    for head in range(3):
        x, n = scores[0, head][competing[0, head]], count[0, head]
        assert kept_mass(x, found[0, head], n) == pytest.approx(p, abs=1e-6)
        assert found[0, head] == pytest.approx(slow.solved(x.astype(np.float64), n, p), rel=1e-4)
    assert found[0, 0] != pytest.approx(found[0, 2], rel=0.5)


def test_n_star_is_the_fewest_slots_that_carry_p():
    p = 0.9
    for seed in range(5):
        scores, competing = attention_like(seed)
        counts, _ = counted(budgets.n_star(WIDE, p), scores, competing)
        for x, here, n in zip(scores[0].astype(np.float64), competing[0], counts[0], strict=True):
            best = np.sort(x[here])[::-1]
            assert best[:n].sum() >= p * best.sum() * (1 - 1e-6)
            assert best[: n - 1].sum() < p * best.sum() * (1 + 1e-6)


def test_temperatures_are_kept_and_counts_follow_the_scores():
    """At first the n* best are kept. As heads grow flat at their temperatures, they keep more; a
    temperature found for those scores is another one.
    """
    p, rule = 0.9, budgets.calibrated(WIDE, 0.9)
    scores, competing = attention_like(1)
    first, found = counted(rule, scores, competing)
    expected = [slow.fewest(x[c], p) for x, c in zip(scores[0], competing[0], strict=True)]
    np.testing.assert_array_equal(first[0], expected)
    flatter = np.where(competing, np.sqrt(scores), 0.0).astype(np.float32)
    later, kept = counted(rule, flatter, competing, found)
    np.testing.assert_array_equal(kept, found)
    assert (later > first).all()
    for head, n in enumerate(later[0]):
        x = flatter[0, head][competing[0, head]].astype(np.float64)
        weights = slow.softmax(x / x.max() / float(found[0, head]))
        assert n == slow.fewest(weights, p)
    _, anew = counted(rule, flatter, competing)
    assert (anew > 1.05 * found).all()


def test_ties_are_kept_within_the_plateau():
    """Of 100 equal scores behind 5 large ones as many are kept as the mass needs."""
    p = 0.75
    scores = np.full((1, 1, 105), 0.01, np.float32)
    scores[..., :5] = 0.2
    competing = np.ones(scores.shape, bool)
    counts, found = counted(budgets.calibrated(WIDE, p), scores, competing, UNKNOWN[:, :1])
    n = int(counts[0, 0])
    assert n == 55  # 5 of 0.2 and 50 of 0.01 are 0.75 of 2
    assert kept_mass(scores[0, 0], found[0, 0], n) == pytest.approx(p, abs=1e-6)


def test_a_count_whose_share_of_the_slots_is_p_takes_the_largest_temperature():
    """No temperature lowers what n of n' equal slots carry below n/n'."""
    scores = np.full((1, 2, 10), 0.1, np.float32)
    scores[0, 1, 0] = 0.4
    count = np.array([[9, 9]], np.int32)
    competing = np.ones(scores.shape, bool)
    found = np.asarray(jax.jit(budgets.temperature)(scores, competing, count, 0.9))
    np.testing.assert_allclose(found, np.exp(budgets.LOG_TEMPERATURES[1]), rtol=1e-4)
    counts, kept = counted(budgets.calibrated(WIDE, 0.9), scores, competing, found)
    np.testing.assert_array_equal(kept, found)
    assert (counts >= 9).all()


def test_a_temperature_waits_until_slots_compete():
    scores, competing = attention_like(2)
    competing = competing & (np.arange(3) != 1)[:, None]
    _, found = counted(budgets.calibrated(WIDE, 0.9), scores, competing)
    assert (found[0] > 0).tolist() == [True, False, True]


def test_heads_without_a_score_above_0_keep_none_and_find_no_temperature():
    """Neither before a temperature is found nor after."""
    scores, competing = attention_like(2)
    below = np.where(competing, -scores, 0.0).astype(np.float32)
    rule = budgets.calibrated(WIDE, 0.9)
    counts, found = counted(rule, below, competing)
    np.testing.assert_array_equal([counts, found], np.zeros((2, 1, 3)))
    _, found = counted(rule, scores, competing)
    counts, kept = counted(rule, below, competing, found)
    np.testing.assert_array_equal(counts, 0)
    np.testing.assert_array_equal(kept, found)


@pytest.mark.parametrize("rule", ["joint", "n_star", "calibrated"])
def test_counts_stay_between_floor_and_cap(rule):
    scores, competing = attention_like(3)
    share = [] if rule == "joint" else [0.9]
    counts, wild = (
        counted(getattr(budgets, rule)(bounds, *share), scores, competing)[0][0]
        for bounds in (Bounds(20, 60, 45), WIDE._replace(budget=45))
    )
    assert wild.min() < 20
    assert wild.max() > 60
    assert ((counts >= 20) & (counts <= 60)).all()
    if rule == "joint":
        assert counts.sum() == wild.sum() == 3 * 45


def test_negative_scores_carry_nothing():
    """R-KV's scores may be: they count as 0 in shares, and as what they are in ranks."""
    scores = np.array([[[-1.0, 3.0, 1.0, -2.0]]], np.float32)
    competing = np.ones(scores.shape, bool)
    for p, n in ((0.7, 1), (0.9, 2), (1.0, 2)):
        assert counted(budgets.n_star(WIDE, p), scores, competing)[0].item() == n
    assert counted(budgets.joint(Bounds(0, 4, 3)), scores, competing)[0].item() == 3
