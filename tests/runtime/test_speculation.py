"""Tests that drafting with a policy and verifying with dense attention gives dense attention's
text.
"""

from concurrent.futures import Future
from functools import cache
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.cache import read_heads
from jsparse.policies.combinators import WrappedState
from jsparse.policies.expressions import as_policy, parse
from jsparse.policy import Services
from jsparse.runtime import compilation, decoding, draft_length
from jsparse.runtime.draft_length import DraftLength
from jsparse.runtime.generate_options import num_drafts
from jsparse.runtime.request import requests
from jsparse.runtime.sampling import chooser, forced, greedy
from jsparse.runtime.session import Session
from jsparse.runtime.speculation import speculate, verify_steps
from jsparse.runtime.turn import answers
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS
from tests.support.tiny import assert_close, random_prompts, spec_of, tiny_params

PROMPTS = random_prompts((30, 9, 17))
LIMITS = (40, 23, 31)
DRAFTS = 3
SILENT = [lambda piece: None] * len(PROMPTS)
QUEST = "quest(budget=16)"
VERIFIED = "verified(budget=12, recent=4)"
CLUSTERS = "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)"
# policies that draft: tokens are neither lost nor moved
DRAFTING = [x for x in METHODS if not (parse(x).evicts or parse(x).offload)]
GREEDY, DRAWN = "greedy", "drawn"
OPTIONS = {
    GREEDY: {"temperature": 0.0},
    DRAWN: {
        "temperature": 1.0,
        "top_p": 0.95,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 2.0},
    },
}


def session_of(policy, drafts, rows=PROMPTS, **options):
    params = tiny_params(num_layers=2)
    spec = spec_of(params, len(rows))
    session = Session(params, as_policy(policy), spec, drafts=drafts, **options)
    session.prefill(rows)
    return session


def asked_of(session, sampling, **more):
    own = [
        SamplingParams(max_tokens=limit, ignore_eos=True, logprobs=0, **OPTIONS[sampling], **more)
        for limit in LIMITS
    ]
    return requests(session.deployment.params, PROMPTS, own, session.deployment.policy, seed=3)


def chosen(session, own):
    """Returns how the session's requests sample their tokens, as `chooser` does."""
    return chooser(asked_of(session, own), session.deployment.params.config.vocab_size)


@cache
def decoded(policy, drafts, sampling):
    """The decoded text, and the session."""
    session = session_of(policy, drafts)
    outs = answers(session, asked_of(session, sampling), SILENT, lambda *_: None, 0.0, 0.0)
    return outs, session


@pytest.mark.parametrize(
    "drafting",
    slow_except(
        [(policy, sampling) for policy in DRAFTING for sampling in OPTIONS],
        (QUEST, DRAWN),
    ),
    ids=str,
)
def test_text_is_dense_attentions(drafting):
    policy, sampling = drafting
    (expected, _), (outs, _) = decoded("dense", 0, sampling), decoded(policy, DRAFTS, sampling)
    for out, its in zip(outs, expected, strict=True):
        assert out.token_ids == its.token_ids
        assert out.finish_reason == its.finish_reason == "length"
        np.testing.assert_allclose(out.logprobs, its.logprobs, rtol=1e-3, atol=1e-4)


def test_drafts_are_the_policys_and_some_are_rejected():
    outs, _ = decoded(QUEST, DRAFTS, GREEDY)
    for out in outs:
        assert 0 < out.stats.accepted_tokens < out.stats.drafted_tokens
        assert out.stats.attended_fraction < 0.8


def test_round_keeps_the_agreeing_drafts_and_one_more_token():
    """Drafts and dense choices of each round, computed from dense logits of the whole text."""
    session = session_of(QUEST, DRAFTS)
    choose, given = chosen(session, GREEDY)
    made = [[] for _ in PROMPTS]
    for result in session.steps(choose, given, limits=LIMITS):
        tokens = np.asarray(result.tokens)
        for b, limit in enumerate(LIMITS):
            if result.drafts is None:
                made[b] += tokens[:, b].tolist()
                continue
            counts, drafted = (int(x[b]) for x in result.drafts)
            left = limit - len(made[b])
            assert drafted == max(min(left, DRAFTS + 1) - 1, 0)
            assert (1 if left else 0) <= counts <= drafted + 1
            made[b] += tokens[:counts, b].tolist()
    assert [len(own) for own in made] == [*LIMITS]
    for prompt, own in zip(PROMPTS, made, strict=True):
        text = [*prompt, *own]
        logits = np.asarray(
            jsparse.logits(session.deployment.params, text + [0] * (-len(text) % 64))[0]
        )
        assert own == logits[len(prompt) - 1 : len(text) - 1].argmax(-1).tolist()


@pytest.mark.parametrize("policy", slow_except([QUEST, CLUSTERS], QUEST))
def test_k_and_v_are_dense_attentions(policy):
    """Also those of generated tokens, which a further turn may use."""
    (_, session), (_, its) = decoded(policy, DRAFTS, DRAWN), decoded("dense", 0, DRAWN)
    held = session.prefilled.cache.positions.tolist()
    # a row's newest token is sampled, but not cached yet
    assert held == [len(p) + limit - 1 for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    for layer, other in zip(
        session.prefilled.cache.layers, its.prefilled.cache.layers, strict=True
    ):
        for b, length in enumerate(held):
            assert layer.lengths[b].tolist() == [length] * layer.lengths.shape[1]
            for pool, its_pool in ((layer.k, other.k), (layer.v, other.v)):
                rows = (
                    read_heads(x, y)[b, :, :length] for x, y in ((pool, layer), (its_pool, other))
                )
                assert_close(*rows, rtol=1e-4, row=b)


@pytest.mark.parametrize("policy", [QUEST, *slow_except([CLUSTERS, "lfps(budget=0.3)"])])
@pytest.mark.parametrize("less", slow_except([0, 3], 3))
def test_further_turn_prefills_only_new_tokens(policy, less):
    """Rows keep all cached tokens of a response, or all but some."""
    session = session_of(policy, DRAFTS, resumable=True)
    outs = answers(session, asked_of(session, DRAWN), SILENT, lambda *_: None, 0.0, 0.0)
    more = random_prompts((35, 33, 34), seed=7)
    rows = zip(PROMPTS, outs, more, strict=True)
    whole = [[*prompt, *out.token_ids, *new] for prompt, out, new in rows]
    start = [len(p) + limit - 1 - less for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    session.prefill([text[at:] for text, at in zip(whole, start, strict=True)], start=start)
    alone = session_of("dense", 0, whole)
    assert_close(session.prefilled.logits, alone.prefilled.logits)
    # and later tokens, which need a correct state of the policy
    choose, given = chosen(session, GREEDY)
    made, expected = ([], [])
    for each, tokens in ((session, made), (alone, expected)):
        for result in each.steps(choose, given, limits=[4] * 3):
            counts = [len(result.tokens)] * 3 if result.drafts is None else result.drafts.counts
            tokens += [(b, result.tokens[:n, b].tolist()) for b, n in enumerate(counts)]
    for row in range(3):
        texts = ([t for b, part in each if b == row for t in part] for each in (made, expected))
        assert len({tuple(text) for text in texts}) == 1


def test_rows_keep_no_more_than_allowed():
    session = session_of(QUEST, DRAFTS, resumable=True)
    lengths = [len(prompt) for prompt in PROMPTS]
    bad = ([at - 1 for at in lengths], [at + 1 for at in lengths], [30.0, 9, 17], "abc")
    for start in (lengths[:2], *bad):
        message = r"start=\[.*\]: must be one integer per row, from \[30, 9, 17\] to"
        with pytest.raises(ValueError, match=message):
            session.prefill(PROMPTS, start=start)


@pytest.mark.slow
def test_rows_keep_no_tokens_that_sparse_attention_made():
    sparse = session_of(QUEST, 0, resumable=True)
    answers(sparse, asked_of(sparse, GREEDY), SILENT, lambda *_: None, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"to \[30, 9, 17\]"):
        sparse.prefill(PROMPTS, start=[len(prompt) + 1 for prompt in PROMPTS])


@pytest.mark.slow
def test_last_queries_must_be_prefilled_again():
    """LFPS uses 32 of them."""
    session = session_of("lfps(budget=0.3)", DRAFTS, resumable=True)
    answers(session, asked_of(session, GREEDY), SILENT, lambda *_: None, 0.0, 0.0)
    start = [len(prompt) + 1 for prompt in PROMPTS]
    with pytest.raises(ValueError, match=r"rows of \[3, 40, 40\] tokens: must have at least 32"):
        session.prefill(random_prompts((3, 40, 40)), start=start)


def test_row_decodes_up_to_its_capacity():
    """Drafts never take the place of a token that dense attention has room for."""
    made = []
    for policy, drafts in (("dense", 0), (QUEST, DRAFTS)):
        session = session_of(policy, drafts, random_prompts((125, 90, 120), seed=9))
        asked = asked_of(session, GREEDY)
        made.append(answers(session, asked, SILENT, lambda *_: None, 0.0, 0.0))
    for dense, out in zip(*made, strict=True):
        assert out.token_ids == dense.token_ids
        assert out.finish_reason == dense.finish_reason
    assert [out.finish_reason for out in made[1]] == ["overflow", "length", "overflow"]


@pytest.mark.slow
def test_maintenance_runs_when_due():
    """Chunks equal those of the policy alone, forced along the same text."""
    outs, session = decoded(CLUSTERS, DRAFTS, DRAWN)
    alone, row = session_of(CLUSTERS, 0), LIMITS.index(max(LIMITS))
    table = np.zeros((max(LIMITS), len(PROMPTS)), np.int32)
    table[:, row] = outs[row].token_ids
    for _ in alone.steps(forced, jnp.asarray(table), limits=LIMITS):
        pass
    # the other rows continued past their texts
    ours, expected = (each.prefilled.state.chunks for each in (session, alone))
    assert int(ours.count[row]) == int(expected.count[row]) > 0
    np.testing.assert_array_equal(ours.starts[row], expected.starts[row])


def test_no_row_drafts_past_its_maintenance():
    """If all drafts agree, rounds would otherwise skip the tokens at which it is due."""

    def count(state, view):
        return state + 1, view.cache

    counting = as_policy("all_pages()")._replace(
        init=lambda spec: jnp.zeros(spec.batch, jnp.int32),
        services=Services(count, period=5),
        name="counting",
    )
    session = session_of(counting, DRAFTS)
    choose, given = chosen(session, GREEDY)
    for _ in session.steps(choose, given, limits=LIMITS):
        pass
    assert session.prefilled.state.tolist() == [(limit - 1) // 5 for limit in LIMITS]


def test_rounds_are_traced_once():
    traced = []
    for _ in range(2):
        session = session_of(QUEST, DRAFTS)
        before = compilation.traces()
        answers(session, asked_of(session, DRAWN), SILENT, lambda *_: None, 0.0, 0.0)
        traced.append(compilation.traces() - before)
    assert traced[1] == 0


@pytest.mark.parametrize("place", [9, 10])
def test_end_token_within_a_round_ends_the_text(place):
    expected = decoded("dense", 0, GREEDY)[0][0].token_ids
    session = session_of(QUEST, DRAFTS)
    asked = asked_of(session, GREEDY, stop_token_ids=(expected[place],))
    out = answers(session, asked, SILENT, lambda *_: None, 0.0, 0.0)[0]
    assert out.token_ids == expected[: expected.index(expected[place]) + 1]
    assert out.finish_reason == "stop"


def test_rounds_may_draft_any_number(monkeypatch):
    """The chosen number, with feedback to later rounds; a round without drafts is a step."""
    drafts, seen, chosen_for = cycle((3, 0, 1, 2)), [], []

    def choose_next(self, most, *, remaining, steps):
        rows = [(row.tokens, row.acceptance.kept > 0) for row in remaining]
        chosen_for.append((len(seen), rows))
        return next(drafts)

    monkeypatch.setattr(DraftLength, "choose", choose_next)
    monkeypatch.setattr(DraftLength, "observe", lambda self, *counts: seen.append(counts))
    (expected, _), session = decoded("dense", 0, DRAWN), session_of(QUEST, DRAFTS)
    choose, given = chosen(session, DRAWN)
    made, rounds, by_row = [[] for _ in PROMPTS], [], []
    for result in session.steps(choose, given, limits=LIMITS):
        counts, tokens = np.ones(3, int), np.asarray(result.tokens)
        if result.drafts is not None:
            counts, drafted = map(np.asarray, result.drafts)
            by_row.append((counts - 1).tolist())
            took_part = [b for b, own in enumerate(made) if len(own) < LIMITS[b]]
            if took_part:
                rounds.append((drafted[took_part].tolist(), (counts[took_part] - 1).tolist()))
        for b, count in enumerate(counts):
            made[b] += tokens[:count, b].tolist()
    assert made == [out.token_ids for out in expected]
    most = [max(drafted) for drafted, _ in rounds]
    assert most[:6] == [3, 0, 1, 2, 3, 0]
    for observed, rows in chosen_for:  # each row's own rounds
        kept = [[made[b] for made in by_row[:observed]] for b in range(3)]
        wanted = [LIMITS[b] - 1 - sum(each + 1 for each in kept[b] if each >= 0) for b in range(3)]
        own = zip(wanted, kept, strict=True)
        assert rows == [(left, max([0, *each]) > 0) for left, each in own if left > 0]
    # all but those in flight at the end
    assert seen == rounds[: len(seen)] and len(seen) >= len(rounds) - 2


def test_draft_length_is_chosen_by_default(monkeypatch):
    """Two and one are tried first, with results two rounds late; a given number is kept."""
    monkeypatch.setattr(draft_length, "MOST_CPU", DRAFTS)
    monkeypatch.setattr(draft_length, "_newest", {})
    (expected, _), most = decoded("dense", 0, DRAWN), []
    for drafts in (None, DRAFTS):
        session = session_of(QUEST, drafts)
        choose, given = chooser(
            asked_of(session, DRAWN), session.deployment.params.config.vocab_size
        )
        made, asked_for = [[] for _ in PROMPTS], []
        for result in session.steps(choose, given, limits=LIMITS):
            counts = [1] * 3 if result.drafts is None else np.asarray(result.drafts.counts)
            if result.drafts is not None:
                asked_for.append(int(np.max(result.drafts.drafted)))
            for b, count in enumerate(counts):
                made[b] += np.asarray(result.tokens)[:count, b].tolist()
        assert made == [out.token_ids for out in expected]
        most.append(asked_for)
    assert most[0][:5] == [2, 2, 2, 1, 1]
    assert most[1][:5] == [DRAFTS] * 5


def waited(future):
    future.result()
    return future


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_rounds_without_drafts_have_a_separate_program(monkeypatch, steps):
    """It runs one or several steps, between rounds that draft; the text is the same."""
    monkeypatch.setattr(draft_length, "MOST_CPU", DRAFTS)
    monkeypatch.setattr(DraftLength, "idles", True)
    ahead = verify_steps.ahead
    monkeypatch.setattr(verify_steps, "ahead", lambda *given: waited(ahead(*given)))
    numbers = iter([1, 0, 0] + [0, 0, 3] * 40)
    monkeypatch.setattr(DraftLength, "choose", lambda self, most, **_: next(numbers))
    (expected, _) = decoded("dense", 0, DRAWN)
    session = session_of(CLUSTERS, None, steps_per_program=steps)
    widths, made = [], [[] for _ in PROMPTS]
    choose, given = chosen(session, DRAWN)
    for result in session.steps(choose, given, limits=LIMITS):
        widths.append(len(result.tokens))
        counts = [1] * 3 if result.drafts is None else result.drafts.counts
        for b, count in enumerate(counts):
            made[b] += np.asarray(result.tokens)[:count, b].tolist()
    assert made == [out.token_ids for out in expected]
    # the prompt's, one draft, then none, in its own program
    assert widths[:10] == [1, 4, *[steps] * 4, 4, steps, steps, 4]


def test_tokens_of_rounds_without_drafts_are_no_accepted_drafts(monkeypatch):
    """One token in four programs is drafted, and the others give three tokens each."""
    monkeypatch.setattr(draft_length, "MOST_CPU", DRAFTS)
    monkeypatch.setattr(decoding, "MIN_PROGRAM_TOKENS", 8)
    ahead, numbers = verify_steps.ahead, cycle((1, 0, 0, 0))
    monkeypatch.setattr(verify_steps, "ahead", lambda *given: waited(ahead(*given)))
    monkeypatch.setattr(DraftLength, "choose", lambda self, most, **_: next(numbers))
    (expected, _) = decoded("dense", 0, GREEDY)
    session = session_of(QUEST, None, steps_per_program=3)
    outs = answers(session, asked_of(session, GREEDY), SILENT, lambda *_: None, 0.0, 0.0)
    for out, its in zip(outs, expected, strict=True):
        assert out.token_ids == its.token_ids
        drafted, accepted = out.stats.drafted_tokens, out.stats.accepted_tokens
        assert 0 <= accepted <= drafted < len(out.token_ids) / 4


@pytest.mark.slow
def test_first_round_without_drafts_reports_to_the_policy(monkeypatch):
    """A program of three rounds leaves the state that its first round leaves alone."""
    monkeypatch.setattr(decoding, "MIN_PROGRAM_TOKENS", 2)
    ahead, states = verify_steps.ahead, []
    monkeypatch.setattr(verify_steps, "ahead", lambda *given: waited(ahead(*given)))
    monkeypatch.setattr(DraftLength, "choose", lambda self, most, **_: 0)
    for steps in (1, 3):
        session = session_of(VERIFIED, None, steps_per_program=steps)
        before = jax.tree.map(np.asarray, session.prefilled.state)
        for _ in session.steps(*chosen(session, GREEDY), limits=[1 + steps] * len(PROMPTS)):
            pass
        states.append(jax.tree.map(np.asarray, session.prefilled.state))
    assert not np.array_equal(before.ids, states[0].ids)
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_program_without_drafts_is_compiled_with_the_first(monkeypatch):
    """If the number of drafts may become 0, and enough tokens follow."""
    compiled, done = [], Future()
    done.set_result(None)
    monkeypatch.setattr(speculate, "ahead", lambda *given: compiled.append(given[3]) or done)
    monkeypatch.setattr(verify_steps, "ahead", lambda *given: compiled.append("steps") or done)
    monkeypatch.setattr(decoding, "MIN_PROGRAM_TOKENS", 8)
    for drafts, limit, wanted in ((None, 8, [2, "steps"]), (None, 7, [2]), (2, 8, [2])):
        session, compiled[:] = session_of(QUEST, drafts), []
        session.expect(*chosen(session, GREEDY), prompts=[3, 3, 3], limits=[4, limit, 4])
        assert compiled == wanted, (drafts, limit)


@pytest.mark.slow
def test_dense_drafts_nothing():
    outs, _ = decoded("keep(dense(), sink=4, recent=4)", DRAFTS, GREEDY)
    assert {out.stats.drafted_tokens for out in outs} == {0}


# Refusals


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("snapkv(budget=8, window=4, pool=3)", "evicts tokens"),
        ("offloaded(quest(budget=16), tail=8)", "keeps K and V in host memory"),
    ],
)
def test_policies_that_cannot_draft_are_refused(policy, reason):
    with pytest.raises(ValueError, match=rf"policy=.*exact=True.*{reason}"):
        jsparse.generate(tiny_params(num_layers=2), PROMPTS[0], policy=policy, exact=True)


def test_bad_numbers_are_refused():
    for exact, number, message in (
        (1, None, "exact=1: must be"),
        (False, 4, "num_speculative_tokens=4: must not be given without exact=True"),
        (True, 0, "num_speculative_tokens=0: must be"),
        (True, 33, "num_speculative_tokens=33: must be at most 32"),
        (True, 2.0, "num_speculative_tokens=2.0: must be"),
    ):
        with pytest.raises(ValueError, match=message):
            num_drafts(exact, number)


def test_features_that_need_every_step_are_refused():
    session, table = session_of(QUEST, DRAFTS), jnp.zeros((40, 3), jnp.int32)
    for choose, given, keep in ((greedy, (), True), (forced, table, False)):
        with pytest.raises(ValueError, match="drafts: must be 0 to keep logits, or to decode"):
            next(session.steps(choose, given, limits=LIMITS, keep_logits=keep))


def test_maintenance_must_not_change_the_cache():
    def faded(state, view):
        layers = tuple(layer._replace(v=0.8 * layer.v) for layer in view.layers)
        return state, view.cache._replace(layers=layers)

    fading = as_policy(QUEST)._replace(services=Services(faded, period=5), name="fading")
    session = session_of(fading, DRAFTS)
    choose, given = chosen(session, GREEDY)
    with pytest.raises(ValueError, match="policy=fading: its maintain must not change the cache"):
        list(session.steps(choose, given, limits=LIMITS))


@pytest.mark.slow
def test_update_sees_the_statistics_of_verification():
    """Once per round that a row takes part in, with those of every layer."""

    def counted(state, stats, view):
        assert len(stats) == len(state) == 2
        for of_layer in stats:
            shape = 3, *view.layers[0].lengths.shape[1:], view.layers[0].num_pages
            assert of_layer.scores.shape == shape
        return tuple(rounds + 1 for rounds in state)

    quest = as_policy(QUEST)
    counting = quest._replace(
        init=lambda spec: WrappedState(quest.init(spec), (jnp.zeros(spec.batch, jnp.int32),) * 2),
        prefill=lambda state, *of_chunk: state._replace(base=quest.prefill(state.base, *of_chunk)),
        append=lambda state, *of_step: state._replace(base=quest.append(state.base, *of_step)),
        select=lambda state, *of_step: (*quest.select(state.base, *of_step)[:2], state),
        services=Services(
            checked=lambda state, *seen: state._replace(own=counted(state.own, *seen))
        ),
        name="counting",
    )
    session = session_of(counting, DRAFTS)
    choose, given = chosen(session, GREEDY)
    rounds = np.zeros(3, int)
    for result in session.steps(choose, given, limits=LIMITS):
        if result.drafts is not None:
            rounds += np.asarray(result.drafts.counts) > 0
    for layer in session.prefilled.state.own:
        assert layer.tolist() == rounds.tolist()
