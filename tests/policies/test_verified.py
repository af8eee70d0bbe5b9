"""Tests `verified`: reports of dense attention choose pages, and the newest follow them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import StepView, init
from jsparse.policies.verified import Settings, verified
from jsparse.selection import Selection
from jsparse.selection.partials import Stats
from tests.support.tiny import spec_of, tiny_params

PAGE = 8


def view_of(spec, lengths):
    cache = init(spec)
    lengths = jnp.broadcast_to(lengths[:, None], cache.layers[0].lengths.shape)
    return StepView(cache._replace(layers=(cache.layers[0]._replace(lengths=lengths),)))


@partial(jax.jit, static_argnums=(0, 1))
def selected(policy, spec, state, lengths):
    return policy.select(state, 0, None, view_of(spec, lengths))[:2]


@partial(jax.jit, static_argnums=(0, 1))
def checked(policy, spec, scores, lengths):
    stats = Stats(scores, jnp.zeros(scores.shape[:2]))
    return policy.services.checked(policy.init(spec), (stats,), view_of(spec, lengths))


def listed(policy, state, spec, lengths):
    """The pages listed by each head of each row."""
    chosen, summary = selected(policy, spec, state, np.array(lengths, np.int32))
    assert isinstance(chosen, Selection) and summary is None
    ids, count = np.asarray(chosen.ids), np.asarray(chosen.count)
    return [
        [ids[b, head, : count[b, head]].tolist() for head in range(ids.shape[1])]
        for b in range(len(ids))
    ]


def chosen(policy, spec, lengths, masses):
    """The state after a report of these masses of each row's pages, for all heads."""
    scores = np.full((len(masses), spec.num_kv_heads, spec.num_pages), -np.inf, np.float32)
    for row, own in enumerate(masses):
        scores[row, :, : len(own)] = np.log(own)
    return checked(policy, spec, scores, np.array(lengths, np.int32))


def one_layer(batch=2, pages=8):
    return spec_of(tiny_params(), batch, num_pages=pages)._replace(num_layers=1)


def test_heaviest_and_newest_pages_are_listed():
    """Two of six older pages, and of another row's three; the newest two even if light."""
    policy, spec = verified(budget=4 * PAGE, recent=PAGE + 1), one_layer()
    masses = [[0.1, 0.3, 0.05, 0.2, 0.2, 0.1, 0.01, 0.04], [0.2, 0.1, 0.3, 0.3, 0.1]]
    state = chosen(policy, spec, [60, 38], masses)
    both = [[1, 3, 6, 7]] * spec.num_kv_heads, [[0, 2, 3, 4]] * spec.num_kv_heads
    assert listed(policy, state, spec, [61, 40]) == [*both]


def test_newer_pages_are_listed_while_there_is_room():
    """The newest first; pages chosen by dense attention stay."""
    policy, spec = verified(budget=4 * PAGE, recent=PAGE + 1), one_layer(batch=1)
    state = chosen(policy, spec, [40], [[0.4, 0.1, 0.3, 0.1, 0.1]])
    assert listed(policy, state, spec, [40])[0][0] == [0, 2, 3, 4]
    assert listed(policy, state, spec, [41])[0][0] == [0, 2, 4, 5]
    assert listed(policy, state, spec, [64])[0][0] == [0, 2, 6, 7]


def test_full_budget_lists_all_pages():
    policy, spec = verified(budget=8 * PAGE, recent=PAGE), one_layer(batch=1)
    state = chosen(policy, spec, [20], [[0.4, 0.5, 0.1]])
    for length in (20, 24, 25, 64):
        assert listed(policy, state, spec, [length])[0][0] == [*range(-(-length // PAGE))]


def test_newest_pages_are_listed_before_any_report():
    policy, spec = verified(budget=4 * PAGE, recent=2 * PAGE), one_layer(batch=1)
    state = policy.init(spec)
    assert listed(policy, state, spec, [0])[0][0] == []
    assert listed(policy, state, spec, [12])[0][0] == [0, 1]
    assert listed(policy, state, spec, [50])[0][0] == [3, 4, 5, 6]


def test_newest_pages_cover_the_recent_tokens():
    """Also if the newest page has one token; one page is left to choose."""
    for recent, pages in ((1, (7, 1)), (2, (6, 2)), (9, (6, 2)), (10, (5, 3)), (60, (1, 7))):
        assert Settings(8 * PAGE, recent).pages(PAGE) == pages, recent


def test_wrong_hyper_parameters_are_refused():
    with pytest.raises(ValueError, match="budget=16: must be more than recent=64"):
        verified(budget=16)
    for name, value in (("budget", 0), ("recent", 0), ("budget", 2.5)):
        with pytest.raises(ValueError, match=f"{name}={value}: must be"):
            verified(**{name: value})
