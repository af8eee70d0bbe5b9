"""Log-probabilities of prompts are those of a full pass."""

import jax
import numpy as np
import pytest

import jsparse
from tests.support.serving import greedy, tiny_llm
from tests.support.tiny import tiny_params


@pytest.fixture(scope="module")
def dense():
    return tiny_llm()


def expected(params, prompt: list[int]) -> np.ndarray:
    """The model's log-probabilities after every token of a prompt, by a full pass."""
    return np.asarray(jax.nn.log_softmax(jsparse.logits(params, [prompt])[0]))


def assert_of_model(out: jsparse.RequestOutput, params, top: int) -> None:
    prompt, found = out.prompt_token_ids, out.prompt_logprobs
    wanted = expected(params, prompt)
    assert found is not None and out.prompt_scores is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for nth, (token, of_token) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        assert of_token is not None
        own = wanted[nth, token]
        np.testing.assert_allclose(of_token[token].logprob, own, atol=1e-4)
        assert of_token[token].rank == 1 + np.sum(wanted[nth] > own)
        # harnesses compare them to find greedy texts
        if of_token[token].rank == 1 and top:
            assert out.prompt_scores.logprobs[nth + 1] == out.prompt_scores.top_logprobs[nth + 1, 0]
        best = np.argsort(-wanted[nth], kind="stable")[:top].tolist()
        assert [*of_token] == [token, *(other for other in best if other != token)]
        assert [of_token[other].rank for other in best] == [*range(1, top + 1)]
        logprobs = [of_token[other].logprob for other in best]
        np.testing.assert_allclose(logprobs, wanted[nth, best], atol=1e-4)


PROMPTS = [[(7 * nth + row) % 97 for nth in range(40 + row)] for row in range(3)]


def test_a_cached_prompt_is_computed_again_for_its_logprobs(dense):
    """A prompt of several chunks, the last of which is padded."""
    prompt = PROMPTS[0]
    for _ in range(2):
        (without,) = dense.generate([prompt], greedy(2))
    (out,) = dense.generate([prompt], greedy(2, n=2, prompt_logprobs=1))
    assert without.num_cached_tokens > 0
    assert_of_model(out, dense.engine.params, 1)
    assert out.outputs[0].token_ids == without.outputs[0].token_ids


@pytest.mark.slow
def test_prompts_have_their_own_logprobs_beside_others():
    """With programs for two prompts, which prompts with log-probabilities must not join."""
    dense = tiny_llm(prefill_rows=[1, 2])
    options = [greedy(2, prompt_logprobs=3), greedy(2), greedy(2, prompt_logprobs=0)]
    outs = dense.generate(PROMPTS, options)
    assert_of_model(outs[0], dense.engine.params, 3)
    assert outs[1].prompt_logprobs is None
    assert_of_model(outs[2], dense.engine.params, 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv(budget=24)", "offloaded(quest(budget=16))"])
def test_prompt_logprobs_with_a_policy(policy):
    params = tiny_params(num_layers=2)
    llm = tiny_llm(policy, params=params, prefill_rows=[1])
    (out,) = llm.generate([PROMPTS[1]], greedy(2, prompt_logprobs=2))
    assert_of_model(out, params, 2)


@pytest.mark.parametrize("options", [{"prompt_logprobs": 21}, {"priority": 0.5}])
def test_wrong_values_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=.*: must be"):
        jsparse.SamplingParams(**options)


def test_generate_names_what_only_engines_do():
    params = tiny_params(num_layers=2)
    for options in ({"prompt_logprobs": 1}, {"priority": 1}):
        with pytest.raises(ValueError, match="for generate"):
            jsparse.generate(params, [[1, 2]], sampling=jsparse.SamplingParams(**options))
