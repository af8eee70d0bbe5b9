"""Tests methods built from a page summary and a score, against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from examples.my_quest import bounds, greatest_logit, my_quest
from jsparse.extend import Policy, builder, page_policy
from tests.support.one_layer import OneLayer
from tests.support.programs import shared
from tests.support.serving import greedy, tiny_llm
from tests.support.tiny import (
    engine_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
)

PAGE = 8
PROMPTS = random_prompts((37, 9))
FORCED = random_tokens(2, 12)


# In addition to the Quest of docs/own_policy.md


def mean_key(keys, held):
    """Keeps the mean of the valid keys."""
    return jnp.mean(keys, axis=0, where=held[:, None])


@builder
def my_norms(budget: int = 1024) -> Policy:
    """Ranks pages by their longest key, and equal pages by their number of tokens."""

    def summarise(keys, held):
        return {"norm": jnp.linalg.norm(keys, axis=-1).max(), "tokens": held.sum()}

    def score(q, page):
        return jnp.where(page["tokens"] > 0, page["norm"], jnp.nan)

    return page_policy(summarise, score, budget)


@shared
def logits(policy, length=None):
    return engine_logits(
        tiny_params(num_layers=2), policy, PROMPTS, FORCED, page_size=PAGE, max_length=length
    )


def test_gives_the_bits_of_the_built_in_method():
    built_in = logits("quest(budget=16, slack=1.0, group='max')")
    np.testing.assert_array_equal(logits(my_quest(16)), built_in)


def test_page_of_the_longest_key_is_kept():
    layer = OneLayer(my_norms(16), length=45)
    chosen = layer.select()
    norms = np.linalg.norm(layer.k, axis=-1)[..., :40].reshape(2, 2, 5, PAGE).max(-1)
    for at in np.ndindex(2, 2):
        assert chosen.ids[at].tolist() == [norms[at].argmax(), 5]


def test_empty_slots_do_not_count():
    """The summary of the page being filled covers only its tokens."""
    own, norms = (OneLayer(policy(16), length=41) for policy in (my_quest, my_norms))
    low, high = (np.asarray(x).reshape(2, 2, -1, 16) for x in own.state[0])
    tokens = np.asarray(norms.state[0]["tokens"]).reshape(2, 2, -1)
    for page in range(6):
        keys = own.k[:, :, page * PAGE : (page + 1) * PAGE]
        np.testing.assert_array_equal(low[:, :, page], keys.min(axis=2))
        np.testing.assert_array_equal(high[:, :, page], keys.max(axis=2))
        assert (tokens[:, :, page] == keys.shape[2]).all()


@pytest.mark.slow
def test_requests_share_prefixes_and_set_budgets():
    """The second finds the first's pages and matches generate."""
    params, prompt = tiny_params(num_layers=2), PROMPTS[0]
    llm = tiny_llm(my_quest(24), per_request=["budget"])
    first, out = (llm.generate([prompt], greedy(6, policy={"budget": n}))[0] for n in (24, 8))
    assert out.num_cached_tokens > 0 == first.num_cached_tokens
    alone = jsparse.generate(
        params, prompt, policy=my_quest(8), max_new_tokens=6, page_size=PAGE, eos_token_id=[]
    )
    assert list(out.outputs[0].token_ids) == list(alone.token_ids)


def test_builder_gives_one_policy_with_a_name():
    assert my_quest(16) is my_quest(budget=16)
    assert my_quest(16).name == "my_quest(budget=16)"
    plain = page_policy(bounds, greatest_logit, 8)
    assert plain.name == "page_policy(bounds, greatest_logit, budget=8)"
    assert (plain.shares, plain.reads, set(plain.per_row)) == ("pages", 0, {"budget"})


def test_summaries_keep_their_dtypes_and_belong_to_pages():
    spec = spec_of(tiny_params(num_layers=2), 3)._replace(pool_pages=7)
    kept = jax.eval_shape(lambda: my_norms(8).init(spec))
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(kept)] == [
        ((7,), jnp.float32),
        ((7,), jnp.int32),
    ] * 2


def test_page_of_score_nan_is_left_out_and_the_newest_never():
    layer = OneLayer(page_policy(bounds, lambda q, page: jnp.nan * page[0][0], 32), length=45)
    chosen = layer.select()
    assert chosen.count.tolist() == [[1, 1], [1, 1]]
    assert (chosen.ids[..., 0] == 5).all()


def test_wrong_calls_are_refused():
    for budget in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"budget={budget}: must be an integer of at least 1"):
            page_policy(bounds, greatest_logit, budget)

    def logits(q, center):
        return q @ center

    layer = OneLayer(page_policy(mean_key, logits, 16), length=41)
    with pytest.raises(
        ValueError, match=r"^score=logits: must return one number, not float32\[3\]"
    ):
        layer.select()
