"""Tests threshold_select against sorting in float64, case by case."""

import dataclasses
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
from tests.kernels.cases.threshold_select import CASES, JUNK
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}


def logsumexp(x: np.ndarray) -> float:
    top = x.max(initial=-np.inf)
    return top if np.isneginf(top) else top + np.log(np.exp(x - top).sum())


def choice(
    row: np.ndarray, rule, value: float, sizes, softmax: bool, lse: float, first=()
) -> list[int]:
    """Returns what one row chooses, best first; `lse` normalises its logits."""
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
    """Returns the units that hold one of the first or last slots of a head."""
    if always is None:
        return set()
    held = int(always.lengths[head])
    first, last = range(held)[: always.sink], range(held)[max(held - always.recent, 0) :]
    return {slot // always.unit for slot in (*first, *last)}


def expected(scores, rule, kwargs) -> dict[tuple[int, int], list[int]]:
    """Returns the units that must be listed for each head."""
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
            # of those that come first no more are listed than fit, best first
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


# each rule, granularity and way of grouping; the extremes together
SOME = (
    "top_p_nan",
    "top_p_weights",
    "top_p_union_capped",
    "top_p_max",
    "odd_size",
    "top_k_per_head",
    "top_k_max_raw",
    "always",
    "always_too_many",
    "always_masked",
    "threshold_raw",
    "threshold_max",
    "budget_masked",
    "budget_max",
    "mass_capped",
    "mass_weights",
    "named_mass_pairs",
)


@pytest.mark.parametrize("case", slow_except_named(CASES, *SOME), ids=str)
def test_lists_what_sorting_finds(case):
    inputs = case.build()
    assert_lists(call(inputs), expected(*inputs), inputs.kwargs)


def test_cases_are_what_they_say():
    assert len(by_name) == len(CASES)
    for case in CASES:
        scores, rule, kwargs = case.build(3)
        assert scores.shape == (case.batch, case.kv_heads, case.group, case.size)
        names = {"top_k": "k", "top_p": "p", "threshold": "theta", "budget": "tokens"}
        assert rule._fields[0] == names[case.rule]
        np.testing.assert_array_equal(scores, case.build(3).scores)
        if case.ragged:
            assert {0, 1, case.size} <= set(np.asarray(kwargs["lengths"]).flat)
            assert (np.asarray(scores) == np.asarray(JUNK, scores.dtype)).any()
    for name in (
        "top_p_capped",
        "top_p_union_capped",
        "top_k_union_capped",
        "mass_capped",
        "budget_capped",
    ):
        inputs = by_name[name].build()
        free = expected(inputs.scores, inputs.rule, inputs.kwargs | {"capacity": 1000})
        assert max(map(len, free.values())) > inputs.kwargs["capacity"]


def test_names_of_odd_pages_do_for_their_tokens():
    names, scores = np.array([[[1, 4, 9]]], np.int32), np.arange(9, dtype=np.float32)
    got = jax.jit(partial(threshold_select, rule=TopK(5), capacity=6))(
        scores.reshape(1, 1, 1, 9), names=names
    )
    np.testing.assert_array_equal(got.ids, [[[13, 14, 27, 28, 29, 0]]])


def test_a_row_does_not_depend_on_its_batch():
    inputs = dataclasses.replace(by_name["top_p_union_capped"], ragged=False).build()
    whole = call(inputs)
    changed = call(
        inputs._replace(scores=np.where([[[[True]]], [[[False]]]], inputs.scores, np.float32(7)))
    )
    np.testing.assert_array_equal(whole.ids[0], changed.ids[0])


def test_a_set_weighs_what_is_asked_for():
    """A set weighs p to within the rounding of long sums; a page weighs what its tokens do."""
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


def test_every_row_with_a_score_chooses_at_least_one():
    scores = np.full((1, 1, 2, 8), -np.inf, np.float32)
    scores[0, 0, 0, 5] = -1e4

    @partial(jax.jit, static_argnames="group")
    def chosen(scores, zero, sizes, group):
        rules = (TopK(3), TopK(zero), TopP(1e-6), Threshold(2.0), Budget(zero, sizes))
        return [threshold_select(scores, rule, capacity=4, group=group) for rule in rules]

    for group in ("union", "max"):
        for got in chosen(scores, np.zeros((1, 1), np.int32), np.full((1, 1, 8), 9), group):
            count, ids = np.asarray(got.count), np.asarray(got.ids)
            assert (count[0, 0], ids[0, 0, 0]) == (1, 5)


def test_scores_without_a_number_above_them_come_first_too():
    """Of those that count as the highest, and the others, the marked one is chosen."""
    most = float(np.finfo(np.float32).max)
    rows = ([np.inf, 0, 0, 0], [most, 1, most, -most], [-np.inf, -np.inf, np.inf, np.inf])
    scores = np.asarray(rows, np.float32).reshape(1, 3, 1, 4)

    @jax.jit
    def choose(scores, held):
        return threshold_select(scores, TopK(1), capacity=1, always=Always(held, 0, 1, 1))

    got = choose(scores, np.asarray([[1, 2, 4]], np.int32))
    np.testing.assert_array_equal(got.ids[0, :, 0], [0, 1, 3])


def test_numbers_of_heads_do_not_retrace():
    traces = []

    @jax.jit
    def run(scores, k):
        traces.append(None)
        return threshold_select(scores, TopK(k), capacity=5).count

    scores = np.arange(20, dtype=np.float32).reshape(1, 2, 1, 10)
    for k in ([[1, 5]], [[3, 2]]):
        np.testing.assert_array_equal(run(scores, np.array(k, np.int32)), k)
    assert len(traces) == 1


def zeros(*shape, dtype=np.float32):
    return jax.device_put(np.zeros(shape, dtype))


SCORES = zeros(2, 3, 4, 32)
ALWAYS = Always(zeros(2, 3, dtype=np.int32), 4, 64, 16)
ONE_ROW = zeros(2, 3, 1, 32)
SIZES = jax.device_put(np.ones((2, 3, 32), np.int32))
WRONG = {
    "axes": (zeros(3, 4, 32), TopK(1), {}, r"scores=float32\[3, 4, 32\]: must be float\["),
    "no scores": (
        zeros(2, 3, 4, 0),
        TopK(1),
        {},
        r"scores=float32\[2, 3, 4, 0\]: must be float\[.*>0",
    ),
    "dtype": (
        zeros(2, 3, 4, 32, dtype=np.int32),
        TopK(1),
        {},
        r"scores=int32\[2, 3, 4, 32\]: must be float\[",
    ),
    "capacity": (SCORES, TopK(1), {"capacity": 0}, "capacity=0: must be an integer of at least 1"),
    "granularity": (
        SCORES,
        TopK(1),
        {"granularity": "block"},
        r"granularity='block': must be one of \['token', 'page'",
    ),
    "weights": (SCORES, TopK(1), {"weights": "log"}, "weights='log': must be one of"),
    "group": (SCORES, TopK(1), {"group": "mean"}, "group='mean': must be one of"),
    "page size of tokens": (
        SCORES,
        TopK(1),
        {"page_size": 8},
        "page_size=8: must be None for granularity='token'",
    ),
    "no page size": (
        SCORES,
        TopK(1),
        {"granularity": "page_mass"},
        "page_size=None: must divide n=32 for granularity='page_mass'",
    ),
    "page size": (
        SCORES,
        TopK(1),
        {"granularity": "page_mass", "page_size": 5},
        "page_size=5: must divide n=32",
    ),
    "lengths": (
        SCORES,
        TopK(1),
        {"lengths": zeros(2, dtype=np.int32)},
        r"lengths=int32\[2\]: must be int32\[",
    ),
    "names": (
        SCORES,
        TopK(1),
        {"names": zeros(3, 32, dtype=np.int32)},
        r"names=int32\[3, 32\]: must be int32\[",
    ),
    "names of no units": (
        SCORES,
        TopK(1),
        {"names": zeros(2, 3, 32, dtype=np.int32), "granularity": "page_mass", "page_size": 8},
        r"names.shape=\(2, 3, 32\): the last axis must divide 4 units",
    ),
    "no names": (
        SCORES,
        TopK(1),
        {"names": zeros(2, 3, 0, dtype=np.int32)},
        r"names=int32\[2, 3, 0\]: must be int32\[",
    ),
    "dtype of names": (
        SCORES,
        TopK(1),
        {"names": zeros(2, 3, 32)},
        "names=float32.*must be int32",
    ),
    "rule": (SCORES, 3, {}, "rule=3: must be a TopK, a TopP, a Threshold or a Budget"),
    "tokens": (SCORES, Budget(0, SIZES), {}, "tokens=0: must be an integer of at least 1"),
    "tokens of heads": (
        SCORES,
        Budget(zeros(3, 2, dtype=np.int32), SIZES),
        {},
        r"rule.tokens=int32\[3, 2\]: must be int\[",
    ),
    "sizes": (
        SCORES,
        Budget(9, zeros(2, 2, 32, dtype=np.int32)),
        {},
        r"rule.sizes=int32\[2, 2, 32\]: must be integer\[",
    ),
    "dtype of sizes": (
        SCORES,
        Budget(9, zeros(2, 3, 32)),
        {},
        r"rule.sizes=float32\[2, 3, 32\]: must be integer\[",
    ),
    "sizes of tokens": (
        SCORES,
        Budget(9, SIZES),
        {"granularity": "page_mass", "page_size": 8},
        "granularity='page_mass': must be 'token' or 'page' under Budget",
    ),
    "always of weights": (
        ONE_ROW,
        TopP(0.5),
        {"always": ALWAYS},
        "always: must be None unless a TopK chooses once per KV head .*, not TopP",
    ),
    "always of rows": (SCORES, TopK(1), {"always": ALWAYS}, "group='union' and G=4"),
    "always of tokens": (
        ONE_ROW,
        TopK(1),
        {"always": ALWAYS, "granularity": "page_mass", "page_size": 8},
        "not TopK with granularity='page_mass'",
    ),
    "lengths of always": (
        ONE_ROW,
        TopK(1),
        {"always": ALWAYS._replace(lengths=zeros(2, 1, dtype=np.int32))},
        r"always.lengths=int32\[2, 1\]: must be int32\[",
    ),
    "dtype of always": (
        ONE_ROW,
        TopK(1),
        {"always": ALWAYS._replace(lengths=zeros(2, 3))},
        r"always.lengths=float32\[2, 3\]: must be int32\[",
    ),
    "recent": (
        ONE_ROW,
        TopK(1),
        {"always": ALWAYS._replace(recent=-1)},
        "always.recent=-1: must be an integer of at least 0",
    ),
    "unit": (
        ONE_ROW,
        TopK(1),
        {"always": ALWAYS._replace(unit=0)},
        "always.unit=0: must be an integer of at least 1",
    ),
    "k": (SCORES, TopK(0), {}, "k=0: must be an integer of at least 1"),
    "p": (SCORES, TopP(1.5), {}, "p=1.5: must be above 0 and at most 1"),
    "theta": (SCORES, Threshold(float("nan")), {}, "theta=nan: must be a number"),
    "numbers of heads": (
        SCORES,
        TopP(zeros(2)),
        {},
        r"rule.p=float32\[2\]: must be float\[",
    ),
    "backend": (
        SCORES,
        TopK(1),
        {"implementation": "abacus"},
        "implementation='abacus': threshold_select has",
    ),
    "odd pages": (
        zeros(1, 1, 1, 48),
        TopK(1),
        {"granularity": "page_mass", "page_size": 24, "implementation": "triton"},
        "needs page_size to be a power of two, not 24",
    ),
    "odd names": (
        zeros(1, 1, 1, 48),
        TopK(1),
        {
            "granularity": "page_mass",
            "page_size": 4,
            "names": zeros(1, 1, 4, dtype=np.int32),
            "implementation": "triton",
        },
        "needs the number of units per name to be a power of two, not 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused(name):
    scores, rule, kwargs, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as error:
        threshold_select(scores, rule, **{"capacity": 4} | kwargs)
    assert "\n" not in str(error.value)
