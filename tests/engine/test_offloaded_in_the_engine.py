"""Tests policies with K and V in host memory, beside test_policies_in_the_engine.py."""

import re
from dataclasses import replace
from functools import partial

import jax
import pytest

import jsparse
from jsparse.engine import sizing
from jsparse.engine.llm import LLM
from jsparse.host_memory.pool import HostPool
from jsparse.machine import memory
from jsparse.runtime import host_store
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.serving import PAGE, assert_at_rest, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

QUEST = "offloaded(quest(budget=16), tail=8)"
# heads resident on the device; prefetched rows; state replayed from K and V
OTHERS = (
    "offloaded(retrieval_heads(quest(budget=16), ((0, 1), (1, 0))), tail=8)",
    "offloaded(double_sparsity(budget=8), tail=8, reads='gather')",
    "offloaded(lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2), tail=16)",
)
BEGINNING, *PROMPTS = random_prompts((32, 9, 21, 3), seed=7)
# the tail is copied to host memory up to three times, at different times for different rows
ASKED = [(PROMPTS[0], 30), (BEGINNING + PROMPTS[1], 11), (PROMPTS[2], 25)]


@shared
def served(expression, kv_cache_dtype="auto"):
    """An engine of two slots, and the results of all requests in one batch."""
    params = replace(tiny_params(num_layers=2), kv_cache_dtype=kv_cache_dtype)
    llm = tiny_llm(expression, params=params, max_num_seqs=2, ladder=((0, 16),))
    outs = llm.generate([ids for ids, _ in ASKED], [greedy(tokens) for _, tokens in ASKED])
    assert_at_rest(llm)
    return llm, outs


def generated(llm, out):
    """The tokens of generate, in a session with K and V in host memory."""
    return jsparse.generate(
        llm.engine.params,
        out.prompt_token_ids,
        policy=llm.engine.policy,
        sampling=greedy(len(out.outputs[0].token_ids)),
        page_size=PAGE,
        max_length=96,
    ).token_ids


@pytest.mark.parametrize("expression", slow_except([QUEST, *OTHERS]))
def test_tail_is_copied_out_before_it_is_overwritten(expression):
    llm, (out, *_) = served(expression)
    assert out.outputs[0].token_ids == generated(llm, out)


@pytest.mark.slow
@pytest.mark.parametrize("expression", [QUEST, OTHERS[0]])
def test_tails_in_8_bits_are_copied_out(expression):
    llm, (out, *_) = served(expression, "int8")
    assert out.outputs[0].token_ids == generated(llm, out)


@pytest.mark.slow
@pytest.mark.parametrize("expression", [QUEST, *OTHERS])
def test_row_gets_the_tail_of_a_cached_prompt(expression):
    llm, _ = served(expression)
    (out,) = llm.generate([BEGINNING + PROMPTS[2]], greedy(20))
    assert out.num_cached_tokens == (32 if llm.engine.policy.shares else 0)
    assert out.outputs[0].token_ids == generated(llm, out)


def test_device_holds_only_tails_and_resident_heads():
    """Not the pool: of its 25 groups, rows have 12 of all resident heads, and 3 others."""
    llm = tiny_llm(OTHERS[0], max_num_seqs=2)
    runner, spec = llm.engine._runner, llm.engine.spec
    on_host = sum(pages.nbytes for layer in runner._host for pages in layer)
    assert llm.engine.kv_host_bytes == on_host
    for host, pool in zip(runner._host, runner._slots.rows.cache.pools, strict=True):
        assert host.k.shape == host.v.shape == (25 * spec.num_kv_heads, PAGE, spec.head_dim)
        for tail in pool[:2]:
            assert isinstance(tail, HostPool)
            assert tail.host is None
            assert tail.ring.shape[0] == 2 * spec.num_kv_heads * 3
            assert tail.resident is not None
            assert tail.resident.shape[0] == 2 * 12


def test_host_memory_is_counted_for_all_requests_together(monkeypatch):
    llm = tiny_llm(QUEST)
    spec = llm.engine.spec
    group = spec.num_layers * spec.num_kv_heads * host_store.page_bytes(spec)
    monkeypatch.setattr(host_store, "available_host_bytes", lambda: 20 * group + 1)
    make = partial(tiny_llm, QUEST)
    assert make(kv_cache_tokens=19 * PAGE).engine.sizes.num_groups == 20
    assert make(kv_cache_tokens=None, max_num_seqs=2).engine.sizes.num_groups == 16
    assert make(kv_cache_tokens=None, max_num_seqs=1).engine.sizes.num_groups == 13
    numbers = f"take {memory.size(21 * group)} of host memory: must fit in the "
    with pytest.raises(ValueError, match=f"160 tokens {re.escape(numbers)}{20 * group / 1024:.2f}"):
        make(kv_cache_tokens=20 * PAGE)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 1000)
    with pytest.raises(ValueError, match="96 tokens in host memory, tails of 4 rows and the state"):
        make(kv_cache_tokens=96)


def test_gpu_with_few_slots_decodes_all_rows_together(monkeypatch):
    monkeypatch.setattr(sizing, "on_gpu", lambda: True)
    llm = LLM(tiny_params(num_layers=2), QUEST, max_model_len=96, page_size=PAGE, prepare=False)
    sizes = llm.engine.sizes
    assert (sizes.num_slots, sizes.rows, sizes.prefill_rows) == (8, (8,), (1,))
    assert (sizes.steps, sizes.service_rows, sizes.prefix_rows) == (1, 1, 0)


def test_failed_engine_releases_host_memory():
    engine = tiny_llm(QUEST).engine
    pages = engine._runner._host[0].k
    assert engine.programs._given["decode"]["read_only"].host[0].k is pages
    engine._fail(RuntimeError("the device"))
    assert engine._runner._host == ()
    assert not isinstance(engine.programs._given["decode"]["read_only"].host[0].k, jax.Array)
