"""Tests that a request's result on a GPU does not depend on the requests beside it."""

import time
from dataclasses import replace
from functools import cache
from itertools import cycle

import jax.numpy as jnp
import pytest

import jsparse
from bench.lib.shapes import SMOLLM2
from jsparse.engine.latency_model import LatencyModel
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import random_weights
from tests.support.serving import bits
from tests.support.tiny import random_prompts

pytestmark = pytest.mark.gpu
LENGTHS = (700, 33, 1500, 512, 90, 1024, 1300, 260, 5, 801)


@cache
def model() -> Params:
    """SmolLM2's shape with a few layers and random weights in bfloat16."""
    config = replace(SMOLLM2, num_layers=4)
    return Params(random_weights(config, jnp.bfloat16), config, None, {}, "random")


@pytest.mark.parametrize(
    "policy",
    [
        "dense",
        "quest(budget=256)",
        "twilight(quest(budget=512), p=0.9)",
        "lfps(budget=0.1)",
        "lychee_cluster(budget=256)",
    ],
)
def test_request_in_a_batch_matches_the_request_alone(policy):
    """Bit for bit: greedy rows beside sampled ones, and prompts with cached prefixes."""
    llm = jsparse.LLM(
        *(model(), policy),
        max_num_seqs=4,
        max_model_len=2048,
        kv_cache_tokens=8192,
        steps_per_program=1,
        decode_rows=[4],
        batch_invariant=True,
        prepare=False,
    )
    prompts = random_prompts(LENGTHS, seed=5)
    options = [
        jsparse.SamplingParams(
            temperature=0.8 * (nth % 3 == 2), max_tokens=40 + nth, logprobs=0, seed=nth
        )
        for nth in range(len(prompts))
    ]
    crowd = llm.generate(prompts, options)
    for nth in (0, 1, 2, 5, 6, 9):
        (alone,) = llm.generate([prompts[nth]], [options[nth]])
        assert bits(alone) == bits(crowd[nth]), nth


@pytest.mark.parametrize("policy", ["verified(budget=256)", "streaming(sink=4, recent=252)"])
def test_verified_drafts_are_dense_attentions(policy, monkeypatch):
    """But for near ties, in programs with and without drafts."""
    prompts = random_prompts((700, 1500, 90, 1024), seed=5)
    options = {"max_num_seqs": 4, "max_model_len": 2048, "kv_cache_tokens": 8192}
    sampling = [
        jsparse.SamplingParams(temperature=0, max_tokens=90 + nth, logprobs=0, ignore_eos=True)
        for nth in range(len(prompts))
    ]
    dense, llm = (
        jsparse.LLM(model(), used, decode_rows=[4], exact=exact, **options)
        for used, exact in (("dense", False), (policy, True))
    )
    expected, numbers = dense.generate(prompts, sampling), cycle((4, 0, 0, 2))
    while llm.engine.programs.compiling:
        time.sleep(0.1)
    monkeypatch.setattr(LatencyModel, "drafts", lambda self, *_, **__: next(numbers))
    for nth, out in enumerate(llm.generate(prompts, sampling)):
        (own,), (its,) = out.outputs, expected[nth].outputs
        same = [a == b for a, b in zip(own.token_ids, its.token_ids, strict=True)]
        if not all(same):
            at = same.index(False)
            gap = own.token_logprobs[at] - its.token_logprobs[at]
            assert abs(gap) < 0.1, (nth, at, gap)
    assert llm.engine.counters.draft_tokens > 0


@pytest.mark.parametrize("policy", ["dense", "quest(budget=256)", "snapkv(budget=256)"])
def test_preempted_sequence_continues_with_the_same_bits(policy):
    """K, V and all row state return from host memory, as in an engine with room for all."""
    options = {"max_num_seqs": 4, "max_model_len": 2048, "batch_invariant": True, "prepare": False}
    greedy = jsparse.SamplingParams(temperature=0, max_tokens=700, logprobs=0, ignore_eos=True)
    prompts = random_prompts((700, 33, 512, 640), seed=5)
    scarce = jsparse.LLM(model(), policy, kv_cache_tokens=2560, kv_offloading_size=1.0, **options)
    outs = scarce.generate(prompts, greedy)
    assert scarce.engine.counters.preemptions > 0
    roomy = jsparse.LLM(model(), policy, kv_cache_tokens=8192, **options)
    assert [bits(out) for out in outs] == [bits(out) for out in roomy.generate(prompts, greedy)]


@pytest.mark.parametrize("policy", ["offloaded(quest(budget=256))", "offloaded(lfps(budget=0.1))"])
def test_k_and_v_in_host_memory_are_those_of_the_row(policy):
    """Alone and in a batch, also after a cached prefix."""
    options = {"max_num_seqs": 4, "max_model_len": 2048, "batch_invariant": True, "prepare": False}
    llm = jsparse.LLM(model(), policy, **options)
    beginning, *others = random_prompts((1024, 700, 33, 260, 512), seed=7)
    prompts = [beginning + others[0], others[1], beginning + others[2], others[3]]
    greedy = jsparse.SamplingParams(temperature=0, max_tokens=300, logprobs=0, ignore_eos=True)
    crowd = llm.generate(prompts, greedy)
    for ids, out in zip(prompts, crowd, strict=True):
        (alone,) = llm.generate([ids], greedy)
        assert bits(alone) == bits(out)
