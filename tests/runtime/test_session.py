"""Tests sessions: several steps per program, further turns, refusals."""

from functools import partial

import jax
import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams, generation
from jsparse.builder import dense
from jsparse.policies.expressions import as_policy, parse
from jsparse.policy import Services
from jsparse.runtime import chunk_attention, compilation, decoding, sampling
from jsparse.runtime import rows as driver
from jsparse.runtime.request import requests
from jsparse.runtime.session import Session
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS, TABLE, outermost
from tests.support.tiny import (
    assert_close,
    forced_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
)
from tests.support.toy_policies import (
    bypass,
    even_ids,
    inherit,
    prompt_ends,
    shrink,
)

PAGE = 8
PROMPTS = random_prompts((37, 18, 3))


@pytest.fixture
def short_chunks(monkeypatch):
    """Makes prefill use chunks of 16 tokens."""
    monkeypatch.setattr(chunk_attention, "chunk_tokens", lambda *_: 16)


# Several steps in one program


def faded(state, view):
    """Maintenance with an effect on the logits."""
    layers = tuple(layer._replace(v=0.8 * layer.v) for layer in view.layers)
    return state, view.cache._replace(layers=layers)


SERVICED = as_policy("streaming(sink=1, recent=4)")._replace(
    services=Services(faded, period=11, correct_every=13), name="serviced"
)
# The numbers of steps are computed by hand, from those left to the next service.
LIMITS = (30, 30, 3)
PROGRAMS = {
    # results past the last row's limit are dropped
    dense(): [8, 8, 8, 5],
    # due after 11 and 22 steps
    shrink(period=11): [8, 1, 1, 1, 8, 1, 1, 1, 7],
    # due after 11, 13, 22 and 26
    SERVICED: [8, *[1] * 5, 8, *[1] * 8],
    # due after 13 and 26
    inherit()._replace(services=Services(correct_every=13), name="inherit"): [
        8,
        *[1] * 5,
        8,
        *[1] * 5,
        3,
    ],
    # a service is always due soon
    dense()._replace(services=Services(period=9, correct_every=4), name="busy"): [1] * 29,
    prompt_ends(): [8, 8, 8, 5],
    **{
        as_policy(expression): [8, 8, 8, 5]
        for expression in (
            "twilight(quest(budget=24), p=0.8)",
            "lychee_decode(((1, 1), (0, 1)), value=16)",
        )
    },
    **{toy: [8, 8, 8, 5] for toy in (bypass(), even_ids())},
}


def decoded(policy, steps_per_program, limits=LIMITS):
    """The results of every program, with greedy tokens in row 0 and sampled ones in the others."""
    params = tiny_params(num_layers=1 if policy is SERVICED else 2)
    spec = spec_of(params, len(PROMPTS), page_size=PAGE)
    made = Session(params, policy, spec, steps_per_program=steps_per_program)
    made.prefill(PROMPTS)
    options = [SamplingParams(), *(SamplingParams(temperature=t, seed=3) for t in (1.0, 2.0))]
    chosen = sampling.chooser(requests(params, PROMPTS, options, policy), params.config.vocab_size)
    return list(jax.device_get(list(made.steps(*chosen, limits=limits))))


def test_results_end_at_the_largest_limit():
    params = tiny_params(num_layers=1)
    made = Session(params, dense(), spec_of(params, 2), steps_per_program=8)
    made.prefill([[1, 2, 3], [4, 5]])
    results = list(made.steps(sampling.greedy, (), limits=[4, 2]))
    assert [result.tokens.shape for result in results] == [(1, 2), (3, 2)]


@pytest.mark.parametrize("policy", slow_except(PROGRAMS, SERVICED), ids=str)
def test_steps_of_one_program_equal_single_steps(policy):
    alone, together = decoded(policy, 1), decoded(policy, 8)
    assert [len(result.tokens) for result in alone] == [1] * 30
    assert [len(result.tokens) for result in together] == [1, *PROGRAMS[policy]]
    for name in ("tokens", "logprobs", "overflow"):
        one, other = (
            np.concatenate([getattr(result, name) for result in results])
            for results in (alone, together)
        )
        assert one.shape == other.shape == (30, 3)
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
    assert alone[0].stats is together[0].stats is None
    for name in ("attended", "read"):
        one, other = (
            np.concatenate([getattr(result.stats, name) for result in results[1:]])
            for results in (alone, together)
        )
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)


def test_host_processes_a_program_while_the_next_one_runs(monkeypatch):
    """A streamer sees tokens at most one program late."""
    params, events = tiny_params(num_layers=1), []
    real = driver.decode_steps

    def watched(*arguments):
        events.append("start")
        return real(*arguments)

    vars(watched).update(ahead=real.ahead, on=lambda mesh: watched)
    monkeypatch.setattr(decoding.Decoding, "_program", watched)
    monkeypatch.setattr(generation, "Session", partial(Session, steps_per_program=8))
    jsparse.generate(
        params,
        PROMPTS[0],
        max_new_tokens=33,
        on_progress=lambda what, done, _: what == "decode" and events.append(done),
    )
    assert events == [1, "start", "start", 9, "start", 17, "start", 25, 33]


def test_steps_are_compiled_during_prefill():
    params = tiny_params(num_layers=1)
    run = Session(params, as_policy("streaming(sink=1, recent=5)"), spec_of(params, 1))
    given = jax.numpy.zeros((1, 7), jax.numpy.float32)

    def choose(given, nth, logits, active):
        return *sampling.greedy((), nth, logits + given.sum())[:2], given

    began = compilation.waited()
    run.expect(choose, given, prompts=[3], limits=[4])
    run.prefill([[1, 2, 3]])
    assert run._expected is not None
    run._expected.result()
    compiled = compilation.traces()
    # the token after the prompt has a separate program, which does not count
    assert len(list(run.steps(choose, given, limits=[4]))) == 4
    assert compilation.traces() == compiled
    assert compilation.waited() > began


def test_number_of_steps_per_program_is_checked():
    params = tiny_params(num_layers=1)
    for count in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"steps_per_program={count}: must be an integer"):
            Session(params, dense(), spec_of(params, 1), steps_per_program=count)


# Further turns

STEPS = 6
TURNS = (
    # generated tokens to keep and new tokens, by row
    ((5, 2), (3, 20), (0, 33)),
    ((1, 1), (0, 0), (2, 5)),  # fewer than a window of queries, and none at all
)


def turn_logits(made, turn):
    """Decodes forced tokens; returns the logits and the tokens."""
    forced = random_tokens(len(PROMPTS), STEPS, seed=10 + turn)
    return forced_logits(made, forced), forced


def further_turns(policy, params):
    """Two further turns of a ragged batch equal sessions that prefill everything at once."""
    spec = spec_of(params, len(PROMPTS), page_size=PAGE)
    made = Session(params, policy, spec, resumable=True)
    made.prefill(PROMPTS)
    rows, (_, forced) = PROMPTS, turn_logits(made, 0)
    assert made.can_continue
    for nth, turn in enumerate(TURNS, 1):
        new = random_prompts([count for _, count in turn], seed=20 + nth)
        more = [forced[row, :kept].tolist() + new[row] for row, (kept, _) in enumerate(turn)]
        made.prefill(more)
        rows = [ids + own for ids, own in zip(rows, more, strict=True)]
        logits, forced = turn_logits(made, nth)
        fresh = Session(params, policy, spec)
        fresh.prefill(rows)
        expected, _ = turn_logits(fresh, nth)
        assert_close(logits, expected, rtol=1e-5, turn=nth)


# by default a method with a state of pages
STATEFUL = next(x for x in TABLE if outermost(x) == "quest")


EVICTORS = [x for x in TABLE if parse(x).evicts]
OTHERS = [x for x in METHODS if x not in EVICTORS]


def test_further_turn_after_an_eviction_is_refused_by_name():
    params, policy = tiny_params(num_layers=1), parse(EVICTORS[0])
    spec = spec_of(params, len(PROMPTS), page_size=PAGE)
    with pytest.raises(ValueError, match="must not change the cache after the prompt") as error:
        Session(params, policy, spec, resumable=True)
    assert str(error.value).startswith(f"policy={policy}: ")


@pytest.mark.slow
def test_second_prompt_after_an_eviction_is_refused():
    params = tiny_params(num_layers=1)
    made = Session(params, parse(EVICTORS[0]), spec_of(params, len(PROMPTS), page_size=PAGE))
    made.prefill(PROMPTS)
    list(made.steps(sampling.greedy, (), limits=[2] * 3))
    assert not made.can_continue
    with pytest.raises(ValueError, match="resumable=False: must be True to run a further turn"):
        made.prefill(PROMPTS)


@pytest.mark.parametrize("expression", slow_except(OTHERS, STATEFUL))
def test_further_turn_prefills_only_new_tokens(expression, short_chunks):
    between_layers = "tidal", "lychee", "duo", "razor", "retrieval_heads", "dense_layers"
    layers = 2 if any(name in expression for name in between_layers) else 1
    further_turns(as_policy(expression), tiny_params(num_layers=layers))


def test_prefill_counts_only_new_tokens(short_chunks):
    params, done = tiny_params(num_layers=1), []
    made = Session(params, dense(), spec_of(params, 3, page_size=PAGE), resumable=True)
    for rows in (PROMPTS, random_prompts((3, 20, 0)), random_prompts((1, 1, 1))):
        made.prefill(rows, lambda *call: done.append(call))
        list(made.steps(sampling.greedy, (), limits=[4] * 3))
    assert done == [
        ("prefill", 16, 37), ("prefill", 32, 37), ("prefill", 37, 37),
        ("prefill", 16, 20), ("prefill", 20, 20), ("prefill", 1, 1),
    ]  # fmt: skip
    assert made.prefilled.cache.positions.tolist() == [
        37 + 3 + 1 + 3,
        18 + 20 + 1 + 3,
        3 + 0 + 1 + 3,
    ]


def test_invalid_turn_is_refused_and_changes_nothing():
    params = tiny_params(num_layers=1)
    spec = spec_of(params, 3, page_size=PAGE, num_pages=8)
    made = Session(params, dense(), spec, resumable=True)
    with pytest.raises(ValueError, match="must have prefilled prompts"):
        _ = made.prefilled
    for rows, said in (([[1]], "1 entries: must be 3"), ([[], [], []], "must not all be empty")):
        with pytest.raises(ValueError, match=said):
            made.prefill(rows)
    with pytest.raises(ValueError, match=r"rows of \[65, 1, 1\] tokens: must fit in the 64"):
        made.prefill([[1] * 65, [1], [1]])
    made.prefill(PROMPTS)
    steps = made.steps(sampling.greedy, (), limits=[9] * 3)
    next(steps)
    with pytest.raises(ValueError, match="must have prefilled prompts, and neither be decoding"):
        made.prefill([[1]] * 3)
    steps.close()
    said = r"rows of \[65, 19, 4\] tokens: must fit in the 64 of the cache"
    with pytest.raises(ValueError, match=said):
        made.prefill([[1] * 28, [1], [1]])
    made.prefill([[1] * 27, [1], [1]])
    assert made.prefilled.cache.positions.tolist() == [64, 19, 4]


def test_session_is_unusable_after_a_failed_turn(short_chunks):
    params = tiny_params(num_layers=1)
    made = Session(params, dense(), spec_of(params, 3, page_size=PAGE), resumable=True)
    made.prefill(PROMPTS)

    def interrupt(what, done, total):
        if done > 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.prefill(random_prompts((20, 20, 20)), interrupt)
    assert not made.can_continue
    with pytest.raises(ValueError, match="after a failed turn, create a new session"):
        made.prefill([[1]] * 3)


def test_session_is_unusable_after_a_failed_step(monkeypatch):
    """A failed program may have consumed the cache; an interrupt between programs has not."""
    params = tiny_params(num_layers=1)
    policy = dense()._replace(services=Services(correct_every=1))
    made = Session(params, policy, spec_of(params, 3, page_size=PAGE), resumable=True)
    made.prefill(PROMPTS)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in made.steps(sampling.greedy, (), limits=[9] * 3):
            raise KeyboardInterrupt
    assert made.can_continue
    made.prefill([[1]] * 3)

    def failing(decoder, policy, weights, tokens, cache, state, read_only):
        jax.tree.map(lambda x: x.delete(), cache)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(driver, "correct", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(made.steps(sampling.greedy, (), limits=[9] * 3))
    assert not made.can_continue
