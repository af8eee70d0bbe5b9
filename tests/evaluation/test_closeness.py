"""Tests closeness against slow arithmetic on the engine's own logits.

Policies that share a prefill are compared with each one alone.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jsparse
from jsparse.builder import dense
from jsparse.evaluation.closeness import closeness, perplexity, windows
from jsparse.evaluation.shared_prefill import as_policies, prime
from jsparse.evaluation.teacher_forcing import force
from jsparse.machine import memory
from jsparse.policies.expressions import as_policy
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policies.streaming import streaming
from jsparse.policy import Services
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.session import Session
from tests.support.programs import shared
from tests.support.tiny import (
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)
from tests.support.toy_policies import bypass, even_ids, inherit, page_bound, shrink

PAGE, CHUNK, STEPS = 8, 16, 10
PROMPTS = random_prompts((37, 18, 3))
FORCED = random_tokens(3, STEPS + 1)
NEWEST = "streaming(sink=0, recent=1)"
CORRECTED = streaming(sink=1, recent=3)._replace(
    services=Services(correct_every=4), name="corrected"
)
POLICIES = (page_bound(), inherit(), bypass(), shrink(), even_ids(), CORRECTED, NEWEST)
PLAIN = ("oracle_top_k(budget=1073741824)", NEWEST)


def params(layers=1):
    return tiny_params(num_layers=layers)


def run(policies, prompt=PROMPTS, steps=STEPS, layers=1, **options):
    return closeness(
        force(params(layers), policies, prompt, max_new_tokens=steps, page_size=PAGE, **options)
    )


@shared
def plain():
    """Runs policies along dense attention's own tokens; also returns the reported progress."""
    seen = []
    return run(PLAIN, on_progress=lambda *report: seen.append(report)), seen


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def log_probabilities(policy, forced, layers=1, **options):
    """The engine's log-probabilities after each forced token."""
    made = engine_logits(params(layers), policy, PROMPTS, forced, page_size=PAGE, **options)
    return log_softmax(made)[1:]


@shared
def alone():
    """Log-probabilities of dense attention, and of the last plain policy."""
    tokens = np.asarray(plain()[0].tokens, np.int32)
    return [log_probabilities(policy, tokens) for policy in ("dense", PLAIN[-1])]


def assert_measured(result, index, exact, logits):
    kl = np.einsum("nbv,nbv->bn", np.exp(exact), exact - logits)
    np.testing.assert_allclose(result.kl[index], kl, rtol=1e-3, atol=1e-5)
    agreement = (exact.argmax(-1) == logits.argmax(-1)).T
    np.testing.assert_array_equal(result.agreement[index], agreement)
    logprob = [
        [logits[i, b, result.tokens[b, i + 1]] for i in range(STEPS)] for b in range(len(PROMPTS))
    ]
    np.testing.assert_allclose(result.logprob[index], logprob, rtol=1e-3, atol=1e-4)


def test_state_is_that_of_the_policy_alone():
    policy, wider = as_policy("verified(budget=16, recent=8)"), dense()._replace(window=12)
    spec = capacity.cache_spec(params(), PROMPTS, STEPS, None, PAGE)
    made = prime(params(), (policy, wider), PROMPTS, spec, lambda *_: None).prefilled
    alone = Session(params(), policy, spec)
    alone.prefill(PROMPTS)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (made[0].state, alone.prefilled.state)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_policies_share_the_prefill_of_their_method():
    few, rows = "streaming(sink=0, recent=1)", random_prompts((330, 140))
    policies = ("dense", with_prefill("dense", few), NEWEST)
    spec = capacity.cache_spec(params(), rows, STEPS, None, PAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: 128)
        made = prime(params(), as_policies(policies), rows, spec, lambda *_: None).prefilled
        alone = Session(params(), as_policy(policies[1]), spec)
        alone.prefill(rows)
    assert made[0].logits is made[2].logits
    assert np.abs(made[0].logits[0] - made[1].logits[0]).max() > 0.1
    np.testing.assert_allclose(made[1].logits, alone.prefilled.logits, rtol=1e-4, atol=1e-4)


def test_policy_is_measured_as_if_alone():
    """The engine's logits and slow sums agree."""
    exact, logits = alone()
    assert_measured(plain()[0], 0, exact, exact)
    assert_measured(plain()[0], len(PLAIN), exact, logits)


@pytest.mark.slow
def test_k_and_v_in_8_bits_are_compared_with_exact_ones():
    """Also those of dense attention, whose distance is the cost of rounding."""
    rounded = dataclasses.replace(params(), kv_cache_dtype="int8")
    result = closeness(force(rounded, ["dense"], PROMPTS, max_new_tokens=STEPS, page_size=PAGE))
    exact, _ = alone()
    np.testing.assert_array_equal(result.tokens, plain()[0].tokens)
    tokens = np.asarray(result.tokens, np.int32)
    logits = log_softmax(engine_logits(rounded, "dense", PROMPTS, tokens, page_size=PAGE))[1:]
    assert result.policies == ("dense()",)
    assert_measured(result, 0, exact, logits)
    assert 1e-6 < result.kl.mean() < 1e-2


@pytest.mark.slow
def test_every_policy_is_measured_as_if_alone(monkeypatch):
    """The engine's logits and slow sums agree with sidecars, query windows, cache fields,
    maintenance and corrections.
    """
    exact = log_probabilities("dense", FORCED, layers=2)
    monkeypatch.setattr(chunk_attention, "chunk_tokens", lambda *_: CHUNK)
    result = run(POLICIES, continuation=FORCED, layers=2)
    np.testing.assert_array_equal(result.tokens, FORCED)
    for index, policy in enumerate(map(as_policy, (dense(), *POLICIES))):
        assert result.policies[index] == policy.name
        logits = log_probabilities(policy, FORCED, layers=2, chunk=CHUNK)
        assert_measured(result, index, exact, logits)


def test_dense_and_full_budgets_have_zero_distance():
    """Dropping all but the newest token is far from dense."""
    result, _ = plain()
    assert result.policies[0] == "dense()"
    assert len(result.policies) == 1 + len(PLAIN)
    assert (result.kl[0] == 0).all()
    assert np.abs(result.kl[1]).max() < 1e-5
    assert result.agreement[:2].all()
    assert (result.attended[0] == 1).all()
    assert (result.attended[2] < 0.3).all()
    assert result.kl[2].mean() > 0.5
    assert result.agreement[2].mean() < 0.7
    # dense follows its own continuation
    assert (result.logprob[0] >= result.logprob[2]).mean() > 0.8


def test_continuation_is_that_of_generate():
    outs = jsparse.generate(
        params(), PROMPTS, max_new_tokens=STEPS + 1, eos_token_id=[], page_size=PAGE
    )
    assert plain()[0].tokens.tolist() == [out.token_ids for out in outs]


def test_perplexity_of_a_text_matches_plain_passes():
    text = random_prompts([100])[0]
    prompt, continuation = windows(text, 30, 8)
    parts = [text[:30], text[30:60], text[60:90]]
    assert [p + c for p, c in zip(prompt, continuation, strict=True)] == parts
    result = run([NEWEST], prompt, 8, continuation=continuation)
    passed = log_softmax(jsparse.logits(params(), parts))
    logprob = [[passed[b, i - 1, text[30 * b + i]] for i in range(22, 30)] for b in range(3)]
    dense_ppl, sparse_ppl = perplexity(result.logprob)
    assert dense_ppl == pytest.approx(np.exp(-np.mean(logprob)), rel=1e-4)
    assert abs(sparse_ppl / dense_ppl - 1) > 0.01


def test_wrong_arguments_are_named():
    shape = "must be integers \\(3, 11\\)"
    for arguments, message in [
        ({"prompt": [[1, 2], []]}, r"prompt\[1\] is empty"),
        ({"prompt": random_prompts([510])}, "510 tokens .* is 520: must be at most 512"),
        ({"steps": 0}, r"max_new_tokens=0"),
        ({"policies": []}, r"policies=\[\]: must be a list of at least one"),
        ({"policies": "dense"}, r"policies='dense': must be a list"),
        ({"continuation": FORCED[:, 1:]}, rf"continuation of shape \(3, 10\).*{shape}"),
        ({"continuation": FORCED[:2]}, rf"continuation of shape \(2, 11\).*{shape}"),
        ({"continuation": FORCED / 2}, r"continuation of .*float64"),
        ({"continuation": FORCED + 300}, r"continuation ranges from 3.*must lie in 0 … 299"),
        ({"continuation": [[1], [2, 3], [4]]}, r"continuation: must be integers"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(**{"policies": ["dense"], **arguments})


def test_memory_error_has_both_numbers(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda **_: 2**10)
    with pytest.raises(
        ValueError, match=r"max_new_tokens=10 for 3 prompt\(s\) takes 35.16 KiB .* in the 1.00 KiB"
    ):
        run(["dense"])


def test_impossible_windows_are_refused():
    for length, scored, message in [(9, 8, "scored=8: .* 7"), (60, 5, "tokens: 40 .*=60")]:
        with pytest.raises(ValueError, match=message):
            windows(list(range(40)), length, scored)
