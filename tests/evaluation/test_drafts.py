"""Tests the task `drafts` of `jsparse eval`: the number of drafts that dense attention accepts."""

import pytest

import jsparse
from jsparse.evaluation.evaluators import DRAFTED, Drafting, _of_drafts, excerpt
from jsparse.runtime.host_reader import GenerationStats
from tests.support.tiny import random_tokens, tiny_params

TEXT = {"random": random_tokens(1, 200)[0].tolist()}
LENGTH, STEPS = 60, 20
QUEST = "quest(budget=32)"


def drafting():
    return Drafting(tiny_params(num_layers=2), LENGTH, TEXT, STEPS, batch=2)


@pytest.mark.slow
def test_drafts_match_exact_decoding():
    """Compared with each sample decoded alone, its rounds counted by their tokens."""
    params, indices = tiny_params(num_layers=2), [0, 1]
    ((dense, quest),) = drafting()(["dense()", QUEST], indices)
    assert [values for values, _ in dense] == [{}, {}]
    for index, (values, _) in zip(indices, quest, strict=True):
        out = jsparse.generate(
            params,
            excerpt(TEXT, LENGTH, STEPS, index),
            policy=QUEST,
            exact=True,
            num_speculative_tokens=DRAFTED,
            max_new_tokens=STEPS + 1,
            eos_token_id=[],
        )
        stats = out.stats
        assert values["accepted"] == stats.accepted_tokens / stats.drafted_tokens
        assert 0 < values["accepted"] < 1
        rounds = STEPS - stats.accepted_tokens
        assert values["tokens_per_round"] == pytest.approx(STEPS / rounds)
        # all rounds but the last ones have DRAFTED drafts
        assert DRAFTED * rounds - 10 <= stats.drafted_tokens <= DRAFTED * rounds
        assert values["attended"] == stats.attended_fraction < 1


def test_rounds_are_counted_by_their_tokens():
    """41 tokens; the prefill gives the first of them."""
    for drafted, accepted, rounds in [(40, 30, 10), (8, 0, 40), (39, 39, 1)]:
        stats = GenerationStats(9, 41, 1.0, None, 0.5, 0.6, "quest", drafted, accepted)
        values = _of_drafts(stats)
        assert values == {
            "accepted": accepted / drafted,
            "tokens_per_round": 40 / rounds,
            "attended": 0.5,
            "read": 0.6,
        }, drafted


def test_policy_that_cannot_draft_is_refused_by_name():
    with pytest.raises(ValueError, match=r"policy=snapkv.*exact=True.*evicts tokens"):
        drafting()(["dense()", "snapkv(budget=8, window=4, pool=3)"], [0])


def test_lengths_without_room_are_refused():
    for length, message in [(21, "steps \\+ 2 = 22"), (201, "at most 200")]:
        with pytest.raises(ValueError, match=f"length={length}: must be .*{message}"):
            Drafting(tiny_params(num_layers=2), length, TEXT, STEPS, batch=2)
