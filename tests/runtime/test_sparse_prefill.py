"""Tests prompts that are prefilled sparsely, in sessions and through every interface of them."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import read_slots
from jsparse.models.checkpoint import spread
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from jsparse.policies.prefill_methods import as_method
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policy import PrefillMethod
from jsparse.runtime import capacity, prompt_attention
from jsparse.runtime.chunk_attention import chunk_tokens
from jsparse.runtime.session import Session
from tests.kernels.cases.block_sparse_prefill import Case
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

LENGTHS, STEPS = (330, 140), 3
HALF = "xattention(threshold=0.5)"


@functools.cache
def logits(prefill, policy="dense", **options):
    """The logits of tokens after prompts prefilled by a method."""
    prompts, forced = random_prompts(LENGTHS), random_tokens(len(LENGTHS), STEPS)
    policy = with_prefill(policy, prefill)
    return engine_logits(tiny_params(), policy, prompts, forced, **options)


def test_all_blocks_give_dense_prefill():
    assert_close(logits("xattention(threshold=1)", chunk=128), logits("dense", chunk=128))


def test_chunks_are_whole_blocks():
    """A block is 128 tokens; dense chunks of such a short prompt are shorter."""
    spec = capacity.spec_of(tiny_params(), 1, 512, page_size=16)
    method = as_method(HALF)
    assert chunk_tokens(spec, method) % 128 == 0 != chunk_tokens(spec) % 128


def test_fewer_blocks_change_what_follows_longer_prompts():
    few, dense = logits("streaming(sink=0, recent=1)", chunk=128), logits("dense", chunk=128)
    assert np.abs(few - dense)[:, 0].max() > 0.1


@pytest.mark.parametrize(
    "prefill",
    [
        HALF,
        pytest.param(
            "vertical_slash(sink=0, recent=1, vertical=128, slash=0)", marks=pytest.mark.slow
        ),
    ],
)
def test_choice_does_not_depend_on_the_size_of_chunks(prefill):
    one = logits(prefill, chunk=512)
    assert_close(logits(prefill, chunk=128), one)
    assert np.abs(one - logits("dense", chunk=128)).max() > 0.1


@pytest.mark.parametrize("refusal", [None, "not here"])
def test_dense_prefill_takes_the_kernel_where_it_runs(refusal, monkeypatch):
    """Both ways attend to everything; k and v of the chunk are the cache's newest."""
    q, kv, valid, chosen = Case("ragged").build()
    slots = (kv.lengths - valid[:, None])[..., None] + np.arange(q.shape[1])
    k, v = (read_slots(pool, kv, slots).swapaxes(1, 2) for pool in (kv.k, kv.v))
    ran = []
    monkeypatch.setattr(prompt_attention, "not_mosaic", lambda q, kv: refusal)
    monkeypatch.setattr(
        prompt_attention,
        "block_sparse_prefill",
        lambda *given: ran.append(1) or block_sparse_prefill(*given),
    )
    got = jax.jit(partial(prompt_attention.attend_prompt, None))(q, k, v, kv, valid)
    want = block_sparse_prefill(q, kv, valid, jnp.ones_like(chosen))
    assert len(ran) == (refusal is None)
    for row, own in enumerate(valid):
        np.testing.assert_allclose(got[row, :own], want[row, :own], atol=2e-5)


def nothing(view):
    return ()


def no_block(scores, view):
    return jnp.zeros((view.q.shape[0], view.q.shape[2], *view.num_blocks), jnp.bool_)


def too_few(scores, view):
    return no_block(scores, view)[..., 1:]


def test_own_method_always_keeps_the_blocks_of_its_queries():
    own = PrefillMethod(nothing, no_block, "own blocks")
    assert with_prefill("quest", own) is with_prefill("quest", own)
    others = [PrefillMethod(nothing, choose) for choose in (no_block, too_few, no_block)]
    first, second, third = (with_prefill("quest", other) for other in others)
    assert first.prefill_method != second.prefill_method
    assert first is third
    assert str(second) == f"sparse_prefill({jsparse.quest()}, 'too_few')"
    got = logits(own, chunk=128)
    assert_close(got, logits("streaming(sink=0, recent=1)", chunk=128))


def test_choice_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"choose of narrow must return a mask of \(2, 4, 4, 4\)"):
        logits(PrefillMethod(nothing, too_few, "narrow"), chunk=512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["snapkv(budget=64)", "kvzip(budget=64)", "offloaded(quest(budget=64), tail=64)"]
)
def test_policies_decode_after_it(policy):
    dense = logits("dense", policy)
    assert_close(logits("xattention(threshold=1)", policy), dense)
    sparse = logits(HALF, policy)
    assert np.isfinite(sparse).all() and np.abs(sparse - dense).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [HALF, "vertical_slash(recent=1, vertical=128, slash=0)"])
def test_ranks_choose_for_their_own_heads(prefill):
    whole = tiny_params(num_layers=2)
    made = [
        jsparse.generate(
            params,
            random_prompts(LENGTHS),
            prefill=prefill,
            max_new_tokens=8,
            eos_token_id=(),
            logprobs=True,
        )
        for params in (whole, spread(whole, 2))
    ]
    for one, two in zip(*made, strict=True):
        assert one.token_ids == two.token_ids
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_second_turn_starts_within_a_block():
    """At full choice it equals dense prefill of both turns."""
    first, second = random_prompts((170, 90), seed=4)
    spec = capacity.cache_spec(tiny_params(), [first + second], 8, None, 16)
    found = []
    for prefill in ("dense", "xattention(threshold=1)", HALF, "vertical_slash(recent=1)"):
        session = Session(tiny_params(), with_prefill("dense", prefill), spec, resumable=True)
        session.prefill([first])
        session.prefill([second])
        found.append(np.asarray(session.prefilled.logits))
    assert_close(found[1], found[0])
    assert np.isfinite(found).all()


def test_new_user_finds_it_in_generate_and_conversations():
    params, (prompt, _) = tiny_params(), random_prompts(LENGTHS)
    out = jsparse.generate(params, prompt, prefill=HALF, max_new_tokens=2, eos_token_id=[])
    assert out.stats.policy.startswith("sparse_prefill(policy=dense(), method='xattention(")
    with pytest.raises(ValueError, match="prefill='xatention': unknown method"):
        jsparse.generate(params, prompt, prefill="xatention")
    with pytest.raises(ValueError, match="prefill='fast': unknown method"):
        jsparse.Conversation(params, prefill="fast")
    with pytest.raises(ValueError, match="prefill='fast': unknown method"):
        jsparse.CachedPrompt(params, prompt, prefill="fast")
