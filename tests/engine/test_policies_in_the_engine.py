"""Serves every expression of the table: what a request gets must not depend on the others."""

import pytest
from policy_table import ALIKE, TABLE, outermost
from serving import PAGE, assert_at_rest, bits, greedy, tiny_llm
from tiny import random_prompts

import jsparse
from jsparse.policies.expressions import parse
from jsparse.policy import Policy


def servable(policy: Policy) -> bool:
    """Whether the policy keeps all K and V in pages that look the same to all heads."""
    return not policy.evicts and policy.after_prompt is None and policy.offload is None


SERVED = [expression for expression in TABLE if servable(parse(expression))]
REFUSED = [expression for expression in TABLE if not servable(parse(expression))]
# of each method the first by default; combinators and oracles are like what they are made of
SLOW = {*ALIKE, "keep", "dense_layers", "retrieval_heads", "all_pages", "oracle_top_k"}
FIRST = {outermost(expression): expression for expression in reversed(SERVED)}
DEFAULT = {expression for name, expression in FIRST.items() if name not in SLOW}
*PROMPTS, BEGINNING = random_prompts((9, 21, 3, 41, 16, 5, 32), seed=5)
TOKENS = (10, 5, 14, 9, 6, 11)


@pytest.mark.parametrize(
    "expression",
    [e if e in DEFAULT else pytest.param(e, marks=pytest.mark.slow) for e in SERVED],
)
def test_a_request_gets_in_a_crowd_what_it_gets_alone(expression):
    """Bit for bit, in another slot, over other pages, with what others have read of its prompt; and
    the tokens of `generate`.
    """
    llm = tiny_llm(expression, max_num_seqs=3)
    prompts = [*PROMPTS, BEGINNING + PROMPTS[0], BEGINNING + PROMPTS[5]]
    options = [greedy(tokens) for tokens in (*TOKENS, 7, 8)]
    crowd = llm.generate(prompts, options)
    assert_at_rest(llm)
    shares = parse(expression).shares == "pages"
    for nth in (1, 3, 6, 7):
        (alone,) = llm.generate([prompts[nth]], [options[nth]])
        assert bits(alone) == bits(crowd[nth]), nth
        # a request of its own has read all this before
        window = llm.engine.policy.window
        assert (alone.num_cached_tokens > 0) == (
            shares and len(prompts[nth]) - max(1, window) >= 16
        )
    for nth in (1, 3, 7):
        made = jsparse.generate(
            llm.engine.params,
            prompts[nth],
            policy=llm.engine.policy,
            sampling=options[nth],
            page_size=PAGE,
            max_length=96,
        )
        assert crowd[nth].outputs[0].token_ids == made.token_ids, nth
    assert_at_rest(llm)


@pytest.mark.parametrize("expression", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(expression):
    with pytest.raises(ValueError, match=r"policy=.*must keep all K and V in the engine's pages"):
        tiny_llm(expression)
