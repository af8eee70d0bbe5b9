"""Tests LycheeDecode against a slow model: which heads pick, the picks of each rule, and their
receivers.
"""

import copy
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, StepView
from jsparse.runtime import rows as driver
from jsparse.selection.partials import Stats
from tests.support.marks import slow_except
from tests.support.one_layer import OneLayer
from tests.support.slow_model import SlowModel, SlowRow, logits_of, softmax
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

# head 0 picks in layers 0 and 3, head 1 in layer 1; layer 2 hands on its inherited set
GATES = ((1, 1), (0, 1), (0, 0), (1, 0), (0, 0))
PAGE = 8
PROMPTS = random_prompts((37, 18, 3))
FORCED = random_tokens(3, 12)
CHANGED = 0.02  # of the largest logit: far from rounding errors


def lychee(**arguments):
    """The paper's method, without sinks unless given."""
    return jsparse.lychee_decode(**{"gates": GATES, "sink": 0, "recent": 0, **arguments})


def best(weights, count):
    return sorted(range(len(weights)), key=lambda unit: -weights[unit])[: max(count, 1)]


def num_needed(weights, p):
    order = best(weights, len(weights))
    return order[: int(np.searchsorted(np.cumsum(np.asarray(weights)[order]), p)) + 1]


# the arguments of each rule, and its picks from the weights of units of `size` tokens, `length` of
# them held
RULES = {
    "top_k": ({"value": 20}, lambda weights, length, size: best(weights, 20 // size)),
    "top_p": ({"value": 0.7}, lambda weights, length, size: num_needed(weights, 0.7)),
    "threshold": (
        {"value": 0.15},
        lambda weights, length, size: (
            [i for i, w in enumerate(weights) if w > 0.15] or best(weights, 1)
        ),
    ),
    "ratio": (
        {"value": 0.75},
        lambda weights, length, size: best(weights, int(np.ceil(length / 4 / size))),
    ),
}


class SlowLychee:
    """The method on one row: each head's set as slots, picked and handed on within a step.

    Attributes:
        picked: the number of slots of each pick.
    """

    def __init__(self, row: SlowRow, pick, size: int):
        self.row, self.pick, self.size, self.handed, self.picked = row, pick, size, {}, []

    def step(self, token):
        self.handed.clear()
        return self.row.push(token, self.layer)

    def layer(self, layer, q):
        return self.row.over(
            layer, q, [self.slots(layer, head, q) for head in range(len(self.row.k[layer]))]
        )

    def slots(self, layer, head, q):
        keys = self.row.k[layer][head]
        length = len(keys)
        if not GATES[layer][head]:
            return sorted(self.handed[head] | {length - 1})
        weights = softmax(logits_of(self.row.mean_query(q, head), keys))
        masses = [weights[first : first + self.size].sum() for first in range(0, length, self.size)]
        units = self.pick(masses, length, self.size)
        self.handed[head] = {
            slot
            for unit in units
            for slot in range(unit * self.size, min((unit + 1) * self.size, length))
        }
        self.picked.append(len(self.handed[head]))
        return list(range(length))


def params():
    return tiny_params(num_layers=len(GATES))


@cache
def slow_prompts():
    model = SlowModel(params())
    return [SlowRow(model, prompt) for prompt in PROMPTS]


def slow_logits(pick, size):
    """The slow model's logits [steps, B, V], and the slots per pick of each row."""
    logits, picked = [], []
    for primed, forced in zip(slow_prompts(), FORCED, strict=True):
        rule = SlowLychee(copy.deepcopy(primed), pick, size)
        logits.append([primed.logits, *(rule.step(int(token)) for token in forced[:-1])])
        picked.append(rule.picked)
    return np.swapaxes(np.asarray(logits), 0, 1), picked


@cache
def dense_logits():
    return engine_logits(params(), "dense", PROMPTS, FORCED, page_size=PAGE)


@pytest.mark.parametrize("granularity", slow_except(["page", "token"]))
@pytest.mark.parametrize("rule", slow_except(("top_k", "top_p"), "top_p"))
def test_whole_decode_steps_match_the_slow_model(rule, granularity):
    """A ragged batch over 11 steps, with logits far from dense ones."""
    arguments, pick = RULES[rule]
    expected, picked = slow_logits(pick, PAGE if granularity == "page" else 1)
    policy = lychee(rule=rule, granularity=granularity, **arguments)
    logits = engine_logits(params(), policy, PROMPTS, FORCED, page_size=PAGE)
    assert_close(logits, expected, rtol=1e-4)
    assert np.abs(dense_logits() - expected).max() > CHANGED * np.abs(expected).max()
    assert all(len(set(counts)) > 1 for counts in picked[:2]) or (rule, granularity) == (
        "top_k",
        "token",
    )


def updated(policy, lengths, granularity, seed=0):
    """A pick in layer 0 for rows of these lengths: ids, count, and the weights of the units, [B, K,
    units].
    """
    layer = OneLayer(policy, length=max(lengths), batch=len(lengths))
    held = layer.kv._replace(
        lengths=jnp.broadcast_to(jnp.asarray(lengths, jnp.int32)[:, None], (len(lengths), 2))
    )
    logits = np.random.default_rng(seed).normal(size=(len(lengths), 2, held.capacity))
    logits = np.where(np.arange(held.capacity) < np.array(lengths)[:, None, None], logits, -np.inf)
    weights = (
        np.exp(logits).reshape(len(lengths), 2, -1, PAGE if granularity == "page" else 1).sum(-1)
    )
    with np.errstate(divide="ignore"):
        scores = jnp.asarray(np.log(weights), jnp.float32)
    stats = Stats(scores, jnp.asarray(np.log(weights.sum(-1)), jnp.float32))
    update = jax.jit(policy.update, static_argnums=1)
    ids, count = update(layer.state, 0, stats, StepView(layer.view.cache._replace(layers=(held,))))
    return np.asarray(ids), np.asarray(count), weights


@pytest.mark.parametrize("granularity", ["page", "token"])
def test_ratio_rule_picks_more_as_the_text_grows(granularity):
    policy = lychee(gates=((1, 1),), value=0.75, rule="ratio", granularity=granularity)
    ids, count, weights = updated(policy, (1, 4, 5, 31, 32, 33, 64, 65), granularity)
    assert (count[:, 0] == count[:, 1]).all()
    assert count[:, 0].tolist() == (
        [1, 1, 1, 1, 1, 2, 2, 3] if granularity == "page" else [1, 1, 2, 8, 8, 9, 16, 17]
    )
    for at in np.ndindex(*count.shape):
        assert ids[at][: count[at]].tolist() == sorted(
            np.argsort(-weights[at])[: count[at]].tolist()
        )


@pytest.mark.parametrize("granularity", ["page", "token"])
@pytest.mark.parametrize("rule", slow_except(RULES, "top_k", "threshold"))
def test_sinks_and_recent_text_are_within_the_budget(rule, granularity):
    """Of 3 and 9 tokens; of a smaller budget, the heaviest."""
    arguments, pick = RULES[rule]
    size, lengths = PAGE if granularity == "page" else 1, (1, 5, 17, 45, 64, 65)
    policy = lychee(
        gates=((1, 1),), rule=rule, granularity=granularity, sink=3, recent=9, **arguments
    )
    ids, count, weights = updated(policy, lengths, granularity)
    for b, head in np.ndindex(*count.shape):
        length, row = lengths[b], weights[b, head]
        row = row[: -(-length // size)] / row.sum()
        kept = {slot // size for slot in range(length) if slot < 3 or slot >= length - 9}
        if rule in ("top_k", "ratio"):
            number = min(len(pick(row, length, size)), len(row))
            expected = set(best(row + [unit in kept for unit in range(len(row))], number))
        else:
            expected = kept | set(pick(row, length, size))
        assert ids[b, head][: count[b, head]].tolist() == sorted(expected)


def test_stats_are_requested_if_the_next_layer_uses_a_set():
    for granularity, kind in (("page", "page_mass"), ("token", "token_logits")):
        assert [lychee(granularity=granularity).stats(layer) for layer in range(5)] == [
            kind,
            kind,
            None,
            kind,
            None,
        ]
    assert [jsparse.lychee_decode(((1, 1),) * 3).stats(layer) for layer in range(3)] == [None] * 3
    # a head that picks again in the next layer hands nothing on, the other does
    assert [jsparse.lychee_decode(((1, 1), (1, 0), (1, 0))).stats(layer) for layer in range(3)] == [
        "page_mass",
        None,
        None,
    ]


def corrections(policy):
    """The logits of all steps, and K and V [L, 2, B, K, S, H] before and after each correction."""
    seen, correct = [], driver.correct

    def held(cache):
        return np.stack(
            [
                [kv_cache.read_heads(pool, layer) for pool in (layer.k, layer.v)]
                for layer in cache.layers
            ]
        )

    def watched(decoder, policy, weights, tokens, cache, state, read_only):
        before = held(cache)
        cache, state = correct(decoder, policy, weights, tokens, cache, state, read_only)
        seen.append((before, held(cache)))
        return cache, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "correct", watched)
        return engine_logits(params(), policy, PROMPTS, FORCED[:, :10], page_size=PAGE), seen


@pytest.mark.slow
def test_corrections_give_the_keys_and_values_of_dense_decoding():
    """To within 1e-5 of a layer's largest, in float32; before, they differ in the layers after a
    sparse head.
    """
    rows = copy.deepcopy(slow_prompts())
    _, seen = corrections(lychee(value=8, correct_every=4))
    assert len(seen) == 2
    for i, (before, after) in enumerate(seen):
        for b, row in enumerate(rows):
            for token in FORCED[b, 4 * i : 4 * i + 4]:
                row.push(int(token), row.dense)
            length = len(row.tokens)
            for layer in range(len(GATES)):
                dense = np.stack([row.k[layer], row.v[layer]])
                assert_close(after[layer, :, b, :, :length], dense, rtol=1e-5, layer=layer)
                error = np.abs(before[layer, :, b, :, :length] - dense).max() / np.abs(dense).max()
                assert error < 1e-5 if layer < 2 else error > CHANGED or length <= 2 * PAGE


def test_gates_of_another_model_are_refused_at_the_start():
    with pytest.raises(
        ValueError,
        match=r"^gates=.*: is for 2 × 2 layers × KV heads, must be for the model's 5 × 2$",
    ):
        lychee(gates=((1, 1), (0, 0))).init(CacheSpec(5, 1, 4, 2, 16, PAGE, 4, jnp.float32))
    with pytest.raises(ValueError, match="must be for the model's 5 × 2"):
        engine_logits(
            params(), lychee(gates=((1,),) * 5), random_prompts((9,)), random_tokens(1, 2)
        )


def test_wrong_hyper_parameters_are_refused():
    above_0, below_1 = (
        "must be a number above 0 and at most 1",
        "must be a number from 0 to below 1",
    )
    for arguments, message in (
        ({"value": 64.0}, "value=64.0: must be an integer of at least 1 with rule='top_k'"),
        ({"value": True}, "value=True: must be an integer of at least 1"),
        (
            {"rule": "best"},
            r"rule='best': must be one of \['top_k', 'top_p', 'threshold', 'ratio'\]",
        ),
        ({"rule": "top_p", "value": 1.5}, f"value=1.5: {above_0}"),
        ({"rule": "top_p", "value": float("nan")}, f"value=nan: {above_0}"),
        ({"rule": "threshold", "value": -0.1}, f"value=-0.1: {below_1}"),
        ({"rule": "threshold", "value": False}, f"value=False: {below_1}"),
        ({"rule": "ratio", "value": 1}, f"value=1: {below_1} with rule='ratio'"),
        ({"granularity": "block"}, r"granularity='block': must be one of \['page', 'token'\]"),
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"recent": 64.0}, "recent=64.0: must be an integer of at least 0"),
        ({"correct_every": -1}, "correct_every=-1: must be an integer of at least 0"),
        ({"gates": ((1, 0), (1, 1))}, "gates=.*: all heads of layer 0 must be retrieval heads"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            lychee(**arguments)
