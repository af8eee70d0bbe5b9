"""Tests an engine whose K and V are in 8 bits against requests alone and other engines."""

import dataclasses

import pytest

from jsparse.models.checkpoint import spread
from tests.engine import test_exact as drafting
from tests.engine import test_swapping as swapping
from tests.engine.test_swapping import sequences_grow_by_a_page  # noqa: F401 - used below
from tests.support.marks import slow_except
from tests.support.serving import assert_at_rest, bits, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

QUEST, SNAPKV = "quest(budget=16)", "snapkv(budget=8, window=4, pool=3)"


def model(**sizes):
    return dataclasses.replace(tiny_params(**sizes), kv_cache_dtype="int8")


@pytest.mark.parametrize("expression", slow_except(["dense", QUEST, SNAPKV], "dense"))
def test_found_prefixes_keep_the_bits(expression):
    llm = tiny_llm(expression, params=model(num_layers=2))
    (prompt,) = random_prompts((60,), seed=3)
    (first,), (again,) = (llm.generate([prompt], greedy(10)) for _ in range(2))
    assert bits(first) == bits(again)
    assert (first.num_cached_tokens, again.num_cached_tokens > 30) == (0, True)
    assert_at_rest(llm)


@pytest.mark.slow
@pytest.mark.usefixtures("sequences_grow_by_a_page")
@pytest.mark.parametrize("expression", [QUEST, SNAPKV])
def test_swapping_keeps_the_bits(expression):
    llm = tiny_llm(expression, params=model(), **swapping.SCARCE)
    outs, swapped, swapped_in = swapping.moves_of(llm, swapping.PROMPTS)
    assert len(swapped) == len(swapped_in) > 0
    for prompt, out in zip(swapping.PROMPTS, outs, strict=True):
        (alone,), moved, _ = swapping.moves_of(llm, [prompt])
        assert not moved
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
def test_heads_on_two_devices_match_one_device():
    """Up to numbers halfway between two integers, which may be rounded differently."""
    params, prompts = model(num_layers=2), random_prompts((9, 41), seed=5)
    ours, theirs = (
        tiny_llm("twilight(all_pages(), p=0.6)", params=each).generate(prompts, greedy(2))
        for each in (spread(params, 2), params)
    )
    for own, other in zip(ours, theirs, strict=True):
        own, other = own.outputs[0], other.outputs[0]
        assert own.token_ids[0] == other.token_ids[0]
        assert own.token_logprobs[0] == pytest.approx(other.token_logprobs[0], abs=0.05)
