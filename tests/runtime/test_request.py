"""Tests the requests that SamplingParams are validated into."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.builder import dense
from jsparse.conversation import Conversation
from jsparse.policies.expressions import as_policy
from jsparse.runtime.request import end_tokens, knobs, requests, require_alone
from tests.support.tiny import tiny_params

GGUF = Path(__file__).parents[1] / "fixtures" / "hf" / "llama" / "model.gguf"


@pytest.fixture(scope="module")
def params():
    return dataclasses.replace(
        tiny_params(num_layers=1),
        generation_defaults={"temperature": 0.8, "top_k": 5, "eos_token_id": [7, 9], "else": 1},
    )


def test_options_that_change_the_likeliest_token_are_not_greedy(params):
    plain = dataclasses.replace(params, generation_defaults={})
    options = [
        SamplingParams(top_k=3, n=2, logprobs=4, stop_token_ids=[2]),
        SamplingParams(temperature=0.1),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(logit_bias={3: 1}),
        SamplingParams(min_tokens=1),
    ]
    asked = requests(plain, [[1]] * 7, options, dense())
    assert [request.sampling.greedy for request in asked] == [True, *[False] * 6]


def test_engine_supports_options_that_generate_does_not(params):
    for given, said in (
        ({"n": 2}, "n=2: must be 1 for generate"),
        ({"logprobs": 3}, "logprobs=3: must be None or 0 for generate"),
        ({"exact": True}, "exact=True: must be None in SamplingParams for generate"),
    ):
        own = SamplingParams(**given)
        assert requests(params, [[1]], own, dense())
        for call in (
            lambda own=own: require_alone([SamplingParams(logprobs=0), own]),
            lambda own=own: jsparse.generate(params, [[1]], sampling=own),
            lambda own=own: Conversation(params, sampling=own),
        ):
            with pytest.raises(ValueError, match=f"^{said}"):
                call()
    require_alone([SamplingParams(logprobs=0), SamplingParams()])


def test_none_means_the_models_defaults(params):
    options = [SamplingParams(), SamplingParams(temperature=0, top_k=0, min_p=0.1, seed=3)]
    first, second = requests(params, [[1, 2], [3]], options, dense(), seed=11)
    assert first.sampling == SamplingParams(
        temperature=0.8, top_k=5, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=11
    )
    assert second.sampling == SamplingParams(
        temperature=0, top_k=0, top_p=1.0, min_p=0.1, repetition_penalty=1.0, seed=3
    )
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2], [3])
    assert second.max_length == 1 + 128
    assert [request.sampling.greedy for request in (first, second)] == [False, True]


def test_rows_without_a_seed_draw_from_streams_of_one_seed(params):
    options = [SamplingParams(), SamplingParams(seed=5), SamplingParams()]
    asked = requests(params, [[1]] * 3, options, dense(), seed=2)
    assert [(r.sampling.seed, r.stream) for r in asked] == [(2, 0), (5, 0), (2, 2)]


def test_end_tokens_are_the_models_and_the_requests(params):
    options = [
        SamplingParams(),
        SamplingParams(stop_token_ids=[3]),
        SamplingParams(stop_token_ids=[3], ignore_eos=True),
    ]
    asked = requests(params, [[1]] * 3, options, dense())
    assert [request.ends for request in asked] == [{7, 9}, {3, 7, 9}, {3}]
    one = dataclasses.replace(params, generation_defaults={"eos_token_id": 8})
    assert end_tokens(one) == {8}
    texts = jsparse.load(GGUF, dtype="float32")
    assert texts.tokenizer is not None
    assert end_tokens(texts) == set(texts.tokenizer.eos_token_ids) != set()
    both = dataclasses.replace(texts, generation_defaults={"eos_token_id": 8})
    assert end_tokens(both) == {8, *texts.tokenizer.eos_token_ids}
    with pytest.raises(ValueError, match="stop_token_ids=300: must be token ids from 0 to 299"):
        requests(params, [[1]], SamplingParams(stop_token_ids=[300]), dense())
    with pytest.raises(ValueError, match="logit_bias=300: must be token ids from 0 to 299"):
        requests(params, [[1]], SamplingParams(logit_bias={299: 1, 300: 1}), dense())


def test_number_of_end_tokens_is_limited_with_min_tokens(params):
    """Two of them are the model's."""
    maximum = SamplingParams(stop_token_ids=range(20, 34), min_tokens=1)
    assert len(requests(params, [[1]], maximum, dense())[0].ends) == 16
    more = dataclasses.replace(maximum, stop_token_ids=range(20, 35))
    said = "min_tokens=1: must be 0 if more than 16 tokens end the text; here 17 do"
    with pytest.raises(ValueError, match=f"^{said}$"):
        requests(params, [[1]], more, dense())
    requests(params, [[1]], dataclasses.replace(more, min_tokens=0), dense())


def test_stop_strings_need_a_tokenizer(params):
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        requests(params, [[1]], SamplingParams(stop="x"), dense())


def test_options_are_one_per_prompt_or_one_for_all(params):
    for sampling, said in (
        ([SamplingParams()] * 3, "3 entries.*each of the 2 prompt"),
        ([SamplingParams(), None], "sampling=None.*must be SamplingParams"),
        ({"top_k": 3}, "sampling={'top_k': 3}.*or a list of them"),
        ((SamplingParams() for _ in range(2)), "sampling=<generator.*or a list of them"),
    ):
        with pytest.raises(ValueError, match=said):
            requests(params, [[1], [2]], sampling, dense())
    asked = requests(params, [[1], [2]], SamplingParams(max_tokens=3), dense())
    assert [request.sampling.max_tokens for request in asked] == [3, 3]
    asked = requests(params, [[1], [2]], (SamplingParams(), SamplingParams(top_k=2)), dense())
    assert [request.sampling.top_k for request in asked] == [5, 2]


def test_policy_values_become_arrays(params):
    policy = as_policy("twilight(oracle_top_p(p=0.5), p=0.9)")
    assert list(policy.per_row) == ["p"]

    def given(*rows):
        options = [SamplingParams(policy=row) for row in rows]
        return knobs(requests(params, [[1]] * len(rows), options, policy))

    assert given({}, {}) is None
    made = given({"p": 0.25}, {}, {"dense": True}, {"p": 1, "dense": False})
    assert sorted(made) == ["dense", "p"]
    np.testing.assert_array_equal(made["p"], np.float32([0.25, np.nan, np.nan, 1]))
    np.testing.assert_array_equal(made["dense"], [False, False, True, False])
    assert made["dense"].dtype == bool
