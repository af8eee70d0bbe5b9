"""Tests the triton backend of threshold_select against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.threshold_select import threshold_select
from tests.kernels.cases.threshold_select import CASES, JUNK, Case

pytestmark = pytest.mark.gpu
LONG = (
    Case("top_k_32k", size=32768, rule="top_k", value=1024, capacity=1024),
    Case("top_k_32k_ties", size=32768, rule="top_k", value=1000, capacity=1000, dtype="bfloat16"),
    Case("top_k_32k_constant", size=32768, rule="top_k", value=700, capacity=700, like="constant"),
    Case("top_k_128k", size=131072, rule="top_k", value=5000, capacity=5000, ragged=True),
    Case("top_k_128k_ties", size=131072, rule="top_k", value=5000, like="ties"),
    Case("top_k_odd", size=70001, rule="top_k", value=333, group=2),
    Case("top_k_128k_max", size=131072, rule="top_k", value=2624, group=4, pool="max", batch=2),
    Case("top_k_128k_raw", size=131072, rule="top_k", value=2624, like="sink", weights="raw"),
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
    Case(
        "top_p_blocks_of_a_prompt",
        size=235,
        batch=1,
        kv_heads=2048,
        rule="top_p",
        per_head=True,
        weights="raw",
    ),
    Case("budget_13k", size=13108, rule="budget", value=1024, capacity=130),
    Case("budget_13k_pairs", size=13108, rule="budget", value=900, capacity=130, like="pairs"),
    Case("budget_13k_ties", size=13108, rule="budget", value=9000, like="ties", per_head=True),
    Case("budget_32k", size=32768, rule="budget", value=1024, sizes="shared", ragged=True),
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


@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_lists_match_the_reference(case):
    inputs = case.build()
    assert_same(call(inputs), call(inputs, "reference"))


@pytest.mark.parametrize("case", HEAVY, ids=str)
def test_smallest_set_of_a_long_row(case):
    """The set has the likeliest entries and, to within the rounding of sums, the requested mass."""
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
        # logits with weights that are equal in float32 may be in either order
        np.testing.assert_allclose(
            np.sort(weights[ids]), np.sort(weights[order[:count]]), rtol=1e-6
        )
        assert weights[ids].sum() >= rule[0] - 1e-5
        assert weights[ids].sum() - weights[ids].min() < rule[0] + 1e-5


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
    for case in (*LONG[:3], *budgets):
        inputs = case.build(5)
        run = jax.jit(
            lambda i=inputs: kernel(
                i.scores, i.rule, **i.kwargs | {"page_size": 1}, tiling=SelectTiling(*tiling)
            )
        )
        assert_same(run(), call(inputs, "reference"))


def test_repeated_calls_and_batches_give_the_same_bits():
    inputs = Case("", batch=8, kv_heads=8, size=7712, group=4, capacity=400).build()
    first = call(inputs)
    for _ in range(50):
        assert_same(first, call(inputs))
    alone = call(inputs._replace(scores=inputs.scores[3:4]))
    assert_same(jax.tree.map(lambda x: x[3:4], first), alone)


def test_junk_past_the_length_is_ignored():
    case = Case("", size=40000, ragged=True, group=2, capacity=3000)
    inputs = case.build()
    lengths = inputs.kwargs["lengths"]
    inside = jnp.arange(case.size) < lengths[..., None, None]
    assert bool((inputs.scores == JUNK).any())
    for junk in (jnp.nan, jnp.inf, -jnp.inf):
        assert_same(
            call(inputs), call(inputs._replace(scores=jnp.where(inside, inputs.scores, junk)))
        )
