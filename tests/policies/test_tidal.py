"""Tests TidalDecode against the obvious loop: which layers pick, and their picks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import StepView
from jsparse.selection.partials import Stats
from tests.support.one_layer import OneLayer
from tests.support.tiny import engine_logits, random_prompts, random_tokens, tiny_params


def stats_of(logits):
    lse = np.log(np.exp(logits).sum(-1))
    return Stats(jnp.asarray(logits, jnp.float32), jnp.asarray(lse, jnp.float32))


def deeper(layer):
    """The cache with its layer four times."""
    return layer.view.cache._replace(layers=layer.view.layers * 4)


def updated(layer, logits, state=None, nth=0):
    """The state after layer `nth` of four has reported these logits."""
    update = jax.jit(layer.policy.update, static_argnums=1)
    state = layer.state if state is None else state
    return update(state, nth, stats_of(logits), StepView(deeper(layer)))


def test_heads_share_the_tokens_of_largest_mean_weight():
    budget, layer = 7, OneLayer(jsparse.tidal(budget=7, first=0, again=3, sink=0, recent=0))
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(2, 2, layer.kv.capacity))
    logits[..., layer.length :] = -np.inf
    state = updated(layer, logits)
    weights = np.exp(logits)
    mean = (weights / weights.sum(-1, keepdims=True)).mean(1)
    ids, count = state
    assert count.tolist() == [[budget], [budget]]
    for b in range(2):
        assert ids[b, 0].tolist() == sorted(np.argsort(-mean[b])[:budget].tolist())
    # the layers between pass it on unchanged, the second pick replaces it
    assert layer.policy.update(state, 1, None, layer.view) is state
    ids, count = updated(layer, np.roll(logits, 5, axis=-1), state, nth=3)
    assert count.tolist() == [[budget], [budget]]
    assert ids[0].tolist() != state[0][0].tolist()


def test_each_head_attends_to_its_own_heaviest_tokens():
    budget, sink, recent = 9, 2, 3
    policy = jsparse.tidal(budget, first=0, again=3, sink=sink, recent=recent, heads="each")
    layer = OneLayer(policy)
    logits = 2 * np.random.default_rng(1).normal(size=(2, 2, layer.kv.capacity))
    logits[..., layer.length :] = -np.inf
    state = updated(layer, logits)
    chosen, _, _ = policy.select(state, 1, layer.q, StepView(deeper(layer)))
    logits[..., [*range(sink), *range(layer.length - recent, layer.length)]] += 100
    assert (chosen.count == budget).all()
    for b, head in np.ndindex(2, 2):
        best = np.argsort(-logits[b, head])[:budget]
        assert chosen.ids[b, head].tolist() == sorted(best.tolist())
    assert chosen.ids[0, 0].tolist() != chosen.ids[0, 1].tolist()


@pytest.mark.parametrize("budget", [5, 12])
def test_sinks_and_recent_text_are_within_the_budget(budget):
    """Of 3 and 4 tokens; of a smaller budget, the heaviest."""
    layer = OneLayer(jsparse.tidal(budget=budget, first=0, again=3, sink=3, recent=4))
    logits = 2 * np.random.default_rng(1).normal(size=(2, 2, layer.kv.capacity))
    logits[..., layer.length :] = -np.inf
    ids, count = updated(layer, logits)
    weights = np.exp(logits)
    mean = (weights / weights.sum(-1, keepdims=True)).mean(1)
    mean[:, [*range(3), *range(layer.length - 4, layer.length)]] += 1
    assert count.tolist() == [[budget], [budget]]
    for b in range(2):
        assert ids[b, 0].tolist() == sorted(np.argsort(-mean[b])[:budget].tolist())


def test_head_shorter_than_the_budget_lists_all_tokens():
    layer = OneLayer(jsparse.tidal(budget=64, first=0, again=3), length=5, page_size=64)
    logits = np.full((2, 2, layer.kv.capacity), -np.inf)
    logits[..., :5] = 0.0
    ids, count = updated(layer, logits)
    assert count.tolist() == [[5], [5]]
    assert ids[:, 0, :5].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_layers_are_dense_up_to_the_first_pick_and_at_the_second():
    asked, policy = [], jsparse.tidal(budget=4, first=1, again=3)

    def select(state, layer, q, view):
        chosen, summary, state = policy.select(state, layer, q, view)
        asked.append((layer, chosen.dense is not None, chosen.ids.shape[-1]))
        return chosen, summary, state

    watched = policy._replace(select=select)
    engine_logits(tiny_params(num_layers=5), watched, random_prompts((20,)), random_tokens(1, 2))
    assert asked == [(0, True, 0), (1, True, 0), (2, False, 4), (3, True, 0), (4, False, 4)]
    assert [policy.stats(layer) for layer in range(5)] == [
        None,
        "token_logits",
        None,
        "token_logits",
        None,
    ]


def test_wrong_hyper_parameters_are_refused():
    wrong = {"budget": 0, "first": -1, "again": 2.0, "sink": -1, "recent": 1.5, "correct_every": -1}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}={value}: must be an integer"):
            jsparse.tidal(**{name: value})
    with pytest.raises(ValueError, match="heads='some': must be one of"):
        jsparse.tidal(heads="some")
