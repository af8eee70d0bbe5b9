"""Tests the evicting policies in the engine against slow numpy models of the same rules."""

from fractions import Fraction
from functools import cache

import jax
import numpy as np
import pytest

from jsparse.cache import KVCache, slot_positions
from jsparse.policies.expressions import parse
from jsparse.policy import Policy
from jsparse.runtime import capacity, session
from tests.support import slow_eviction as slow
from tests.support.marks import slow_except
from tests.support.slow_model import SlowModel, SlowRow
from tests.support.tiny import (
    assert_close,
    forced_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

PAGE, PERIOD, STEPS = 8, 6, 20
PROMPTS, FORCED = random_prompts((37, 18, 3)), random_tokens(3, STEPS)


def recording(policy: Policy, left: list) -> Policy:
    """Returns the policy with a cache that keeps text positions, and the list `left`.

    Each compression appends the positions that it leaves: [row][layer][head] -> positions.
    """
    assert policy.eviction is not None
    rework = policy.eviction.after_prompt
    assert rework is not None

    def note(*held):
        layers = list(zip(held[::2], held[1::2], strict=True))
        left.append(
            [
                [
                    [
                        positions[row, head, : lengths[row, head]].tolist()
                        for head in range(lengths.shape[1])
                    ]
                    for lengths, positions in layers
                ]
                for row in range(len(layers[0][0]))
            ]
        )

    def numbers(cache: KVCache):
        return [x for held in cache.layers for x in (held.lengths, slot_positions(held))]

    def after_prompt(state, view, slots):
        state, cache = rework(state, view, slots)
        jax.debug.callback(note, *numbers(cache), ordered=True)
        return state, cache

    def maintain(state, view):
        state, cache = policy.services.maintain(state, view)
        jax.debug.callback(note, *numbers(cache), ordered=True)
        return state, cache

    needs = (*policy.needs, "slot_positions")
    return policy._replace(
        eviction=policy.eviction._replace(after_prompt=after_prompt),
        services=policy.services._replace(maintain=maintain),
        needs=needs,
    )


@cache
def prompt_rows(heads, kv_heads):
    """Returns a model and a function that gives rows with prefilled prompts."""
    return SlowModel(tiny_params(2, heads, kv_heads))


def assert_equals_the_slow_model(expression, method, heads=4, kv_heads=2):
    """Logits of every step and the positions that every compression leaves are equal.

    The logits are far from dense attention's, and heads differ; otherwise the comparison would
    prove little.
    """
    params, left = tiny_params(2, heads, kv_heads), []
    policy = recording(parse(expression), left)
    spec = capacity.cache_spec(params, PROMPTS, STEPS, None, PAGE)
    made = session.Session(params, policy, spec, steps_per_program=1)
    made.prefill(PROMPTS)
    logits = forced_logits(made, FORCED)
    jax.effects_barrier()
    assert not made.prefilled.cache.overflow.any()
    model = prompt_rows(heads, kv_heads)
    lengths = set()
    for row, (prompt, forced) in enumerate(zip(PROMPTS, FORCED, strict=True)):
        held = SlowRow(model, prompt)
        rule = slow.SlowEvictor(held, method)
        expected = [held.logits, *(rule.step(int(token)) for token in forced[:-1])]
        assert [entry[row] for entry in left] == rule.left
        assert_close(logits[:, row], np.asarray(expected), rtol=2e-4, row=row)
        lengths.add(len(rule.left[-1][0][0]))
    periods = (STEPS - 1) // policy.services.period if policy.services.period else 0
    assert len(left) == 1 + periods
    assert min(lengths) < len(PROMPTS[0])


SCORES = {
    "attention": slow.attention,
    "snapkv": lambda seen: slow.pooled(slow.attention_to_all(seen), 5, np.mean),
    "r_kv": slow.important_and_rare,
    "h2o": slow.tracked,
}
P, FLOOR, CAP, BUDGET, WINDOW, SINK = 0.6, 7, 13, 10, 4, 2


def hard_kv(metric, budgets, *, merge=True, patience=0, recent=WINDOW):
    """The expression and the slow method of one combination."""
    protected = recent + SINK + merge
    minimum, max_length, budget = (max(value - protected, 0) for value in (FLOOR, CAP, BUDGET))
    counts = {
        "uniform": slow.uniform(budget),
        "joint": slow.joint(budget, minimum, max_length),
        "n_star": slow.n_star(P, minimum, max_length, SINK),
        "calibrated": slow.calibrated(
            P, minimum, max_length, SINK, *([np.asarray] if metric == "r_kv" else [])
        ),
        "union": slow.marked(minimum, max_length),
    }
    tracks = metric == "h2o"
    method = slow.SlowMethod(
        slow.union_scores(P) if budgets == "union" else SCORES[metric],
        counts[budgets],
        window=WINDOW,
        recent=recent,
        sink=SINK,
        period=PERIOD,
        merge=merge,
        patience=patience,
        **(
            {"begin": slow.window_sums, "track": lambda n, shares, at: n + shares} if tracks else {}
        ),
    )
    expression = (
        f"hard_kv(budget={BUDGET}, floor={FLOOR}, cap={CAP}, p={P}, period={PERIOD}, "
        f"window={WINDOW}, sink={SINK}, metric={metric!r}, budgets={budgets!r}, merge={merge}, "
        f"patience={patience}, recent={recent})"
    )
    return expression, method


# every score and every count rule; that of h2o, which is tracked, with both kinds of counts
PAIRS = [
    ("attention", "joint"),
    ("attention", "uniform"),
    ("attention", "n_star"),
    ("attention", "calibrated"),
    ("attention", "union"),
    ("snapkv", "calibrated"),
    ("r_kv", "n_star"),
    ("r_kv", "calibrated"),
    ("h2o", "joint"),
]


@pytest.mark.parametrize("pair", slow_except(PAIRS, PAIRS[0]), ids="-".join)
def test_hard_kv_matches_the_slow_model(pair):
    assert_equals_the_slow_model(*hard_kv(*pair))


@pytest.mark.slow
@pytest.mark.parametrize(("patience", "merge"), [(1, False), (2, True)])
def test_patience_matches_the_slow_model(patience, merge):
    assert_equals_the_slow_model(*hard_kv("attention", "joint", merge=merge, patience=patience))


@pytest.mark.slow
def test_more_newest_tokens_than_queries_match_the_slow_model():
    assert_equals_the_slow_model(*hard_kv("h2o", "joint", recent=WINDOW + 2))


def stamped(threshold, prompt=2.0**30):
    """RaaS: a used token, and the newest, gets the position of its step; prompts keep theirs."""

    def track(stamps, shares, position):
        used = shares >= threshold
        used[-1] = True
        return [position if u and s < prompt else s for u, s in zip(used, stamps, strict=True)]

    return track


def prompt_and(room):
    """RaaS: all of the prompt, and `room` more."""
    return lambda scores, seen: [room + int((x >= 2.0**30).sum()) for x in scores]


METHODS = {
    "snapkv(budget=9, window=4)": slow.SlowMethod(
        lambda seen: slow.pooled(slow.attention_to_all(seen), 5, np.mean), slow.uniform(5), window=4
    ),
    "ada_kv(budget=15, window=4, pool=3, floor=0.5, cap=2)": slow.SlowMethod(
        lambda seen: slow.pooled(slow.attention_to_all(seen), 3, np.max),
        slow.ada_kv(11, Fraction(1, 2), 26),
        window=4,
    ),
    "h2o(budget=11, window=4, period=6)": slow.SlowMethod(
        slow.tracked,
        slow.uniform(6),
        window=4,
        recent=5,
        period=6,
        begin=slow.window_sums,
        track=lambda sums, shares, position: sums + shares,
    ),
    # a period shorter than the window, which then has queries of the prompt and new ones
    "r_kv(budget=11, window=5, period=3, importance=0.3)": slow.SlowMethod(
        lambda seen: slow.important_and_rare(seen, 0.3), slow.uniform(6), window=5, period=3
    ),
    "raas(budget=9, threshold=0.08, window=2, period=6)": slow.SlowMethod(
        slow.tracked,
        prompt_and(7),
        window=2,
        period=6,
        begin=lambda seen: [2.0**30] * len(seen.keys),
        track=stamped(0.08),
    ),
}
DEFAULT = [name for name in METHODS if name.startswith(("snapkv", "ada_kv", "r_kv"))]


@pytest.mark.parametrize("expression", slow_except(METHODS, *DEFAULT))
def test_each_method_matches_the_slow_model(expression):
    assert_equals_the_slow_model(expression, METHODS[expression])


def test_heads_hold_their_compressed_prompt_and_new_tokens():
    """Slots per row: for 20 new tokens after prompts of 5 and 60."""
    for expression, few, many in (
        ("snapkv(budget=9, window=4)", 25, 29),
        ("ada_kv(budget=15, window=4, cap=2)", 25, 50),
    ):
        eviction = parse(expression).eviction
        assert eviction is not None and eviction.max_length is not None
        assert [eviction.max_length(prompt, 20) for prompt in (5, 60)] == [few, many], expression
