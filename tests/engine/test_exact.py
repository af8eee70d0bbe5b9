"""Tests that an engine's rows draft under a policy and decode dense attention's text."""

import time
from itertools import cycle

import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.engine.decode_programs import decode_key
from jsparse.engine.latency_model import LatencyModel
from jsparse.engine.packing import pack_round, unpack
from jsparse.engine.programs import engine_keys
from jsparse.policies.expressions import parse
from jsparse.runtime import draft_length
from jsparse.runtime.decode_step import StepStats
from jsparse.runtime.speculation import VerificationRound
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.serving import asked, assert_at_rest, greedy, tiny_llm, until
from tests.support.tiny import random_prompts

*PROMPTS, BEGINNING = random_prompts((9, 21, 3, 41, 16, 5, 32), seed=5)
ASKED = [*PROMPTS, BEGINNING + PROMPTS[0], BEGINNING + PROMPTS[5]]
DRAWN = {
    "temperature": 1.0,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 3.0},
    "min_tokens": 4,
}
BIASED = {"logit_bias": {7: 1.0}}  # greedy requests run the programs of sampled ones
# greedy and sampled requests in one batch, of different lengths
OPTIONS = [
    greedy(tokens, ignore_eos=True, **({"seed": tokens} | DRAWN if tokens % 2 else BIASED))
    for tokens in (10, 5, 14, 9, 6, 11, 7, 8)
]
QUEST = "quest(budget=16)"
CLUSTERS = "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)"
VERIFIED = "verified(budget=16, recent=3)"
NEXT = (2, 0, 0, 3, 0)  # chosen numbers of drafts
CAN = {"max_num_seqs": 3, "ladder": ((0, 16),), "batch_invariant": False}


@shared
def engine(expression, exact=True, **options):
    more = {"exact": True, "num_speculative_tokens": 3} if exact else {}
    return tiny_llm(expression, **CAN, **more, **options)


@shared
def expected():
    return engine("dense", exact=False).generate(ASKED, OPTIONS)


@pytest.mark.parametrize("expression", slow_except([QUEST, CLUSTERS, VERIFIED], QUEST))
def test_text_is_dense_attentions(expression):
    llm = engine(expression)
    for out, its in zip(llm.generate(ASKED, OPTIONS), expected(), strict=True):
        (made,), (dense,) = out.outputs, its.outputs
        assert made.token_ids == dense.token_ids
        assert made.finish_reason == dense.finish_reason == "length"
        np.testing.assert_allclose(made.token_logprobs, dense.token_logprobs, rtol=1e-3, atol=1e-4)
    assert_at_rest(llm)


def test_drafts_are_counted():
    llm = engine(QUEST)
    llm.generate(ASKED, OPTIONS)
    counters = llm.engine.counters
    by_position = [counters.accepted_at[nth] for nth in range(3)]
    assert 0 < sum(by_position) == counters.accepted_tokens < counters.draft_tokens
    assert counters.draft_tokens <= 3 * counters.drafts
    # a draft is accepted only if all before it are
    assert by_position == sorted(by_position, reverse=True)
    assert counters.row_steps <= 3 * counters.decode_steps


def test_draft_length_is_chosen_by_default(monkeypatch):
    """The first number is two, where programs have room for three."""
    monkeypatch.setattr(draft_length, "MOST_CPU", 3)
    seen = []
    monkeypatch.setattr(
        LatencyModel, "observe_round", lambda self, *of_round: seen.append(of_round)
    )
    llm = tiny_llm(QUEST, **CAN, exact=True)
    assert llm.engine.sizes.drafts == (3,) * len(llm.engine.sizes.rows)
    (out,) = llm.generate([ASKED[2]], OPTIONS[2])
    assert out.outputs[0].token_ids == expected()[2].outputs[0].token_ids
    assert max(seen[0][1]) == 2
    for _, drafted, accepted, _ in seen:
        assert all(0 <= kept <= made for made, kept in zip(drafted, accepted, strict=True))


@pytest.mark.parametrize("expression", slow_except([QUEST, CLUSTERS, VERIFIED]))
def test_rounds_without_drafts_run_several_steps(expression, monkeypatch):
    """Between rounds that draft; the text is the same, and such tokens are no drafts."""
    monkeypatch.setattr(draft_length, "MOST_CPU", 3)
    options = {"exact": True, "steps_per_program": 3, "max_stall_ms": None}
    llm, plans, drafts = tiny_llm(expression, **CAN, **options), [], cycle(NEXT)
    can_run, plan_next = llm.engine.programs.can_run, llm.engine.scheduler.plan

    def wait_for(*asked, **given):
        while not can_run(*asked, **given):
            time.sleep(0.01)
        return True

    def plan():
        plans.append(plan_next())
        return plans[-1]

    monkeypatch.setattr(llm.engine.programs, "can_run", wait_for)
    monkeypatch.setattr(llm.engine.scheduler, "plan", plan)
    monkeypatch.setattr(LatencyModel, "drafts", lambda self, *_, **__: next(drafts))
    for out, its in zip(llm.generate(ASKED, OPTIONS), expected(), strict=True):
        assert out.outputs[0].token_ids == its.outputs[0].token_ids
    # alone, a request waits for nothing and its programs are as long as possible
    plans.clear()
    seen, observe = [], LatencyModel.observe_round
    monkeypatch.setattr(
        LatencyModel, "observe_round", lambda self, *its: seen.append(its) or observe(self, *its)
    )
    (out,), (its,) = (
        each.generate([ASKED[2]], greedy(30, ignore_eos=True))
        for each in (llm, engine("dense", exact=False))
    )
    assert out.outputs[0].token_ids == its.outputs[0].token_ids
    rounds = {(plan.decode.drafts, plan.decode.steps) for plan in plans if plan.decode}
    assert rounds >= {(3, 1), (0, 3)}
    assert {drafted for plan, (drafted,), *_ in seen if plan.drafts == 0} == {0}
    assert_at_rest(llm)


def test_sequences_end_within_a_round():
    """By an end token, or by an abort; tokens in flight are dropped."""
    llm, dense = engine(QUEST), expected()[2].outputs[0].token_ids
    options = [greedy(14, stop_token_ids=(dense[at],), **BIASED) for at in (5, 6, 7)]
    outs = llm.generate([ASKED[2]] * 3, options)
    for out, at in zip(outs, (5, 6, 7), strict=True):
        assert out.outputs[0].token_ids == dense[: dense.index(dense[at]) + 1]
        assert out.outputs[0].finish_reason == "stop"
    gone = llm.engine.add(asked(llm, ASKED[2], greedy(14, **BIASED)), request_id="gone")
    until(llm, lambda: len(gone.builders[0].token_ids) > 3)
    llm.engine.abort("gone")
    until(llm, lambda: llm.engine.idle)
    (again,) = llm.generate([ASKED[2]], greedy(14, **BIASED))
    assert again.outputs[0].token_ids == dense
    assert_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "exact", "cached"),
    [
        (QUEST, True, 48),
        ("dense", False, 48),
        (QUEST, False, 32),
        # its state is rebuilt from K and V
        (CLUSTERS, True, 48),
        # its window of last queries is computed again; the rest of the prompt is that long
        (VERIFIED, True, 32),
    ],
)
def test_generated_blocks_stay_in_the_prefix_cache(policy, exact, cached):
    """Blocks with K and V of dense attention: a further turn prefills only its new tokens."""
    llm, (prompt,) = engine(policy, exact), random_prompts([39], seed=21)
    drawn = {"ignore_eos": True, "seed": 1, "temperature": 1.0}
    (first,) = engine("dense", exact=False).generate([prompt], greedy(20, **drawn))
    end = first.outputs[0].token_ids[12]
    # an end token: the device continues until the host sees it
    asked = greedy(20, stop_token_ids=(end,), **drawn)
    (turn,) = llm.generate([prompt], asked)
    text = [*prompt, *turn.outputs[0].token_ids, 5, 6, 7]
    (further,) = llm.generate([text], greedy(8, ignore_eos=True))
    assert further.num_cached_tokens == cached
    if exact or policy == "dense":
        assert len(text) == 39 + 13 + 3
        (fresh,) = tiny_llm("dense", **CAN).generate([text], greedy(8, ignore_eos=True))
        assert further.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_prepared_programs_are_those_requested_later():
    """The fewest rows and all rows, each with its number of drafts."""
    sizes = tiny_llm(QUEST, **CAN).engine.sizes._replace(rows=(1, 2, 3), drafts=(6, 5, 4))
    keys = engine_keys(sizes.of_rows(0, -1), parse(QUEST), ["sampled"])
    made = [key for key in keys if key.name == "draft_and_verify"]
    assert made == [decode_key("sampled", rows, drafts=d) for rows, d in ((1, 6), (3, 4))]
    assert made[-1] == decode_key("sampled", 3, drafts=sizes.drafts_for(3))


@pytest.mark.parametrize("drafts", [None, 3])
def test_programs_without_drafts_are_compiled_after_those_that_requests_wait_for(
    drafts, monkeypatch
):
    options = {"exact": True, "num_speculative_tokens": drafts, "steps_per_program": 3}
    programs = tiny_llm(QUEST, **CAN, **options).engine.programs
    waited, later = [], []
    monkeypatch.setattr(programs, "compile", lambda keys, _: waited.extend(keys))
    monkeypatch.setattr(programs, "expect", later.extend)
    programs.prepare(["sampled"])
    (rows,) = programs._sizes.rows
    apart = decode_key("sampled", rows, drafts=0)
    assert apart not in waited
    assert (apart in later) == (drafts is None)


def test_requests_are_exact_where_the_engine_is():
    for exact in (False, True):
        with pytest.raises(ValueError, match=rf"exact={not exact}: .* started with exact={exact}"):
            engine(QUEST, exact=exact).generate([PROMPTS[0]], greedy(3, exact=not exact))
    # dense attention already is exact
    engine("dense", exact=False).generate([PROMPTS[0]], greedy(3, exact=True))


def test_rounds_are_packed():
    """One row drafted two tokens and kept one; the other drafted none."""
    shares = StepStats(jnp.array([[[0.2, 0.0]], [[0.4, 0.0]]]), jnp.array([[[0.5, 0.0]]] * 2))
    made = VerificationRound(
        tokens=jnp.array([[7, 5], [8, 0], [9, 0]], jnp.int32),
        logprobs=jnp.array([[-1.0, -3.0], [-2.0, 0.0], [0.0, 0.0]]),
        counts=jnp.array([2, 1], jnp.int32),
        drafted=jnp.array([2, 0], jnp.int32),
        stats=shares,
        overflow=jnp.zeros(2, jnp.bool_),
        logits=jnp.zeros((3, 2, 4)),
    )
    packed = np.asarray(pack_round(made, 1, layer_stats=True, top=False))
    first, second = (unpack(packed[:, row], 1, layer_stats=True) for row in range(2))
    assert (first.ids, first.logprobs, first.drafted) == ([7, 8], [-1.0, -2.0], 2)
    np.testing.assert_allclose(first.shares, [[0.3, 0.5]] * 2, rtol=1e-6)
    # only the verification, which attends to everything, chose its token
    assert (second.ids, second.logprobs, second.drafted) == ([5], [-3.0], 0)
    assert second.layers is not None
    assert second.shares.tolist() == [[1.0, 1.0]] and second.layers.tolist() == [[[1.0], [1.0]]]
