"""Prefill and decode steps as functions: the same tokens as `generate`, in jitted loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from tests.support.policy_table import FURTHER, MECHANISMS
from tests.support.tiny import random_prompts, tiny_params

LENGTHS, STEPS = (40, 23), 12
# with constants, evictions, maintenance and corrections
SLOW = [*MECHANISMS[1:], *(each for each in FURTHER if "period" in each or "correct" in each)]


@pytest.fixture(scope="module")
def params():
    return tiny_params(num_layers=2)


def generated(params, batch, prompts):
    """Greedy tokens of a jitted prefill and a jitted loop of steps, with the shares attended."""
    lengths = np.array([*map(len, prompts)], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt

    @jax.jit
    def run(params, batch, tokens, lengths):
        batch, logits = jsparse.prefill(params, batch, tokens, lengths)
        first = jnp.argmax(logits, -1)

        def step(carry, _):
            batch, tokens = carry
            batch, logits, stats = jsparse.decode_step(params, batch, tokens)
            following = jnp.argmax(logits, -1)
            return (batch, following), (following, stats.over_layers().attended)

        (batch, _), (others, attended) = jax.lax.scan(step, (batch, first), length=STEPS - 1)
        return jnp.concatenate([first[None], others]).T, attended, batch.cache.overflow

    found, attended, overflow = run(params, batch, tokens, lengths)
    assert not overflow.any()
    return found.tolist(), attended


@pytest.mark.parametrize(
    "policy", [MECHANISMS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_tokens_are_those_of_generate(params, policy):
    prompts = random_prompts(LENGTHS)
    max_length = max(LENGTHS) + STEPS
    batch = jsparse.init_batch(params, policy, batch=2, max_length=max_length)
    found, attended = generated(params, batch, prompts)
    options = {"temperature": 0.0, "max_length": max_length, "max_new_tokens": STEPS}
    outs = jsparse.generate(params, prompts, policy=policy, **options, eos_token_id=[])
    assert found == [out.token_ids for out in outs]
    shares = [out.stats.attended_fraction for out in outs]
    np.testing.assert_allclose(attended.mean(0), shares, atol=1e-3)


def test_rows_that_are_full_overflow(params):
    batch = jsparse.init_batch(params, max_length=8, page_size=8)
    batch, logits = jsparse.prefill(params, batch, [[1, 2, 3, 4, 5, 6, 7]])
    for expected in (False, True):
        batch, logits, _ = jsparse.decode_step(params, batch, jnp.argmax(logits, -1))
        assert batch.cache.overflow.tolist() == [expected]
    assert (int(batch.steps), batch.cache.positions.tolist()) == (2, [8])


def test_functions_called_outside_of_jit_keep_the_models_constants():
    params = tiny_params(num_layers=1)
    for _ in range(2):
        batch = jsparse.init_batch(params, "quest(budget=16, bounds_dtype='uint8')", max_length=64)
        batch, logits = jsparse.prefill(params, batch, [[1, 2, 3]])
        batch, logits, _ = jsparse.decode_step(params, batch, jnp.argmax(logits, -1))
    assert params.constants and np.isfinite(logits).all()
    assert not any(array.is_deleted() for array in params.constants.values())


def test_wrong_arguments_are_named(params):
    batch = jsparse.init_batch(params, batch=2, max_length=64)
    full, _ = jax.jit(jsparse.prefill)(params, batch, np.ones((2, 7), np.int32))
    for call, message in (
        (lambda: jsparse.prefill(params, batch, [[1, 2]]), r"tokens of shape \(1, 2\)"),
        (lambda: jsparse.prefill(params, batch, np.ones((2, 64), int)), "must leave room"),
        (lambda: jsparse.prefill(params, batch, np.ones((2, 4))), "must be integers"),
        (lambda: jsparse.prefill(params, batch, [[1], [2, 3]]), "tokens: must be integers"),
        (lambda: jsparse.prefill(params, batch, [[1], [300]]), "range from 1 to 300"),
        (lambda: jsparse.prefill(params, batch, [[1], [2]], [1]), r"lengths of shape \(1,\)"),
        (lambda: jsparse.prefill(params, batch, [[1], [2]], [1, 0]), "lengths range from 0 to 1"),
        (lambda: jsparse.prefill(params, full, [[1], [2]]), "prefilled=True: must be False"),
        (lambda: jsparse.decode_step(params, batch, [1, 2]), "prefilled=False: must be True"),
        (lambda: jsparse.decode_step(params, full, [[1], [2]]), r"must be integers \[2\]"),
        (lambda: jsparse.decode_step(tiny_params(1), full, [1, 2]), "the model that init_batch"),
        (lambda: jsparse.init_batch(params, max_length=10**9), "the model's maximum"),
        (lambda: jsparse.init_batch(params, "offloaded(quest(budget=16))", max_length=9), "on the"),
        (lambda: jsparse.init_batch(params, max_length=64, page_size=7), "page_size=7"),
        (lambda: jax.jit(partial(jsparse.init_batch, max_length=8))(params), "must not be traced"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_generate_explains_that_it_cannot_be_jitted(params):
    for run in (
        lambda params, ids: jsparse.generate(params, [1, 2], max_new_tokens=2),
        lambda _, ids: jsparse.generate(params, ids, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=r"must not be traced.* jsparse\.decode_step"):
            jax.jit(run)(params, jnp.arange(4))
