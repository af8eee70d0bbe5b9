"""Tests each family of gates against integrals in float64, and the limits of its parameters."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special

from jsparse.train import families, hard_kuma
from jsparse.train.families import Gates, hardened, noise
from jsparse.train.hard_kuma import CLAMP, Kuma

# compiled whole: op by op takes a program per operation
FAMILIES = {
    name: Gates(jax.jit(gates.init, static_argnums=0), *map(jax.jit, gates[1:]))
    for name, gates in families.FAMILIES.items()
}
pdf, quantile, tail = map(jax.jit, (hard_kuma.pdf, hard_kuma.quantile, hard_kuma.tail))
compiled_hardened = jax.jit(hardened, static_argnums=1)
SHAPE = 4, 3
COUNT = 200_000
RANDOM = {
    "hard_kuma": lambda rng, shape: Kuma(
        *np.exp(rng.uniform(-2, 2, (2, *shape))).astype(np.float32)
    ),
    "hard_concrete": lambda rng, shape: np.float32(rng.normal(0, 3, shape)),
    "direct": lambda rng, shape: np.float32(rng.uniform(0, 1, shape)),
}
OUTSIDE = {
    "hard_kuma": (
        Kuma(np.float32([-1, 1e-9, 2, 1e3]), np.float32([1e9, 1, -3, 0])),
        Kuma([1e-6, 1e-6, 2, 100], [100, 1, 1e-6, 1e-6]),
    ),
    "hard_concrete": (np.float32([-40, 0, 40]), [-40, 0, 40]),
    "direct": (np.float32([-0.5, 0, 0.3, 1, 1.5]), [0, 0, 0.3, 1, 1]),
}
EXTREMES = {
    "hard_kuma": Kuma(*np.meshgrid(*[np.float32([CLAMP[0], 1e-3, 1, 30, CLAMP[1]])] * 2)),
    "hard_concrete": np.float32([-100, -20, -1, 0, 1, 20, 100]),
    "direct": np.float32([0, 0.5, 1]),
}
MOMENTS = {
    "hard_kuma": [Kuma(a, b) for a, b in ((1, 1), (0.3, 0.3), (0.2, 3), (5, 0.3), (2, 5), (8, 8))],
    "hard_concrete": [-3, -1, 0, 0.8, 4],
}
RECTIFIED = [
    (family, params) for family, cases in MOMENTS.items() for params in (cases[1], cases[4])
]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_rectified = pytest.mark.parametrize(("family", "params"), RECTIFIED)


def array32(params):
    return jax.tree.map(np.float32, params)


def slow_quantile(family, params, u):
    if family == "hard_kuma":
        a, b = params
        return (1 - (1 - u) ** (1 / b)) ** (1 / a)
    return special.expit((np.log(u) - np.log(1 - u) + params) / (2 / 3))


def slow_gate(family, params, u):
    return np.clip(-0.1 + 1.2 * slow_quantile(family, params, u), 0, 1)


def slow_cdf(family, params, x):
    if family == "hard_kuma":
        a, b = params
        return 1 - (1 - x**a) ** b
    return special.expit(2 / 3 * (np.log(x) - np.log(1 - x)) - params)


def integral(function, family, params):
    """Integrates over all noise, split at the corners of the gate's clip."""
    cuts = np.array([0, *(slow_cdf(family, params, x) for x in (1 / 12, 11 / 12)), 1])
    pieces = pairwise(cuts)
    return sum(
        integrate.quad(partial(function, family, params), *piece, epsabs=1e-9, limit=200)[0]
        for piece in pieces
    )


@partial(jax.jit, static_argnums=1)
def drawn(seed, shape):
    return noise(jax.random.key(seed), shape)


@cache
def slopes(family):
    """Compiles the gradients of the samples' mean and of the mean by one gate's parameters."""
    gates = FAMILIES[family]

    def of_samples(at, u):
        return gates.sample(jax.tree.map(lambda leaf: jnp.full(COUNT, leaf), at), u).mean()

    return jax.jit(lambda at, u: (jax.grad(of_samples)(at, u), jax.grad(gates.mean)(at)))


@cache
def pulled(family):
    """Compiles all values of a family and the gradients of their sums."""
    gates = FAMILIES[family]

    def run(params, noises):
        found = []
        draw = lambda params: gates.sample(params, noises)  # noqa: E731
        for function in (draw, gates.active, gates.mean, gates.score):
            values, pull = jax.vjp(function, params)
            found.append((values, pull(jnp.ones_like(values))))
        return found

    return jax.jit(run)


# every family


@each_family
def test_parameters_start_within_bounds_and_in_shape(family):
    params = FAMILIES[family].init(SHAPE)
    for leaf, projected in zip(
        *map(jax.tree.leaves, (params, FAMILIES[family].project(params))), strict=True
    ):
        assert leaf.shape == SHAPE and leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, projected)


@each_family
def test_project_clamps_and_is_idempotent(family):
    params, expected = OUTSIDE[family]
    once = FAMILIES[family].project(params)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), once, jax.tree.map(np.float32, expected)
    )
    jax.tree.map(np.testing.assert_array_equal, once, FAMILIES[family].project(once))


@each_family
def test_samples_are_gates_determined_by_the_noise(family):
    gates, params = FAMILIES[family], RANDOM[family](np.random.default_rng(1), SHAPE)
    z, again, others = (np.asarray(gates.sample(params, drawn(seed, SHAPE))) for seed in (0, 0, 1))
    assert z.shape == SHAPE and z.dtype == np.float32
    assert (z >= 0).all() and (z <= 1).all()
    np.testing.assert_array_equal(z, again)
    assert (z != others).any() == (family != "direct")


@each_family
def test_values_and_gradients_stay_finite_at_the_extremes(family):
    params = EXTREMES[family]
    for u in (1e-7, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-7):
        noises = np.full(jax.tree.leaves(params)[0].shape, u, np.float32)
        for values, gradients in jax.device_get(pulled(family)(params, noises)):
            assert (values >= 0).all() and (values <= 1 + 2e-6).all(), u
            for gradient in jax.tree.leaves(gradients):
                assert np.isfinite(gradient).all(), u


# the families that stretch and clip


@each_rectified
def test_active_mean_and_score_are_their_integrals(family, params):
    gates, at = FAMILIES[family], array32(params)
    np.testing.assert_allclose(gates.active(at), 1 - slow_cdf(family, params, 1 / 12), atol=1e-6)
    np.testing.assert_allclose(gates.mean(at), integral(slow_gate, family, params), atol=1e-6)
    atol = {"hard_kuma": 2e-6, "hard_concrete": 2e-5}[family]
    np.testing.assert_allclose(gates.score(at), integral(slow_quantile, family, params), atol=atol)


@each_rectified
def test_gradients_of_samples_and_of_the_mean_match_the_integral(family, params):
    at = array32(params)
    u = (np.arange(COUNT, dtype=np.float32) + np.float32(0.5)) / np.float32(COUNT)
    sampled, closed = slopes(family)(at, u)
    leaves, tree = jax.tree.flatten(jax.tree.map(float, params))
    for i, leaf in enumerate(leaves):
        step = 1e-3 * max(abs(leaf), 0.1)
        high, low = (
            tree.unflatten([*leaves[:i], leaf + sign * step, *leaves[i + 1 :]]) for sign in (1, -1)
        )
        slope = (integral(slow_gate, family, high) - integral(slow_gate, family, low)) / (2 * step)
        np.testing.assert_allclose(jax.tree.leaves(closed)[i], slope, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(jax.tree.leaves(sampled)[i], slope, rtol=1e-2, atol=1e-3)


# HardKuma


@pytest.mark.parametrize("params", MOMENTS["hard_kuma"][1::3])
def test_masses_at_zero_and_one_are_areas_under_the_density(params):
    def density(x):
        return params.a * params.b * x ** (params.a - 1) * (1 - x**params.a) ** (params.b - 1)

    at, x = array32(params), np.linspace(0, 1, 101)[1:-1]
    zero, one = integrate.quad(density, 0, 1 / 12)[0], integrate.quad(density, 11 / 12, 1)[0]
    np.testing.assert_allclose(tail(at, np.float32(1 / 12)), 1 - zero, atol=1e-6)
    np.testing.assert_allclose(tail(at, np.float32(11 / 12)), one, atol=1e-6)
    np.testing.assert_allclose(pdf(at, np.float32(x)), density(x), rtol=1e-4)
    u = np.float32(0.9 * x)
    np.testing.assert_allclose(tail(at, quantile(at, u)), 1 - u, rtol=1e-4)


def test_moments_keep_float32_precision_over_the_whole_clamp():
    values = np.geomspace(*CLAMP, 33).astype(np.float32)
    params = Kuma(*np.meshgrid(values, values))
    a, b = (np.float64(shape) for shape in params)
    zero = -np.expm1(b * np.log1p(-((1 / 12) ** a)))
    np.testing.assert_allclose(FAMILIES["hard_kuma"].active(params), 1 - zero, atol=1e-6)
    one = np.exp(b * np.log(-np.expm1(a * np.log(11 / 12))))
    np.testing.assert_allclose(tail(params, np.float32(11 / 12)), one, atol=1e-6)
    score = np.exp(np.log(b) + special.betaln(1 + 1 / a, b))
    np.testing.assert_allclose(FAMILIES["hard_kuma"].score(params), score, atol=3e-6)
    nodes, weights = np.polynomial.legendre.leggauss(500)
    x = ((nodes + 1) / 2 + 0.1)[:, None, None] / 1.2
    mean = np.average(np.exp(b * np.log1p(-(x**a))), axis=0, weights=weights)
    np.testing.assert_allclose(FAMILIES["hard_kuma"].mean(params), mean, atol=2e-6)


# the other two


def test_hard_concrete_score_is_within_its_stated_error():
    for log_alpha in [-10, 0, 5]:

        def logistic(v, log_alpha=log_alpha):
            return special.expit((v + log_alpha) / (2 / 3)) * special.expit(v) * special.expit(-v)

        expected = integrate.quad(logistic, -60, 60, points=[0, -log_alpha], limit=500)[0]
        score = FAMILIES["hard_concrete"].score(np.float32(log_alpha))
        assert float(score) == pytest.approx(expected, abs=2e-5), log_alpha


def test_direct_gates_have_their_full_gradient_at_both_ends():
    alpha = np.float32([0, 0.5, 1])
    for values, gradient in pulled("direct")(alpha, np.zeros(3, np.float32)):
        np.testing.assert_array_equal(values, alpha)
        np.testing.assert_array_equal(gradient, 1)


# final choice of heads


def slow_hardened(scores, count):
    layers, heads = scores.shape
    order = sorted(range(heads, layers * heads), key=lambda i: (-scores.flat[i], i))
    mask = np.zeros(layers * heads, bool)
    mask[[*range(heads), *order[: count - heads]]] = True
    return mask.reshape(layers, heads)


def test_hardened_marks_layer_0_and_the_best_of_the_others():
    for shape in [(4, 3), (1, 4)]:
        scores = np.random.default_rng(5).random(shape).astype(np.float32)
        scores[0] = 0
        for count in range(shape[1], scores.size + 1):
            mask = np.asarray(compiled_hardened(scores, count))
            np.testing.assert_array_equal(mask, slow_hardened(scores, count))
    for count in (-1, 0, 2, 13):
        said = f"count={count}: must be from 3, layer 0's heads, to 12, all heads"
        with pytest.raises(ValueError, match=said):
            compiled_hardened(np.zeros(SHAPE, np.float32), count)


def test_hardened_breaks_ties_by_index_and_ignores_layer_0_scores():
    scores = np.float32([[9, np.nan], [0.5, 1], [1, 0.5], [0.5, 1]])
    np.testing.assert_array_equal(compiled_hardened(scores, 4), [[1, 1], [0, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(compiled_hardened(scores, 6), [[1, 1], [1, 1], [1, 0], [0, 1]])
