"""Tests the triton backend of threshold_select against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.threshold_select import Budget, Threshold, TopK, TopP, threshold_select
from tests.kernels.cases.threshold_select import CASES, JUNK, Case

pytestmark = pytest.mark.gpu
LONG = (
    Case("top_k_32k", size=32768, rule="top_k", value=1024, capacity=1024),
    Case("top_k_32k_ties", size=32768, rule="top_k", value=1000, capacity=1000, dtype="bfloat16"),
    Case("top_k_32k_about_zero", size=32768, rule="top_k", value=16384),
    Case("top_k_32k_most", size=32768, rule="top_k", value=30000),
    Case("top_k_32k_constant", size=32768, rule="top_k", value=700, capacity=700, like="constant"),
    Case("top_k_union", size=7712, group=4, rule="top_k", value=100, like="sink"),
    Case("top_k_128k", size=131072, rule="top_k", value=5000, capacity=5000, ragged=True),
    Case("top_k_128k_ties", size=131072, rule="top_k", value=5000, like="ties"),
    Case("top_k_odd", size=70001, rule="top_k", value=333, group=2),
    Case("top_k_128k_max", size=131072, rule="top_k", value=2624, group=4, pool="max", batch=2),
    Case("top_k_128k_raw", size=131072, rule="top_k", value=2624, like="sink", weights="raw"),
    Case("top_k_128k_constant", size=131072, rule="top_k", value=9999, like="constant", batch=9),
    Case("top_k_128k_masked", size=131072, rule="top_k", value=90_000, like="masked"),
    Case("top_k_parts_left_over", size=140_000, rule="top_k", value=3000, like="ties", batch=4),
    Case(
        "always_many_rows",
        size=40_000,
        rule="top_k",
        value=700,
        batch=40,
        kv_heads=8,
        always=(4, 64, 1),
        ragged=True,
    ),
    Case("top_k_1m", size=2**20, rule="top_k", value=20_000, batch=1, kv_heads=2, group=1),
    Case("top_k_2m", size=2**21, rule="top_k", value=20_000, batch=1, kv_heads=1, group=1),
    Case("threshold_raw", size=131072, rule="threshold", value=7.0, weights="raw", group=2),
    Case(
        "top_k_named_tokens", size=131072, rule="top_k", value=5000, group=2, span=16, ragged=True
    ),
    Case(
        "top_k_named_pages",
        size=8192,
        rule="top_k",
        value=4000,
        group=4,
        granularity="page",
        span=1,
    ),
    Case(
        "top_k_pages_max",
        size=8192,
        group=4,
        pool="max",
        rule="top_k",
        value=256,
        capacity=256,
        weights="raw",
    ),
    Case("budget_13k", size=13108, rule="budget", value=1024, capacity=130),
    Case("budget_13k_pairs", size=13108, rule="budget", value=900, capacity=130, like="pairs"),
    Case("budget_13k_flat", size=13108, rule="budget", value=1024, spread=1e-3, sizes="shared"),
    Case("budget_13k_ties", size=13108, rule="budget", value=9000, like="ties", per_head=True),
    Case("budget_16k_most", size=16384, rule="budget", value=250_000, group=2),
    Case("budget_32k", size=32768, rule="budget", value=1024, sizes="shared", ragged=True),
    Case("budget_32k_constant", size=32768, rule="budget", value=5000, like="constant"),
    Case("budget_128k_few", size=131072, rule="budget", value=5000, sizes="few"),
    Case("budget_128k_max", size=131072, rule="budget", value=9999, group=4, pool="max"),
)
HEAVY = (
    Case("top_p_32k", size=32768, value=0.95),
    Case("top_p_32k_flat", size=32768, value=0.7, spread=0.1),
    Case("top_p_32k_most", size=32768, value=0.9999, spread=1.0),
    Case("top_p_32k_little", size=32768, value=1e-4, spread=1.0),
    Case("top_p_32k_ties", size=32768, value=0.9, dtype="bfloat16"),
    Case("top_p_7712", size=7712, value=0.95, like="sink"),
    Case("top_p_128k", size=131072, value=0.95, ragged=True),
    Case("top_p_128k_constant", size=131072, value=0.5, like="constant"),
    Case("top_p_128k_weights", size=131072, value=0.8, weights="raw"),
)


def call(inputs, implementation="triton", **kwargs):
    arrays = {key: inputs.kwargs[key] for key in ("lengths", "names")}
    fixed = {key: value for key, value in inputs.kwargs.items() if key not in arrays} | kwargs

    @jax.jit
    def run(scores, settings, arrays):
        rule = inputs.rule._replace(**settings)
        return threshold_select(scores, rule, **arrays, implementation=implementation, **fixed)

    settings = {name: x for name, x in inputs.rule._asdict().items() if hasattr(x, "shape")}
    return run(inputs.scores, settings, arrays)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_what_the_reference_lists(case, seed):
    inputs = case.build(seed)
    assert_same(call(inputs), call(inputs, "reference"))


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_rows(case):
    inputs = case.build()
    assert_same(call(inputs), call(inputs, "reference"))


@pytest.mark.parametrize("case", HEAVY, ids=str)
def test_the_smallest_set_of_a_long_row(case):
    """The set has the likeliest entries and, within the rounding of sums, the mass asked for."""
    scores, rule, kwargs = case.build()
    got = call(case.build())
    for b, k in np.ndindex(case.batch, case.kv_heads):
        length = case.size if kwargs["lengths"] is None else int(kwargs["lengths"][b, k])
        row = np.asarray(scores, np.float64)[b, k, 0, :length]
        count = int(got.count[b, k])
        ids = np.asarray(got.ids[b, k, :count])
        assert not np.asarray(got.ids[b, k, count:]).any()
        assert (count > 0) == (length > 0)
        if not length:
            continue
        weights = row if case.weights == "raw" else np.exp(row - row.max())
        weights = weights / weights.sum()
        order = np.argsort(-row, kind="stable")
        # logits that float32 cannot tell apart by their weights may change places
        np.testing.assert_allclose(
            np.sort(weights[ids]), np.sort(weights[order[:count]]), rtol=1e-6
        )
        assert weights[ids].sum() >= rule[0] - 1e-5
        assert weights[ids].sum() - weights[ids].min() < rule[0] + 1e-5


@pytest.mark.parametrize("granularity", ["token", "page_mass"])
def test_a_long_union_that_is_cut(granularity):
    """The cut list has C ids, those that sorting takes from the list of all."""
    case = Case("", size=32768, group=4, value=0.95, capacity=600, granularity=granularity)
    case = dataclasses.replace(case, page_size=None if granularity == "token" else 16)
    inputs = case.build()
    cut, free = call(inputs), call(inputs, capacity=32768 // (case.page_size or 1))
    assert (np.asarray(free.count) > 600).all()
    np.testing.assert_array_equal(cut.count, 600)
    logits = np.asarray(inputs.scores, np.float64)
    best = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).max(2)
    if granularity == "page_mass":
        pages = np.log(np.exp(logits).reshape(2, 2, 4, -1, 16).sum(-1))
        best = (pages - np.log(np.exp(logits).sum(-1, keepdims=True))).max(2)
    for head in np.ndindex(2, 2):
        there = np.asarray(free.ids)[head][: int(free.count[head])]
        worth = best[head]
        kept = np.asarray(cut.ids)[head]
        assert set(kept) <= set(there)
        assert worth[kept].min() >= np.sort(worth[there])[-600] - 1e-5


TILINGS = (
    (32, 32768, 128),
    (128, 32768, 32),
    (64, 8192, 128),
    (16, 4096, 256),
    (64, 32768, 128, 0),
    (32, 32768, 128, 32),
)


@pytest.mark.parametrize("tiling", TILINGS)
def test_tiles_of_any_shape(tiling):
    from jsparse.pallas_kernels.threshold_select.triton_gpu import SelectTiling
    from jsparse.pallas_kernels.threshold_select.triton_gpu import threshold_select as kernel

    budgets = [case for case in LONG if case.name.startswith("budget_13k")]
    for case in (LONG[0], LONG[3], LONG[4], *budgets):
        inputs = case.build(5)
        run = jax.jit(
            lambda i=inputs: kernel(
                i.scores, i.rule, **i.kwargs | {"page_size": 1}, tiling=SelectTiling(*tiling)
            )
        )
        assert_same(run(), call(inputs, "reference"))


@pytest.mark.parametrize("copies", [np.repeat, np.tile], ids=["neighbours", "far"])
def test_equal_scores_of_one_thread(copies):
    """No equal score is lost, though a thread draws only one of them."""
    scores = jnp.asarray(
        copies(np.random.default_rng(0).normal(size=8192) * 3, 4), jnp.float32
    ).reshape(1, 1, 1, -1)
    for k in (3, 1001, 20002):
        chosen = [
            threshold_select(scores, TopK(k), capacity=32768, implementation=name)
            for name in ("triton", "reference")
        ]
        assert_same(*chosen)


def test_the_same_bits_every_time_and_in_any_batch():
    inputs = Case("", batch=8, kv_heads=8, size=7712, group=4, capacity=400).build()
    first = call(inputs)
    for _ in range(50):
        assert_same(first, call(inputs))
    alone = call(inputs._replace(scores=inputs.scores[3:4]))
    assert_same(jax.tree.map(lambda x: x[3:4], first), alone)


def test_junk_beyond_the_length_is_not_seen():
    case = Case("", size=40000, ragged=True, group=2, capacity=3000)
    inputs = case.build()
    lengths = inputs.kwargs["lengths"]
    inside = jnp.arange(case.size) < lengths[..., None, None]
    assert bool((inputs.scores == JUNK).any())
    for junk in (jnp.nan, jnp.inf, -jnp.inf):
        assert_same(
            call(inputs), call(inputs._replace(scores=jnp.where(inside, inputs.scores, junk)))
        )


def test_what_follows_in_the_same_program_sees_the_list():
    scores = Case("", size=32768, group=4).build().scores

    def chain(implementation):
        @jax.jit
        def run(scores):
            for _ in range(5):
                got = threshold_select(
                    scores, TopK(50), capacity=200, implementation=implementation
                )
                scores = jnp.roll(scores, got.ids.sum() % 97 + got.count.sum(), -1)
            return got

        return run(scores)

    assert_same(chain("triton"), chain("reference"))


def test_rows_beyond_two_to_the_31_elements():
    shape = (520, 8, 4, 131072)
    scores = jnp.zeros(shape, jnp.bfloat16).at[-1, -1, -1, 77777].set(1).at[-1, -1, 0, 5].set(1)
    got = jax.jit(lambda s: threshold_select(s, TopK(1), capacity=4, implementation="triton"))(
        scores
    )
    np.testing.assert_array_equal(got.ids[-1, -1], [0, 5, 77777, 0])
    np.testing.assert_array_equal(got.count[:2], 1)


def test_every_row_with_a_score_chooses_at_least_one():
    scores = jnp.full((1, 1, 2, 5000), -jnp.inf).at[0, 0, 0, 4321].set(-1e4)
    zero, sizes = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1, 5000), 9)
    for rule in (TopK(3), TopK(zero), TopP(1e-6), Threshold(2.0), Budget(zero, sizes)):
        for group in ("union", "max"):
            got = threshold_select(scores, rule, capacity=4, group=group, implementation="triton")
            assert (int(got.count[0, 0]), int(got.ids[0, 0, 0])) == (1, 4321)
