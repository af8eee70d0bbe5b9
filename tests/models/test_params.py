"""Tests that a model is a pytree of its weights, for programs of users' own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsparse
from jsparse.cache import KEY_REACH
from tests.support.tiny import VOCAB, tiny_params

TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, 12))


def test_leaves_are_the_weights_and_the_rest_stays():
    params = tiny_params(num_layers=1)
    assert jax.tree.leaves(params) == jax.tree.leaves(params.weights)
    path, _ = jax.tree_util.tree_leaves_with_path(params)[0]
    assert jax.tree_util.keystr(path).startswith(".weights['params']")
    doubled = jax.tree.map(lambda x: 2 * x, params)
    assert isinstance(doubled, jsparse.Params) and doubled.config is params.config
    np.testing.assert_array_equal(
        doubled.weights["params"]["embed"], 2 * params.weights["params"]["embed"]
    )
    assert jax.tree.structure(doubled) == jax.tree.structure(params)
    for other in (
        replace(params, kv_cache_dtype="int8"),
        replace(params, name="other"),
    ):
        assert jax.tree.structure(other) != jax.tree.structure(params)


def test_other_weights_have_no_constants_of_the_old_ones():
    params = replace(tiny_params(num_layers=1), constants={KEY_REACH: jnp.ones(3)})
    other = jax.tree.map(lambda x: x, params)
    assert not other.constants and {*params.constants} == {KEY_REACH}
    other.constants["more"] = jnp.ones(1)
    assert not jax.tree.map(lambda x: x, params).constants


def test_a_jitted_step_of_optax_trains_it_with_one_trace():
    params, traces = tiny_params(num_layers=1), []
    optimiser = optax.adam(1e-2)

    @jax.jit
    def step(params, state, tokens):
        traces.append(1)

        def loss(params):
            logits = jsparse.logits(params, tokens)[:, :-1]
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = optimiser.init(params), []
    for _ in range(4):
        value, params, state = step(params, state, TOKENS)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 1 and len(traces) == 1
    assert isinstance(params, jsparse.Params)


def test_traced_ids_of_a_wrong_kind_are_refused():
    params = tiny_params(num_layers=1)
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 12\) and type float32"):
        jax.jit(jsparse.logits)(params, TOKENS.astype(np.float32))
