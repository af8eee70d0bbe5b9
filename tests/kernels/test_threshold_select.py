"""Tests threshold_select against sorting in float64, case by case."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.threshold_select import (
    Always,
    Budget,
    Threshold,
    TopK,
    TopP,
    threshold_select,
)
from jsparse.selection import Selection
from tests.kernels.cases.threshold_select import CASES
from tests.support.marks import slow_except, slow_except_named


def logsumexp(x: np.ndarray) -> float:
    top = x.max(initial=-np.inf)
    return top if np.isneginf(top) else top + np.log(np.exp(x - top).sum())


def choice(
    row: np.ndarray, rule, value: float, sizes, softmax: bool, lse: float, first=()
) -> list[int]:
    """The choice of one row, best first; `lse` normalises its logits."""
    order = [
        i
        for i in sorted(range(row.size), key=lambda i: (i not in first, -row[i], i))
        if not np.isneginf(row[i])
    ]
    if isinstance(rule, TopK):
        return order[: max(int(value), 1)]
    if isinstance(rule, Budget):
        return order[: max(int((np.cumsum(sizes[order]) <= value).sum()), 1)]
    weights = np.exp(row - (lse if order else 0.0)) if softmax else row
    if isinstance(rule, Threshold):
        return [i for i in order if weights[i] > value] or order[:1]
    order = [i for i in order if weights[i] > 0]
    total, chosen, mass = weights[order].sum(), [], 0.0
    for i in order:
        if (
            mass >= np.float32(value) * total * (1 - 1e-7) and value < 1
        ):  # float32(0.9) of 200 is below 180
            break
        chosen.append(i)
        mass += weights[i]
    return chosen


def come_first(always, head: tuple[int, int]) -> set[int]:
    """The units that contain one of the first or last slots of a head."""
    if always is None:
        return set()
    held = int(always.lengths[head])
    first, last = range(held)[: always.sink], range(held)[max(held - always.recent, 0) :]
    return {slot // always.unit for slot in (*first, *last)}


def expected(scores, rule, kwargs) -> dict[tuple[int, int], list[int]]:
    """The units that must be listed for each head."""
    softmax, unit, size = (
        kwargs["weights"] == "softmax",
        kwargs["granularity"],
        kwargs["page_size"] or 1,
    )
    lengths, listed = kwargs["lengths"], {}
    always = kwargs.get("always")
    for head in np.ndindex(*scores.shape[:2]):
        value = float(np.broadcast_to(rule[0], scores.shape[:2])[head])
        sizes = None
        if isinstance(rule, Budget):
            sizes = np.broadcast_to(rule.sizes, (*scores.shape[:2], scores.shape[-1]))[head]
        rows = np.asarray(scores, np.float64)[head].copy()
        rows[np.isnan(rows)] = -np.inf
        if lengths is not None:
            rows[:, int(lengths[head]) :] = -np.inf
        if unit == "page_mass":
            pages = rows.reshape(len(rows), -1, size)
            sums = np.where(np.isneginf(pages), 0, pages).sum(-1)
            sums[np.isneginf(pages).all(-1)] = -np.inf
            rows = np.apply_along_axis(logsumexp, -1, pages) if softmax else sums
        offsets = np.zeros(len(rows))
        if softmax and len(rows) > 1:
            offsets = np.nan_to_num(np.apply_along_axis(logsumexp, -1, rows), neginf=0.0)
        best = (rows - offsets[:, None]).max(0)
        if kwargs["group"] == "max" and len(rows) > 1:
            lse = logsumexp(best) if isinstance(rule, TopP) else 0.0
            chosen = choice(best, rule, value, sizes, softmax, lse, come_first(always, head))
            # of units that are always listed, at most the capacity are listed, best first
            chosen = set(chosen if always is None else chosen[: kwargs["capacity"]])
        else:
            first = come_first(always, head)
            chosen = [
                choice(row, rule, value, sizes, softmax, logsumexp(row), first) for row in rows
            ]
            if always is not None:  # one row, of which the best are listed
                chosen = [chosen[0][: kwargs["capacity"]]]
            chosen = {i for row in chosen for i in row}
        kept = sorted(chosen, key=lambda i: (-best[i], i))[: kwargs["capacity"]]
        listed[head] = [name(i, kwargs["names"], head, best.size) for i in sorted(kept)]
    return listed


def name(unit: int, names, head: tuple[int, int], units: int) -> int:
    if names is None:
        return unit
    span = units // names.shape[-1]
    return int(names[head][unit // span]) * span + unit % span


def assert_lists(got: Selection, want, kwargs) -> None:
    ids, count = np.asarray(got.ids), np.asarray(got.count)
    assert (ids.dtype, count.dtype, ids.shape[-1]) == (np.int32, np.int32, kwargs["capacity"])
    assert got.granularity == ("token" if kwargs["granularity"] == "token" else "page")
    assert got.bits is None
    for head, units in want.items():
        assert ids[head][: count[head]].tolist() == units
        assert not ids[head][count[head] :].any()


@partial(jax.jit, static_argnames=("form", "numbers", "static"))
def run(scores, form, numbers, settings, arrays, held, static) -> Selection:
    kwargs = dict(static)
    if held is not None:
        kwargs["always"] = Always(held, *kwargs["always"])
    return threshold_select(scores, form(**dict(numbers), **settings), **arrays, **kwargs)


def call(inputs) -> Selection:
    """Runs the op compiled, with the rule's number static unless it is an array."""
    arrays = {key: inputs.kwargs[key] for key in ("lengths", "names")}
    static = {key: value for key, value in inputs.kwargs.items() if key not in arrays}
    held, always = None, static.get("always")
    if always is not None:
        held, static["always"] = always.lengths, always[1:]
    rule = inputs.rule._asdict()
    settings = {name: x for name, x in rule.items() if hasattr(x, "shape")}
    numbers = {name: x for name, x in rule.items() if name not in settings}
    return run(
        inputs.scores,
        type(inputs.rule),
        tuple(numbers.items()),
        settings,
        arrays,
        held,
        tuple(static.items()),
    )


# each rule, granularity and pool; the extremes together
SOME = (
    "top_p_nan",
    "top_p_union_capped",
    "top_p_max",
    "odd_size",
    "top_k_per_head",
    "top_k_max_raw",
    "always",
    "always_too_many",
    "threshold_raw",
    "threshold_max",
    "budget_max",
    "mass_capped",
    "mass_weights",
    "named_mass_pairs",
)


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_lists_match_sorting(case):
    inputs = case.build()
    assert_lists(call(inputs), expected(*inputs), inputs.kwargs)


def test_names_of_odd_pages_apply_to_their_tokens():
    names, scores = np.array([[[1, 4, 9]]], np.int32), np.arange(9, dtype=np.float32)
    got = jax.jit(partial(threshold_select, rule=TopK(5), capacity=6))(
        scores.reshape(1, 1, 1, 9), names=names
    )
    np.testing.assert_array_equal(got.ids, [[[13, 14, 27, 28, 29, 0]]])


@pytest.mark.slow
def test_set_has_the_requested_mass():
    """A set has mass p to within the rounding of long sums; a page has the mass of its tokens."""
    scores = (np.random.default_rng(0).normal(size=(1, 2, 1, 20_000)) * 3).astype(np.float32)
    weights = np.exp(scores - scores.max(-1, keepdims=True), dtype=np.float64)[0, :, 0]
    weights /= weights.sum(-1, keepdims=True)
    for unit, page_size, each in (
        ("token", None, weights),
        ("page_mass", 16, weights.reshape(2, -1, 16).sum(-1)),
    ):
        select = partial(threshold_select, rule=TopP(0.9), capacity=20_000)
        got = jax.jit(partial(select, granularity=unit, page_size=page_size))(scores)
        for row, ids, count in zip(
            each, np.asarray(got.ids)[0], np.asarray(got.count)[0], strict=True
        ):
            kept = row[ids[:count]]
            assert kept.sum() >= 0.9 - 1e-5
            assert kept.sum() - kept.min() < 0.9 + 1e-5


@pytest.mark.parametrize("group", slow_except(["union", "max"], "union"))
def test_every_row_with_a_score_selects_at_least_one(group):
    scores = np.full((1, 1, 2, 8), -np.inf, np.float32)
    scores[0, 0, 0, 5] = -1e4

    @jax.jit
    def chosen(scores, zero, sizes):
        rules = (TopK(3), TopK(zero), TopP(1e-6), Threshold(2.0), Budget(zero, sizes))
        return [threshold_select(scores, rule, capacity=4, group=group) for rule in rules]

    for got in chosen(scores, np.zeros((1, 1), np.int32), np.full((1, 1, 8), 9)):
        count, ids = np.asarray(got.count), np.asarray(got.ids)
        assert (count[0, 0], ids[0, 0, 0]) == (1, 5)


def test_always_listed_units_precede_infinite_and_maximal_scores():
    most = float(np.finfo(np.float32).max)
    rows = ([np.inf, 0, 0, 0], [most, 1, most, -most], [-np.inf, -np.inf, np.inf, np.inf])
    scores = np.asarray(rows, np.float32).reshape(1, 3, 1, 4)

    @jax.jit
    def choose(scores, held):
        return threshold_select(scores, TopK(1), capacity=1, always=Always(held, 0, 1, 1))

    got = choose(scores, np.asarray([[1, 2, 4]], np.int32))
    np.testing.assert_array_equal(got.ids[0, :, 0], [0, 1, 3])


def test_wrong_calls_are_refused():
    scores, one_row = np.zeros((2, 3, 4, 32), np.float32), np.zeros((2, 3, 1, 32), np.float32)
    odd = np.zeros((1, 1, 1, 48), np.float32)
    budget = Budget(9, np.ones((2, 3, 32), np.int32))
    always = Always(np.zeros((2, 3), np.int32), 4, 64, 16)
    pages, triton = {"granularity": "page_mass", "page_size": 8}, {"implementation": "triton"}
    names = {"names": np.zeros((1, 1, 4), np.int32)}
    for given, rule, options, message in (
        (scores, TopK(1), {"capacity": 0}, "capacity=0: must be an integer of at least 1"),
        (scores, TopK(1), {"page_size": 8}, "page_size=8: must be None for granularity='token'"),
        (scores, TopK(1), pages | {"page_size": None}, "page_size=None: must divide n=32"),
        (scores, TopK(1), pages | {"page_size": 5}, "page_size=5: must divide n=32"),
        (
            scores,
            TopK(1),
            pages | {"names": np.zeros((2, 3, 32), np.int32)},
            r"names.shape=\(2, 3, 32\): the last axis must divide 4 units",
        ),
        (scores, 3, {}, "rule=3: must be a TopK, a TopP, a Threshold or a Budget"),
        (scores, TopK(0), {}, "k=0: must be an integer of at least 1"),
        (scores, TopP(1.5), {}, "p=1.5: must be above 0 and at most 1"),
        (scores, Threshold(float("nan")), {}, "theta=nan: must be a number"),
        (scores, budget._replace(tokens=0), {}, "tokens=0: must be an integer of at least 1"),
        (scores, budget, pages, "granularity='page_mass': must be 'token' or 'page' under Budget"),
        (one_row, TopP(0.5), {"always": always}, "always: must be None unless .*, not TopP"),
        (scores, TopK(1), {"always": always}, "group='union' and G=4"),
        (one_row, TopK(1), pages | {"always": always}, "not TopK with granularity='page_mass'"),
        (
            one_row,
            TopK(1),
            {"always": always._replace(recent=-1)},
            "always.recent=-1: must be an integer of at least 0",
        ),
        (
            one_row,
            TopK(1),
            {"always": always._replace(unit=0)},
            "always.unit=0: must be an integer of at least 1",
        ),
        (odd, TopK(1), triton | pages | {"page_size": 24}, "power of two, not 24"),
        (odd, TopK(1), triton | pages | names | {"page_size": 4}, "power of two, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            threshold_select(given, rule, **{"capacity": 4} | options)
