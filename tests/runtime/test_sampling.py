"""Tests sampling against the semantics of HF's logits processors, written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.runtime.sampling import Sampling, mark_seen, sample, truncated

V = 12
draw = jax.jit(sample, static_argnums=0)
cut = jax.jit(truncated, static_argnums=0)
KEY = jax.random.key(3)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def slow_truncated(sampling: Sampling, row: np.ndarray) -> np.ndarray:
    """Truncates one row in float64: sorts and cuts in HF's order; equal logits: lowest id first."""
    x = row.astype(np.float64) / sampling.temperature
    order = sorted(range(x.size), key=lambda i: (-x[i], i))
    if sampling.top_k:
        x[order[sampling.top_k :]] = -np.inf
    if sampling.top_p < 1:
        probs, mass = softmax(x), 0.0
        for i in order:
            if mass >= sampling.top_p:
                x[i] = -np.inf
            mass += probs[i]
    if sampling.min_p:
        probs = softmax(x)
        x[probs < sampling.min_p * probs.max()] = -np.inf
    return x


OPTIONS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=4),
    Sampling(temperature=1.0, top_k=100),
    Sampling(temperature=0.9, top_p=0.6),
    Sampling(temperature=2.0, top_p=0.01),
    Sampling(temperature=1.1, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=0.8, top_k=6, top_p=0.8),
    Sampling(temperature=1.5, top_k=8, top_p=0.9, min_p=0.15),
]


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_what_may_be_drawn(sampling):
    logits = np.random.default_rng(0).normal(size=(64, V)).astype(np.float32) * 2
    got = np.asarray(cut(sampling, logits))
    expected = np.stack([slow_truncated(sampling, row) for row in logits])
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    # a softmax does not see a shift
    np.testing.assert_allclose(
        got, expected - expected.max(-1, keepdims=True), rtol=1e-5, atol=1e-6
    )


def test_a_temperature_near_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(16, V)), jnp.float32)
    drawn, _ = sample(Sampling(temperature=1e-38), logits, jax.random.key(0), jnp.int32(0), None)
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_equal_logits_are_cut_by_id():
    logits = jnp.zeros((1, 8))
    for sampling, kept in (
        (Sampling(1.0, top_k=3), 3),
        (Sampling(1.0, top_p=0.5), 4),
        (Sampling(1.0, top_p=0.51), 5),
        (Sampling(1.0, min_p=1.0), 8),
    ):
        np.testing.assert_array_equal(np.isfinite(cut(sampling, logits))[0], np.arange(8) < kept)


def test_top_p_counts_what_top_k_left():
    """After top_k=2 the first of 0.5, 0.25, … has two thirds of the mass: top_p=0.6 keeps it."""
    logits = -np.log(2.0) * np.arange(V, dtype=np.float32)[None]
    assert np.isfinite(cut(Sampling(1.0, top_p=0.6), logits)).sum() == 2
    assert np.isfinite(cut(Sampling(1.0, top_k=2, top_p=0.6), logits)).sum() == 1


def test_min_p_counts_what_top_p_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert np.isfinite(cut(Sampling(1.0, min_p=0.6), logits)).tolist() == [
        [True, True, False, False]
    ]
    assert np.isfinite(cut(Sampling(1.0, top_p=0.8, min_p=0.3), logits)).tolist() == [
        [True, True, True, False]
    ]


@pytest.mark.parametrize("top_p", [1e-45, 1e-38, 1e-6])
def test_a_tiny_top_p_is_greedy(top_p):
    logits = np.random.default_rng(1).normal(size=(8, V)).astype(np.float32)
    tokens, _ = draw(Sampling(1.0, top_p=top_p).validate(), logits, KEY, jnp.int32(0), None)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, top_k=1), Sampling(0.7, min_p=1.0), Sampling(1e-4)]
)
def test_greedy_in_all_its_forms(sampling):
    logits = np.random.default_rng(2).normal(size=(32, V)).astype(np.float32)
    tokens, logprobs = draw(sampling, logits, KEY, jnp.int32(5), None)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert tokens.dtype == jnp.int32
    np.testing.assert_allclose(logprobs, [np.log(softmax(row)).max() for row in logits], rtol=1e-5)


def test_greedy_takes_the_lowest_of_equals():
    assert sample(Sampling(), jnp.zeros((1, V)), KEY, jnp.int32(0), None)[0].item() == 0


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty(penalty):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(64, V)).astype(np.float32)
    seen = rng.random(logits.shape) < 0.5
    expected = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
    tokens, logprobs = draw(Sampling(repetition_penalty=penalty), logits, KEY, jnp.int32(0), seen)
    np.testing.assert_array_equal(tokens, expected.argmax(-1))
    assert (expected.argmax(-1) != logits.argmax(-1)).any()
    # the log-probability is the model's own, before the penalty
    own = np.log([softmax(row)[t] for row, t in zip(logits, np.asarray(tokens), strict=True)])
    np.testing.assert_allclose(logprobs, own, rtol=1e-4)


def test_repetition_penalty_comes_before_top_k():
    logits = jnp.array([[3.0, 2.0, 1.0]])
    seen = jnp.array([[True, False, False]])
    tokens, _ = sample(
        Sampling(1.0, top_k=1, repetition_penalty=2.0), logits, KEY, jnp.int32(0), seen
    )
    assert tokens.tolist() == [1]


def test_seen_grows_by_each_token():
    seen = jnp.zeros((2, 4), bool)
    seen = mark_seen(mark_seen(seen, jnp.array([1, 3])), jnp.array([1, 0]))
    assert seen is not None
    np.testing.assert_array_equal(seen, [[0, 1, 0, 0], [1, 0, 0, 1]])
    assert mark_seen(None, jnp.array([1])) is None


def test_a_row_draws_alike_in_any_batch():
    logits = np.random.default_rng(5).normal(size=(6, V)).astype(np.float32)
    sampling = Sampling(1.0, top_p=0.95)
    for step in range(8):
        whole, _ = draw(sampling, logits, KEY, jnp.int32(step), None)
        other = logits.copy()
        other[[0, 2, 3, 4, 5]] = 0.0
        changed, _ = draw(sampling, other, KEY, jnp.int32(step), None)
        alone, _ = draw(sampling, logits[:2], KEY, jnp.int32(step), None)
        assert whole[1] == changed[1] == alone[1]


def test_draws_follow_seed_and_step():
    logits = jnp.zeros((4, 1000))

    def tokens(seed, step):
        return draw(Sampling(1.0), logits, jax.random.key(seed), jnp.int32(step), None)[0].tolist()

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(seed, step)) for seed in range(3) for step in range(3)}) == 9
    assert len(set(tokens(1, 0))) == 4  # rows with equal logits draw for themselves


def test_frequencies_are_the_probabilities():
    logits = np.array([[2.0, 1.0, 0.0, -1.0, 1.5]], np.float32)
    sampling, draws = Sampling(1.5, top_k=4), 20_000
    expected = softmax(slow_truncated(sampling, logits[0])) * draws
    tokens = np.asarray(draw(sampling, np.repeat(logits, draws, 0), KEY, jnp.int32(0), None)[0])
    counts = np.bincount(tokens, minlength=5)
    assert counts[3] == 0
    some = expected > 0
    chi_square = ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
    assert (
        chi_square < 20
    )  # 3 degrees of freedom: above 16.3 once in a thousand seeds, and the seed is fixed


@settings(max_examples=40)
@given(st.lists(st.floats(-50, 50, width=32), min_size=V, max_size=V), st.integers(0, 1000))
def test_never_draws_what_is_ruled_out(row, step):
    sampling = Sampling(0.8, top_k=5, top_p=0.7, min_p=0.1)
    logits = np.array([row], np.float32)
    token = int(draw(sampling, logits, KEY, jnp.int32(step), None)[0][0])
    assert np.isfinite(cut(sampling, logits)[0, token])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1])
@pytest.mark.parametrize("name", Sampling._fields)
def test_validate_refuses(name, bad):
    with pytest.raises(ValueError, match=rf"^{name}={bad!r}: must be [^\n]+$"):
        Sampling(**{name: bad}).validate()


@pytest.mark.parametrize(
    "wrong",
    [{"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.01}, {"min_p": 1.01}, {"repetition_penalty": 0.0}],
)
def test_validate_refuses_just_outside(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}="):
        Sampling(**wrong).validate()


def test_validate_returns_what_is_allowed():
    for sampling in (
        Sampling(),
        Sampling(5.0, 2**40, 1.0, 1.0, 0.1),
        Sampling(0.1, 1, 1e-9, 0.0, 50.0),
    ):
        assert sampling.validate() is sampling
