"""Tests an engine whose K and V are in 8 bits against requests alone and other engines."""

import dataclasses

import jax
import numpy as np
import pytest

from jsparse.models.checkpoint import spread
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity
from jsparse.runtime.session import Session
from tests.engine import test_exact as drafting
from tests.engine import test_host_blocks as host_blocks
from tests.engine.test_host_blocks import sequences_grow_by_a_page  # noqa: F401 - used below
from tests.support.marks import slow_except
from tests.support.serving import assert_at_rest, bits, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

QUEST, SNAPKV = "quest(budget=16)", "snapkv(budget=8, window=4, pool=3)"


def model(**sizes):
    return dataclasses.replace(tiny_params(**sizes), kv_cache_dtype="int8")


@pytest.mark.parametrize("expression", slow_except(["dense", QUEST, SNAPKV], "dense"))
def test_found_prefixes_keep_the_bits(expression):
    llm = tiny_llm(expression, params=model(num_layers=2), ladder=((0, 16),))
    (prompt,) = random_prompts((60,), seed=3)
    (first,), (again,) = (llm.generate([prompt], greedy(10)) for _ in range(2))
    assert bits(first) == bits(again)
    assert (first.num_cached_tokens, again.num_cached_tokens > 30) == (0, True)
    assert_at_rest(llm)


@pytest.mark.slow
@pytest.mark.usefixtures("sequences_grow_by_a_page")
@pytest.mark.parametrize("expression", [QUEST, SNAPKV])
def test_preempted_rows_keep_the_bits(expression):
    llm = tiny_llm(expression, params=model(), **host_blocks.SCARCE)
    outs = llm.generate(host_blocks.PROMPTS, host_blocks.LONG)
    assert llm.engine.counters.preemptions > 0
    assert llm.engine.counters.blocks_in > 0
    for prompt, out in zip(host_blocks.PROMPTS, outs, strict=True):
        (alone,) = llm.generate([prompt], host_blocks.LONG)
        assert bits(alone) == bits(out)


@pytest.mark.slow
def test_drafts_decode_the_text_of_dense_attention_over_8_bits():
    options = {"params": model(), **drafting.CAN}
    dense = tiny_llm("dense", **options)
    drafts = tiny_llm(QUEST, exact=True, num_speculative_tokens=3, **options)
    made = (llm.generate(drafting.ASKED, drafting.OPTIONS) for llm in (dense, drafts))
    ids = ([out.outputs[0].token_ids for out in outs] for outs in made)
    same = [expected == got for expected, got in zip(*ids, strict=True)]
    # a number halfway between two integers may be rounded differently, and tip a token
    assert sum(same) >= len(same) - 1


@pytest.mark.slow
def test_each_device_has_the_reach_of_its_heads():
    """Numbers halfway between two integers may be rounded differently."""
    params, (prompt,) = model(num_layers=2), random_prompts((41,), seed=5)
    pages = []
    for each in (spread(params, 2), params):
        session = Session(each, parse("dense"), capacity.cache_spec(each, [prompt], 4, None, 8))
        session.prefill([prompt])
        layers = jax.device_get(session.prefilled.cache.layers)
        pages.append([layer.k.values.reshape(-1, 16).astype(int) for layer in layers])
    for ours, theirs in zip(*pages, strict=True):
        apart = np.abs(ours - theirs)
        assert apart.max() <= 1
        assert apart.mean() < 1e-3
    reach = np.asarray(params.constants["key_reach"])
    assert (np.abs(reach[:, 0] / reach[:, 1] - 1) > 0.05).any()
