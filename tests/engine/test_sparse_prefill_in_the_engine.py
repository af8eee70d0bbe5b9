"""Tests an engine that prefills sparsely: a cached prefix must not change the choice."""

from types import SimpleNamespace

import pytest

import jsparse
from jsparse.server.engines import describe
from tests.support.serving import PAGE, assert_at_rest, bits, greedy, tiny_llm
from tests.support.tiny import random_prompts

HALF = "xattention(threshold=0.5)"
LONG, OTHER = random_prompts((300, 150), seed=9)
ROOM = {"max_model_len": 400, "kv_cache_tokens": 1600, "ladder": None}


def llm_of(policy, prefill, **options):
    return tiny_llm(policy, prefill=prefill, **ROOM, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_cached_prefix_gives_the_bits_of_a_prompt_alone(rows):
    llm = llm_of("quest(budget=32)", HALF, max_num_seqs=2)
    assert llm.engine.sizes.full_sizes == [128]  # whole blocks
    fresh = llm.generate([LONG, OTHER][:rows], greedy(6))[0]
    (again,) = llm.generate([LONG], greedy(6))
    assert (fresh.num_cached_tokens, again.num_cached_tokens) == (0, 256)
    assert bits(again) == bits(fresh)
    # a longer prompt shares whole blocks only
    (longer,) = llm.generate([LONG + OTHER[:60]], greedy(6))
    assert longer.num_cached_tokens == 256
    made = jsparse.generate(
        llm.engine.params,
        LONG + OTHER[:60],
        policy="quest(budget=32)",
        prefill=HALF,
        sampling=greedy(6),
        page_size=PAGE,
        max_length=400,
    )
    assert longer.outputs[0].token_ids == made.token_ids
    assert_at_rest(llm)
    name, sentence = describe(SimpleNamespace(engine=llm.engine))
    assert name == "sparse_prefill(quest(budget=32), method='xattention(threshold=0.5, stride=16)')"
    assert sentence.endswith(
        "prefill to the blocks that xattention(threshold=0.5, stride=16) chooses."
    )


def test_generated_tokens_are_not_shared_since_a_prompt_would_give_others():
    shared = {}
    for prefill in ("dense", "streaming(sink=0, recent=1)"):
        llm = tiny_llm(
            "dense", prefill=prefill, batch_invariant=False, **ROOM | {"ladder": [(0, 128)]}
        )
        (out,) = llm.generate([OTHER[:120]], greedy(20))
        ids = out.outputs[0].token_ids
        assert ids.index(ids[-1]) > 10  # a stop, unlike a length, shares what was generated
        llm.generate([OTHER[:120]], greedy(40, stop_token_ids=[ids[-1]]))
        (further,) = llm.generate([OTHER[:120] + ids], greedy(1))
        shared[prefill] = further.num_cached_tokens
    assert shared == {"dense": 128, "streaming(sink=0, recent=1)": 0}


def test_unknown_method_is_refused_by_name():
    with pytest.raises(ValueError, match="prefill='xatention': unknown method"):
        llm_of("dense", "xatention")
