"""Sends random requests to an engine, aborts some, and compares the others with `generate`.

JSPARSE_SOAK is their number, 200 if it is not set.
"""

import os
from collections import Counter
from random import Random

import pytest

import jsparse
from jsparse.engine import sizing
from tests.support.serving import PAGE, asked, assert_at_rest, greedy, tiny_llm
from tests.support.tiny import random_prompts

REQUESTS = int(os.environ.get("JSPARSE_SOAK", "200"))
MODEL_LEN = 96
# prompts are few, so that `generate` runs few times, and some begin alike
BEGINNING, *ENDS = random_prompts((32, 3, 9, 17, 21, 40), seed=9)
PROMPTS = [*ENDS, *(BEGINNING + end for end in ENDS[:3])]
SIZES = (4, 18, 43)
SAMPLING = [
    greedy(size, logprobs=None, ignore_eos=True, **drawn)
    for size in SIZES
    for drawn in ({}, {"temperature": 0.9, "seed": 2**63 - 1})
]
# of 17 groups of pages four answers want eight each
SCARCE = {"kv_cache_tokens": 136, "swap_space": 1}
EXACT = {"exact": True, "num_speculative_tokens": 3, "batch_invariant": False}


def soak(llm, rng):
    """Runs REQUESTS random requests; returns what each was and got, None where it was aborted."""
    engine, waiting, got = llm.engine, {}, {}
    left = REQUESTS
    while left or not engine.idle:
        while left and len(waiting) < rng.randint(1, 10):
            left -= 1
            name = f"{left}"
            case = rng.randrange(len(PROMPTS)), rng.randrange(len(SAMPLING))
            engine.add(asked(llm, PROMPTS[case[0]], SAMPLING[case[1]]), request_id=name)
            waiting[name] = case
        for state in engine.step():
            if state.finished and state.request_id in waiting:
                (answer,) = state.output().outputs
                got[state.request_id] = waiting.pop(state.request_id), answer.token_ids
        if waiting and rng.random() < 0.05:
            name = rng.choice([*waiting])
            engine.abort(name)
            got[name] = waiting.pop(name), None
    assert not waiting
    return got.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "options"),
    [
        ("offloaded(quest(budget=16), tail=8)", {"max_num_seqs": 2, "ladder": ((0, 16),)}),
        ("quest(budget=16)", SCARCE),
        ("snapkv(budget=8, window=4, pool=3)", SCARCE),
        ("quest(budget=16)", EXACT),
    ],
    ids=["offloaded", "swapped out", "swapped out, compressed", "exact"],
)
def test_answers_are_those_of_generate_in_any_company(expression, options, monkeypatch):
    monkeypatch.setattr(sizing, "GROWTH_TOKENS", 8)  # answers grow by a page
    llm, rng = tiny_llm(expression, **options), Random(0)
    got = soak(llm, rng)
    ends = Counter("aborted" if tokens is None else "ended" for _, tokens in got)
    assert sum(ends.values()) == REQUESTS and ends["ended"] > ends["aborted"] > 0
    alone = {}
    for (prompt, nth), tokens in got:
        if tokens is None:
            continue
        if (prompt, nth) not in alone:
            out = jsparse.generate(
                llm.engine.params,
                PROMPTS[prompt],
                policy="dense" if "exact" in options else llm.engine.policy,
                sampling=SAMPLING[nth],
                page_size=PAGE,
                max_length=MODEL_LEN,
            )
            alone[prompt, nth] = out.token_ids
        assert tokens == alone[prompt, nth]
    assert_at_rest(llm)
    assert (llm.engine.counters.parked_answers > 0) == ("swap_space" in options)
