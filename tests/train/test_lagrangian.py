"""Tests the optimisation on toys with a known solution, and step by step where its rules determine
the step.
"""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.train import lagrangian
from jsparse.train.families import FAMILIES
from jsparse.train.lagrangian import Lagrangian
from jsparse.train.settings import Settings

SHAPE = LAYERS, HEADS = 3, 4
ALL = LAYERS * HEADS
COSTS = np.float32(np.geomspace(0.02, 0.5, ALL - HEADS).reshape(LAYERS - 1, HEADS))


def problem_of(
    family="direct",
    penalty="ascent",
    *,
    target=6,
    steps=3000,
    rate=0.01,
    ascent=0.3,
    start=0.0,
    **more,
):
    return Lagrangian(FAMILIES[family], SHAPE, target, steps, rate, penalty, ascent, start, **more)


def toy(z):
    """Returns Σ c (1 - z)²; the first layer's gates would cost a lot."""
    return jnp.sum(COSTS * (1 - z[1:]) ** 2) + 100 * jnp.sum((1 - z[0]) ** 2)


@cache
def scanned(problem, distance):
    def one(keys, state, nth):
        return lagrangian.step(
            problem, state, jax.vmap(jax.random.fold_in, (0, None))(keys, nth), distance, nth
        )

    def run(seeds):
        keys, state = jax.vmap(jax.random.key)(seeds), lagrangian.start(problem, len(seeds))
        return jax.lax.scan(partial(one, keys), state, jnp.arange(problem.steps))

    return jax.jit(run)


def played(problem, seeds=(0,), distance=toy):
    """Returns the end of all steps, and the progress of each [steps, seeds]."""
    return jax.device_get(scanned(problem, distance)(np.array(seeds)))


def solution(multiplier):
    """Returns the root of the gradient of Σ c (1 - z)² + λ/n Σ z, or its bound."""
    return np.clip(1 - multiplier / (2 * COSTS * ALL), 0, 1)


def balancing(wanted):
    """Finds the multiplier at which the solution sums to `wanted`, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if solution(middle).sum() > wanted else (low, middle)
    return low


@pytest.mark.parametrize("more", [{}, {"anneal": 0.6}, {"damping": 10.0}])
def test_ascent_reaches_the_target_at_the_smallest_distance(more):
    target = 6
    end, progress = played(problem_of(target=target, **more))
    multiplier = balancing(target - HEADS)
    expected = solution(multiplier)
    assert 0 < np.sum((expected > 0) & (expected < 1)) < expected.size
    np.testing.assert_allclose(end.gates[0], expected, atol=0.01)
    np.testing.assert_allclose(end.multiplier, multiplier, rtol=0.03)
    assert progress.active[-1, 0] == pytest.approx(target, abs=0.02)
    assert progress.distance[-1, 0] == pytest.approx(np.sum(COSTS * (1 - expected) ** 2), rel=0.02)


WORTH = np.float32(1e-3 * np.exp(2 * np.random.default_rng(0).standard_normal((29, 3))))


def lost(worth, z):
    """Returns the total value of the closed gates."""
    return jnp.sum(worth * (1 - z[1:]) ** 2)


@pytest.mark.slow
def test_default_settings_end_at_the_target_with_the_best_heads():
    """Of 90 gates of very different values 11 must stay; 12 seeds."""
    problem = Settings(target=11, penalty="ascent", family="hard_kuma", steps=1000)
    problem = problem.lagrangian(30, 3)
    end, _ = played(problem, seeds=tuple(range(12)), distance=partial(lost, WORTH))
    active = jax.jit(jax.vmap(partial(lagrangian.expected, problem)))(end.gates)
    np.testing.assert_allclose(active, 11, rtol=0.05)
    kept = np.asarray(jax.jit(jax.vmap(problem.gates.score))(end.gates)) > 0.5
    best = np.sort(WORTH.ravel())[-8:].sum()
    shares = np.array([(WORTH * seed).sum() for seed in kept]) / best
    assert np.median(shares) > 0.95
    assert shares.min() > 0.8


def test_damping_adds_a_squared_surplus():
    multiplier, surplus = np.float32([0, 0, 1, 1, 1]), np.float32([0.5, -0.5, 0.5, -0.1, -2])
    plain, damped, hardly = (
        jax.jit(problem_of(damping=damping).cost)(multiplier, surplus)
        for damping in (0.0, 4.0, 1e-3)
    )
    np.testing.assert_allclose(plain, [0, 0, 0.5, -0.1, -2])
    np.testing.assert_allclose(damped, [0.5, 0, 0.5 + 0.5, -0.1 + 0.02, -1 / 8], rtol=1e-6)
    np.testing.assert_allclose(hardly, plain, atol=3e-3)


def test_fixed_multiplier_is_an_l1_penalty():
    end, progress = played(problem_of(penalty="fixed", start=1.5))
    np.testing.assert_array_equal(progress.multiplier, 1.5)
    np.testing.assert_array_equal(end.multiplier, 1.5)
    np.testing.assert_allclose(end.gates[0], solution(1.5), atol=0.005)


def test_exponential_multiplier_follows_its_formula_and_never_falls():
    problem = problem_of(penalty="exponential", steps=400, ascent=0.1, start=2.0)
    _, progress = played(problem, seeds=(0, 1))
    expected, mean = np.full(2, 2.0), np.zeros(2)
    for active, multiplier in zip(progress.active, progress.multiplier, strict=True):
        np.testing.assert_allclose(multiplier, expected, rtol=1e-4)
        mean = 0.9 * mean + 0.1 * np.maximum((np.asarray(active) - problem.target) / ALL, 0)
        expected = expected * np.exp(0.1 * mean)
    assert (np.diff(progress.multiplier, axis=0) >= 0).all()
    assert progress.active[-1, 0] < problem.target - 0.5, (
        "it should have gone too far, and stayed where it was"
    )
    assert progress.multiplier[-1, 0] > 2.1


def test_ascent_is_by_the_surplus():
    """By at most one head's surplus; the multiplier falls by no more than its share of λ/ρ."""
    damping = 0.2
    problem = problem_of("hard_kuma", steps=50, ascent=0.25, anneal=0.5, damping=damping)
    _, progress = played(problem)
    wanted = [problem.target + (ALL - problem.target) * max(1 - nth / 25, 0) for nth in range(50)]
    np.testing.assert_allclose(jax.jit(jax.vmap(problem.wanted))(np.arange(50)), wanted, rtol=1e-5)
    surplus = (progress.active[:, 0] - np.array(wanted)) / ALL
    expected = [0.0]
    for each in surplus[:-1]:
        last = expected[-1]
        pull = max(each, -last / damping)
        expected.append(max(last + 0.25 * np.clip(pull, -1 / ALL, 1 / ALL), 0))
    np.testing.assert_allclose(progress.multiplier[:, 0], expected, atol=1e-5)
    assert 0 in expected[1:]
    assert max(expected) > 0.1


def test_multiplier_falls_to_0_while_the_target_is_met():
    start = 0.01
    end, progress = played(problem_of("hard_kuma", target=ALL, steps=100, start=start))
    assert (progress.active < ALL).all()
    assert (progress.multiplier >= 0).all()
    assert progress.multiplier[0] == np.float32(start)
    assert end.multiplier == 0


def test_concurrent_seeds_match_single_ones():
    problem = problem_of("hard_kuma", steps=60, rate=0.05)
    together, progress = played(problem, seeds=(0, 1, 2))
    for i in range(3):
        alone, own = played(problem, seeds=(i,))
        for one, three in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(
                one, three[i : i + 1] if three.ndim else three, rtol=1e-4, atol=1e-5
            )
        for one, three in zip(own, progress, strict=True):
            np.testing.assert_allclose(one[:, 0], three[:, i], rtol=1e-4, atol=1e-5)
    assert not np.array_equal(progress.distance[:, 0], progress.distance[:, 1])


def test_rate_rises_in_the_first_fifth_and_falls_in_the_last():
    """With a constant gradient Adam moves by the rate."""
    steps = 23
    problem = problem_of(penalty="fixed", steps=steps)
    end, progress = played(problem, distance=jnp.sum)
    last = jax.jit(partial(lagrangian.expected, problem))(end.gates[0])
    active = [*progress.active[:, 0], float(last)]
    moved = [(before - after) / (ALL - HEADS) for before, after in pairwise(active)]
    fifth = steps // 5
    rising, falling = np.arange(fifth) / fifth, 1 - np.arange(fifth) / fifth
    expected = [*rising, *np.ones(steps - 2 * fifth), *falling]
    np.testing.assert_allclose(moved, 0.01 * np.array(expected), atol=1e-5)


def test_first_layer_is_open():
    seen = []
    problem = problem_of("hard_kuma", steps=1)
    played(
        problem,
        distance=lambda z: jax.debug.callback(lambda z: seen.append(np.asarray(z)), z) or toy(z),
    )
    jax.effects_barrier()
    assert [z.shape for z in seen] == [SHAPE]
    np.testing.assert_array_equal(seen[0][0], 1)
    assert (seen[0][1:] < 1).any()
    open_at_first = jax.jit(
        lambda: lagrangian.expected(problem, lagrangian.start(problem, 1).gates)
    )
    assert float(open_at_first()) == pytest.approx(HEADS + (ALL - HEADS) * 11 / 12)
