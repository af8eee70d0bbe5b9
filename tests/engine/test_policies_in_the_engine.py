"""Serves every expression of the table: results must not depend on the other requests."""

import numpy as np
import pytest

import jsparse
from jsparse.engine.options import EngineOptions
from jsparse.engine.sizing import bound, cache_spec, evicted_pages
from jsparse.policies.expressions import parse
from jsparse.policy import Eviction
from tests.support.marks import slow_except
from tests.support.policy_table import TABLE
from tests.support.programs import shared
from tests.support.serving import PAGE, assert_at_rest, bits, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params, with_nan

# by default: state replayed from K and V, heads of different lengths, and K and V in host memory
# with state in pages; test_engine.py serves dense attention and lychee_decode, with its sets and
# corrections
OFFLOADED = "offloaded(quest(budget=16), tail=8)"
HARD_KV = "hard_kv(budget=8, floor=7, cap=12, period=6, window=4, sink=2)"
DEFAULT = (
    "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)",
    HARD_KV,
    OFFLOADED,
)
*PROMPTS, BEGINNING = random_prompts((9, 21, 3, 41, 16, 5, 32), seed=5)


OPTIONS = [greedy(tokens) for tokens in (10, 5, 14, 9, 6, 11, 7, 8)]
ASKED = [*PROMPTS, BEGINNING + PROMPTS[0], BEGINNING + PROMPTS[5]]


@shared
def served(expression):
    """An engine, and the results of all requests in one batch."""
    # a compressed prompt needs both copies for a while
    room = {"kv_cache_tokens": 384} if parse(expression).evicts else {}
    llm = tiny_llm(expression, max_num_seqs=3, ladder=((0, 16),), **room)
    crowd = llm.generate(ASKED, OPTIONS)
    assert_at_rest(llm)
    return llm, crowd


# for offloaded policies test_offloaded_in_the_engine checks it
@pytest.mark.parametrize("expression", slow_except(TABLE, HARD_KV))
def test_request_in_a_batch_matches_the_request_alone(expression):
    """Bit for bit, in another slot, over other pages, and with a cached prefix."""
    llm, crowd = served(expression)
    shares = parse(expression).shares is not None
    for nth in (1, 3, 6, 7):
        (alone,) = llm.generate([ASKED[nth]], [OPTIONS[nth]])
        assert bits(alone) == bits(crowd[nth]), nth
        # a separate request has cached all of this
        window = llm.engine.policy.window
        assert (alone.num_cached_tokens > 0) == (shares and len(ASKED[nth]) - max(1, window) >= 16)
    assert_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize("expression", TABLE)
def test_tokens_are_those_of_generate(expression):
    """By default test_engine.py tests it."""
    llm, crowd = served(expression)
    made = jsparse.generate(
        llm.engine.params,
        ASKED[7],
        policy=llm.engine.policy,
        sampling=OPTIONS[7],
        page_size=PAGE,
        max_length=96,
    )
    assert crowd[7].outputs[0].token_ids == made.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("expression", DEFAULT)
def test_freed_pages_and_rows_forget_nan(expression):
    """Requests get the same tokens in memory that held NaN before."""
    usual, _ = served(expression)
    params = with_nan(usual.engine.params, 7)
    options = {"max_num_seqs": 3, "ladder": ((0, 16),), "enable_prefix_caching": False}
    room = {"kv_cache_tokens": 384} if parse(expression).evicts else {}
    llm = tiny_llm(expression, params=params, **options, **room)
    good = [[5, 8, 13, 21] * 5, [34, 55, 89]]
    expected = [bits(out) for out in llm.generate(good, greedy(9))]
    broken = llm.generate([[7] * 41] * 4, greedy(9))
    assert {out.outputs[0].finish_reason for out in broken} == {"error"}
    assert [bits(out) for out in llm.generate(good, greedy(9))] == expected
    assert_at_rest(llm)


def test_rows_are_compressed_by_their_own_age():
    """After their prompts, and then every six of their own steps."""
    llm, _ = served(HARD_KV)
    before = llm.engine.counters.compressed_rows
    llm.generate(PROMPTS[:3], [greedy(tokens) for tokens in (6, 13, 14)])
    assert llm.engine.counters.compressed_rows - before == 3 + 0 + 2 + 2


def test_heads_hold_no_more_than_their_rows_allocated():
    """Even if a policy drops too little: the rest keeps the groups of the prefill."""
    policy = parse(HARD_KV)
    assert policy.eviction is not None
    options = EngineOptions(max_num_seqs=1, max_model_len=96, page_size=PAGE)
    rows = cache_spec(tiny_params(), options)
    wide = policy._replace(eviction=policy.eviction._replace(max_length=lambda prompt, new: 128))
    assert (bound(wide)(41, 7), evicted_pages(wide, rows, 96)) == (48, 12)
    late = policy._replace(eviction=Eviction(None, lambda prompt, new: 24))
    assert (bound(late)(41, 7), evicted_pages(late, rows, 96)) == (48, rows.num_pages)
    assert (bound(policy)(41, 7), evicted_pages(policy, rows, 96)) == (18, 3)


@shared
def of_few_rows(expression, rows):
    """The results of four requests in an engine with programs of these numbers of rows."""
    llm = tiny_llm(expression, decode_rows=rows)
    outs = llm.generate(PROMPTS[:4], [greedy(tokens) for tokens in (20, 16, 5, 6)])
    assert_at_rest(llm)
    made = {key.size for key in llm.engine.programs._made if key.name == "decode"}
    assert made == {(n,) for n in rows}
    return outs


@pytest.mark.parametrize("expression", slow_except(["dense", "lfps(budget=0.5)"]))
def test_few_rows_run_in_programs_of_few_rows(expression):
    """The state of rows and pages stays correct when the number of rows rises or falls."""
    made = of_few_rows(expression, (2, 4)), of_few_rows(expression, (4,))
    for few, all_rows in zip(*made, strict=True):
        ours, theirs = few.outputs[0], all_rows.outputs[0]
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(
            ours.token_logprobs or [], theirs.token_logprobs or [], atol=1e-5
        )
