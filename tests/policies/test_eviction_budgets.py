"""Tests budget rules against float64 numpy: slots kept by temperatures, and slots per head."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import StepView
from jsparse.policies.eviction import budgets
from jsparse.policies.eviction.budgets import Attended, CountBounds
from jsparse.policies.hard_kv import hard_kv
from tests.support import slow_eviction as slow
from tests.support.marks import slow_except
from tests.support.one_layer import OneLayer

SLOTS, WIDE = 200, CountBounds(0, 10**6, 0)
# heads with nearly flat, plain and peaked attention
SHARPNESS = (0.3, 1.5, 4.0)
UNKNOWN = np.zeros((1, 3), np.float32)
TEMPERATURE = jax.jit(budgets.temperature)


def counted(count, scores, competing, temperatures=UNKNOWN, attention=None, lost=0.0):
    """Counts and temperatures of a rule for one row; scores are attention by default.

    `lost` is the share of attention of the slots dropped before.
    """
    run = jax.jit(lambda *given: count(*given[:-1], lambda: given[-1]))
    shares = scores if attention is None else attention
    attended = Attended(shares, np.full(shares.shape[:2], lost, np.float32))
    return jax.tree.map(np.asarray, run(scores, competing, temperatures, attended))


def attention_like(seed, slots=SLOTS):
    """Weights of one row's three heads that sum to 1, and slots, not all of which compete."""
    rng = np.random.default_rng(seed)
    logits = np.array(SHARPNESS)[:, None] * rng.standard_normal((3, slots))
    competing = np.arange(slots) < np.array([[slots], [slots - 11], [slots - 60]])
    weights = np.where(competing, np.exp(logits), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    return weights.astype(np.float32)[None], competing[None]


def largest_of(attention, width):
    """Attention's maximum over neighbours, as SnapKV smooths it, with zeros past the ends."""
    found = [slow.pooled(x, width, np.max) for x in attention[0]]
    return np.asarray(found, np.float32)[None]


def less_redundancy(attention, seed):
    """Scores like R-KV's: 0.07 of smoothed attention less 0.93 of a softmax that ignores it."""
    alike = np.random.default_rng(seed).uniform(0, 1, attention.shape)
    redundancy = np.exp(alike) / np.exp(alike).sum(-1, keepdims=True)
    return (0.07 * largest_of(attention, 7) - 0.93 * redundancy).astype(np.float32)


def heads_of(*arrays):
    """The heads of the only row: the competing slots of each array in float64, selected by the last
    one.
    """
    *values, competing = arrays
    for head, here in enumerate(competing[0]):
        yield [x[0, head][here].astype(np.float64) for x in values]


def n_stars(attention, competing, p):
    return [slow.num_needed(x, p) for (x,) in heads_of(attention, competing)]


def for_heads(p):
    return np.full((1, 3), p, np.float32)


@pytest.mark.parametrize(("p", "kept", "lost"), [(0.9, 0.3, 0.05), (0.9, 0.0, 0.12), (0.5, 0.6, 0)])
def test_n_star_is_the_fewest_slots_that_keep_mass_p(p, kept, lost):
    """Sinks and newest tokens are always kept; the slots dropped before are lost.

    If more than 1 - p was lost, no slot may be dropped; if enough is kept already, all may.
    """
    attention, competing = attention_like(4)
    shares = (1 - kept - lost) * attention
    counts, _ = counted(budgets.n_star(WIDE, p), shares, competing, lost=lost)
    for head, (x,) in enumerate(heads_of(shares, competing)):
        best, n = np.sort(x)[::-1], int(counts[0, head])
        if lost > 1 - p:
            assert n == len(best)
        elif kept >= p:
            assert n == 0
        else:
            assert kept + best[: n - 1].sum() < p <= kept + best[:n].sum() + 1e-6


def test_temperature_makes_top_p_keep_the_given_count():
    """For logits colder and warmer than attention's, and for smoothed ones: it is that of a float64
    solver that counts, and slightly closer to 1 top-p keeps another number.
    """
    p = 0.9
    attention, competing = attention_like(0)
    count = np.array([n_stars(attention, competing, p)], np.int32)
    z = slow.logarithm(attention).astype(np.float32)
    pooled = slow.logarithm(largest_of(attention, 3)).astype(np.float32)
    for logits in (z / 2, 3 * z, pooled):
        found = np.asarray(TEMPERATURE(logits, competing, count, for_heads(p)))
        for head, (x,) in enumerate(heads_of(logits, competing)):
            n, t = count[0, head], float(found[0, head])
            assert t == pytest.approx(slow.solved(x, n, p), rel=1e-4)
            away, nearer = t ** (1 + 1e-3), t ** (1 - 1e-3)
            assert slow.at_temperature(x, away, p) == n
            assert slow.at_temperature(x, nearer, p) != n
    assert (np.asarray(TEMPERATURE(z / 2, competing, count, for_heads(p))) < 0.6).all()
    assert (np.asarray(TEMPERATURE(3 * z, competing, count, for_heads(p))) > 2.5).all()


@pytest.mark.parametrize(("rule", "metric"), [("n_star", "r_kv"), ("calibrated", "snapkv")])
def test_unchanged_attention_keeps_the_same_slots_at_eight_compressions(rule, metric):
    """The window is one query for the whole group, so that the merged slot has the exact logit of
    its tokens: top-p of attention to all tokens, held or dropped, does not change.
    """
    p, sink, newest, length = 0.9, 2, 64, 700
    policy = hard_kv(
        floor=7, cap=700, p=p, sink=sink, window=1, recent=newest, metric=metric, budgets=rule
    )
    one = OneLayer(policy, length=length, batch=1, group=2, page_size=16)
    queries = 0.4 * np.asarray(one.q)[:, None, ::2].repeat(2, 2)
    state = (one.state[0]._replace(ring=jnp.asarray(queries)),)
    cache = one.view.cache._replace(positions=jnp.full(1, length, jnp.int32))
    run = jax.jit(policy.services.maintain)
    lengths = []
    for _ in range(8):
        state, cache = run(state, StepView(cache))
        lengths.append(np.asarray(cache.layers[0].lengths)[0])
    assert (np.asarray(lengths) == lengths[0]).all()
    shares = [slow.softmax(x @ q / 4) for x, q in zip(one.k[0], queries[0, 0, ::2], strict=True)]
    for count, x in zip(lengths[0], shares, strict=True):
        always = x[:sink].sum() + x[-newest:].sum()
        best = np.sort(x[sink + 1 : -newest])[::-1]
        n = count - sink - newest - 1
        assert 50 < n < length - 100
        assert always + best[: n - 1].sum() < p <= always + best[:n].sum() + 1e-5


def test_attention_itself_has_temperature_1():
    """HARD-KV: for g(z) = z and T = 1, Ŝ = S(g(z/T)) is attention, and so are the counts."""
    p = 0.9
    attention, competing = attention_like(5)
    counts, found = counted(budgets.calibrated(WIDE, p, jnp.log), attention, competing)
    np.testing.assert_allclose(found, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(counts[0], n_stars(attention, competing, p))
    moved, others = attention_like(6)
    later, _ = counted(budgets.calibrated(WIDE, p, jnp.log), moved, others, found)
    np.testing.assert_array_equal(later[0], n_stars(moved, others, p))


@pytest.mark.parametrize("rule", slow_except(["n_star", "calibrated"], "n_star"))
def test_p_keeps_the_same_number_of_slots_under_every_metric(rule):
    """The number of slots that carry p of real attention; top-p of the metrics themselves differs
    by up to 4 times.

    Also checks the mass: one slot fewer of the best by attention carries too little.
    """
    p, seed = 0.9, 1
    attention, competing = attention_like(seed)
    metrics = {
        "attention": (attention, slow.logarithm),
        "snapkv": (largest_of(attention, 5), slow.logarithm),
        "r_kv": (less_redundancy(attention, seed), np.asarray),
    }
    expected = n_stars(attention, competing, p)
    for (x,), n in zip(heads_of(attention, competing), expected, strict=True):
        best = np.sort(x)[::-1] / x.sum()
        assert best[: n - 1].sum() < p <= best[:n].sum()
    apart = []
    for metric, (scores, logits) in metrics.items():
        made = jnp.log if logits is slow.logarithm else jnp.asarray
        count = budgets.n_star(WIDE, p) if rule == "n_star" else budgets.calibrated(WIDE, p, made)
        counts, found = counted(count, scores, competing, attention=attention)
        np.testing.assert_array_equal(counts[0], expected, err_msg=metric)
        for head, (x,) in enumerate(heads_of(scores, competing)):
            apart.append(slow.num_needed(np.maximum(x, 0.0), p) / expected[head])
            if rule == "calibrated" and metric == "r_kv":  # has no ties
                t = float(found[0, head])
                assert slow.at_temperature(logits(x), t, p) == pytest.approx(expected[head], abs=1)
    assert max(apart) > 4 * min(apart)


def test_temperatures_are_kept_and_counts_follow_the_scores():
    """As heads get flatter at their temperatures, they keep more, even if attention changes; the
    temperature for the new scores is another one.

    A lost share leaves less to lose: the competing slots must keep more than p of Ŝ.
    """
    p, lost, rule = 0.9, 0.04, budgets.calibrated(WIDE, 0.9, jnp.log)
    attention, competing = attention_like(1)
    scores = largest_of(attention, 3)
    first, found = counted(rule, scores, competing, attention=attention)
    flatter = np.where(competing, np.sqrt(scores), 0.0).astype(np.float32)
    other = (1 - lost) * attention_like(8)[0] * competing
    later, kept = counted(rule, flatter, competing, found, attention=other, lost=lost)
    np.testing.assert_array_equal(kept, found)
    assert (later > first).all()
    heads = heads_of(flatter, other, competing)
    for head, (x, shares) in enumerate(heads):
        share = 1 - (1 - p - lost) / shares.sum()
        assert share > p
        assert later[0, head] == slow.at_temperature(np.log(x), float(found[0, head]), share)
    _, anew = counted(rule, flatter, competing, attention=attention)
    np.testing.assert_allclose(anew, found / 2, rtol=0.02)


def test_more_equal_slots_than_needed_leave_the_coldest_temperature():
    """10 slots tie for the first place, and 3 carry p of attention: no T keeps 3, but 3 are kept at
    calibration, and later 8 of the 10.
    """
    p = 0.75
    scores = np.full((1, 1, 105), 0.01, np.float32)
    scores[..., :10] = 0.2
    attention = np.full(scores.shape, 1e-3, np.float32)
    attention[..., :3] = 0.3
    competing = np.ones(scores.shape, bool)
    rule = budgets.calibrated(WIDE, p, jnp.log)
    counts, found = counted(rule, scores, competing, UNKNOWN[:, :1], attention)
    assert counts.item() == 3
    np.testing.assert_allclose(found, np.exp(budgets.LOG_TEMPERATURES[0]), rtol=1e-4)
    assert counted(rule, scores, competing, found, attention)[0].item() == 8


def test_temperature_is_calibrated_once_slots_compete():
    """A head without competing slots keeps none at any time; slots of share 0 are harmless."""
    scores, competing = attention_like(2)
    scores = np.where(np.arange(SLOTS) % 7 == 0, 0.0, scores).astype(np.float32)
    some = competing & (np.arange(3) != 1)[:, None]
    rule = budgets.calibrated(WIDE, 0.9, jnp.log)
    for temperatures, known in ((UNKNOWN, [True, False, True]), (UNKNOWN + 0.7, [True] * 3)):
        counts, found = counted(rule, scores, some, temperatures)
        assert (found[0] > 0).tolist() == known
        assert (counts[0] > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("rule", ["joint", "n_star", "calibrated"])
def test_counts_stay_between_floor_and_cap(rule):
    scores, competing = attention_like(3)
    more = {"joint": (), "n_star": (0.9,), "calibrated": (0.9, jnp.log)}[rule]
    counts, wild = (
        counted(getattr(budgets, rule)(bounds, *more), scores, competing)[0][0]
        for bounds in (CountBounds(20, 60, 45), WIDE._replace(budget=45))
    )
    assert wild.min() < 20
    assert wild.max() > 60
    assert ((counts >= 20) & (counts <= 60)).all()
    if rule == "joint":
        assert counts.sum() == wild.sum() == 3 * 45


def test_temperature_is_calibrated_once_a_head_needs_a_slot():
    """Sinks and newest tokens have p of attention at first: no slot is needed, at any T."""
    p, rule = 0.9, budgets.calibrated(WIDE, 0.9, jnp.log)
    attention, competing = attention_like(1)
    scores = np.where(competing, np.sqrt(attention), 0.0).astype(np.float32)
    counts, found = counted(rule, scores, competing, attention=0.05 * attention)
    assert not counts.any()
    assert not found.any()
    counts, found = counted(rule, scores, competing, found, attention=attention)
    assert counts[0].tolist() == n_stars(attention, competing, p)
    np.testing.assert_allclose(found, 0.5, rtol=0.1)


def with_best(*counts):
    """Scores of one row's heads; the competition leaves each head its number of `counts`."""
    scores = np.random.default_rng(5).uniform(0.1, 0.4, (1, len(counts), SLOTS))
    for head, count in enumerate(counts):
        scores[0, head, :count] += 0.5
    return scores.astype(np.float32), np.ones(scores.shape, bool)


def test_floor_moves_counts_towards_their_mean():
    """(1 - α) · count + α · mean, rounded so that the sum is kept; α is 1/5 in Ada-KV's code."""
    for floor, best, kept in (
        (0.2, (87, 103, 110, 84), (89, 102, 107, 86)),  # 88.8, 101.6, 107.2 and 86.4
        (0.5, (91, 92, 101, 100), (94, 94, 98, 98)),  # 93.5, 94, 98.5, 98: first half up
        (0.2, (0, 180, 195, 9), (19, 163, 175, 27)),  # 19.2, 163.2, 175.2, 26.4: last up
        (1, (0, 200, 184, 0), (96, 96, 96, 96)),
    ):
        scores, competing = with_best(*best)
        rule = budgets.joint(CountBounds(0, 10**6, sum(best) // 4), floor)
        assert tuple(counted(rule, scores, competing)[0][0]) == kept
        assert tuple(slow.blended(best, Fraction(str(floor)))) == kept


def test_floor_keeps_the_sum_and_the_bounds():
    """For many layouts, some of them close to the most slots of a head."""
    rng, alpha = np.random.default_rng(6), Fraction(1, 5)
    spread = rng.uniform(0.2, 3, (20, 4, 1))
    scores = rng.exponential(spread, (20, 4, SLOTS)).astype(np.float32)
    rule = budgets.joint(CountBounds(0, 120, 96), float(alpha))
    kept, _ = counted(rule, scores, np.ones(scores.shape, bool))
    expected = slow.ada_kv(96, alpha, 120)
    assert kept.tolist() == [expected(row.tolist(), range(4)) for row in scores]
    assert (kept.sum(-1) == 4 * 96).all()
    assert kept.max() == 120
