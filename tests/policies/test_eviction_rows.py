"""Tests the contents of rows during compressions: within bounds, independent of other rows, and
without lost pages.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity, sampling, session, store
from jsparse.runtime import rows as driver
from tests.support.crowd import Crowd
from tests.support.tiny import (
    assert_close,
    random_prompts,
    spec_of,
    tiny_params,
)

PAGE = 8
SMALL = "hard_kv(budget=10, floor=7, cap=14, period=6, window=4, sink=2)"
EVERY = (
    SMALL,
    "hard_kv(budget=10, floor=7, cap=14, period=6, window=4, sink=2, patience=2)",
    "hard_kv(budget=9, period=6, window=4, sink=1, metric='h2o', budgets='uniform', merge=False)",
    "raas(budget=9, threshold=0.05, period=6)",
)


# `max_length`


def decode(policy, params, prompts, steps, **options):
    """Decodes, and returns the session."""
    spec = capacity.cache_spec(params, prompts, steps, None, PAGE)._replace(**options)
    made = session.Session(params, policy, spec, steps_per_program=1)
    made.prefill(prompts)
    for result in made.steps(sampling.greedy, (), limits=[steps] * len(prompts)):
        assert not result.overflow.any()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("expression", [EVERY[0], EVERY[2], EVERY[-1]])
def test_heads_never_hold_more_than_max_length(expression, monkeypatch):
    """Checked just before each compression, when they hold the most."""
    policy, held_at, steps = parse(expression), [], 27
    prompts = random_prompts((60, 21, 2))
    maintain = driver.maintain

    def watched(policy, cache, *others):
        held_at.append([np.asarray(layer.lengths) for layer in cache.layers])
        return maintain(policy, cache, *others)

    monkeypatch.setattr(driver, "maintain", watched)
    made = decode(policy, tiny_params(1), prompts, steps)
    held_at.append([np.asarray(layer.lengths) for layer in made.prefilled.cache.layers])
    assert policy.eviction is not None and policy.eviction.max_length is not None
    max_length = [policy.eviction.max_length(len(prompt), steps) for prompt in prompts]
    for row, bound in enumerate(max_length):
        reached = max(int(lengths[row].max()) for layers in held_at for lengths in layers)
        assert reached <= bound
        if row == 0:  # and the bound is close
            assert reached >= bound - 4
    assert max_length[0] < 60 + steps


def test_shares_count_positions():
    """Right after an eviction to 8 of 60 tokens, a step attends to 9 of 61."""
    made = decode(parse("snapkv(budget=8, window=4)"), tiny_params(1), random_prompts((60,)), 2)
    lengths = np.asarray([layer.lengths for layer in made.prefilled.cache.layers])
    np.testing.assert_array_equal(lengths, 9)
    params = tiny_params(1)
    spec = capacity.cache_spec(params, random_prompts((60,)), 2, None, PAGE)
    again = session.Session(params, parse("snapkv(budget=8, window=4)"), spec)
    again.prefill(random_prompts((60,)))
    _, result = again.steps(sampling.greedy, (), limits=[2])
    assert result.stats is not None
    assert float(result.stats.attended[0, 0]) == pytest.approx(9 / 61)
    assert float(result.stats.read[0, 0]) >= 9 / 61


# Rows of a batch


class Pooled(Crowd):
    """Rows of different ages over one pool with its free list on the device."""

    def __init__(self, policy, rows=3, pages=9, pool=50, layers=2):
        params = tiny_params(layers)
        spec = spec_of(params, rows, page_size=PAGE, num_pages=pages)._replace(pool_pages=pool)
        super().__init__(params, policy, spec, *store.empty_rows(spec, policy), chunk=48)

    def leave(self, slot):
        """Empties a row and frees its pages."""
        self.batch = self.batch._replace(cache=without(self.batch.cache, slot))
        self.clear(slot)

    def check_pages(self):
        """Every page has one owner or is free, and heads have the pages that they need."""
        assert not self.batch.cache.overflow.any()
        for layer in self.batch.cache.layers:
            scratch, table = layer.k.shape[0] - 1, np.asarray(layer.block_table)
            free = np.asarray(layer.free.pages)[: int(layer.free.count)]
            owned = table[table != scratch]
            assert sorted([*free, *owned]) == list(range(scratch))
            needed = -(-np.asarray(layer.lengths) // PAGE)
            np.testing.assert_array_equal((table != scratch).sum(-1), needed)


@jax.jit
def without(cache, slot):
    rows = jnp.arange(len(cache.positions))[:, None]
    layers = tuple(
        kv_cache.truncate(layer, jnp.where(rows == slot, 0, layer.lengths))
        for layer in cache.layers
    )
    return cache._replace(layers=layers)


@cache
def served_alone(prompt, steps):
    crowd = Pooled(parse(SMALL), layers=1)
    crowd.read(1, list(prompt))
    return [crowd.step()[1] for _ in range(steps)]


@pytest.mark.slow
def test_no_page_is_lost_over_50_joins_and_leaves():
    """In a pool too small for the prompts of all rows without eviction.

    A row's text does not depend on when the others were compressed.
    """
    rng, crowd = np.random.default_rng(0), Pooled(parse(SMALL), layers=1)
    prompts = [random_prompts([n], seed=int(n))[0] for n in rng.integers(3, 45, 50)]
    left = 0
    followed = prompts[20]
    logits = []
    slot_of = None
    for nth, prompt in enumerate(prompts):
        slot = nth % 3
        if crowd.ages[slot] is not None:
            crowd.leave(slot)
            left += 1
            slot_of = None if slot == slot_of else slot_of
        crowd.read(slot, prompt)
        slot_of = slot if prompt is followed else slot_of
        crowd.check_pages()
        for _ in range(int(rng.integers(1, 9))):
            found = crowd.step()
            if slot_of is not None:
                logits.append(found[slot_of])
        crowd.check_pages()
    for slot in range(3):
        crowd.leave(slot)
    assert left + 3 == 50
    crowd.check_pages()
    for layer in crowd.batch.cache.layers:
        assert int(layer.free.count) == crowd.spec.pool_pages - 1
    assert len(logits) > crowd.policy.services.period
    expected = served_alone(tuple(followed), len(logits))
    assert_close(np.stack(logits), np.stack(expected), rtol=1e-5)
