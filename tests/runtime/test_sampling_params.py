"""Tests SamplingParams: validation on construction, and normalised values."""

import copy
import dataclasses
import fractions
import pickle

import numpy as np
import pytest

from jsparse import SamplingParams

pytestmark = pytest.mark.pure


BAD = [
    ({"temperature": -1}, ["temperature=-1", "at least 0"]),
    ({"temperature": "1"}, ["temperature='1'", "a number"]),
    ({"temperature": True}, ["temperature=True", "a number"]),
    ({"temperature": 10**400}, ["temperature", "fits in a float"]),
    ({"top_k": 1.5}, ["top_k=1.5", "integer"]),
    ({"top_p": 0.0}, ["top_p=0.0", "above 0"]),
    ({"min_p": 1.01}, ["min_p=1.01", "from 0 to 1"]),
    ({"repetition_penalty": 0}, ["repetition_penalty=0", "above 0"]),
    ({"seed": -1}, ["seed=-1", "2^63 - 1"]),
    ({"seed": 2**63}, [f"seed={2**63}", "2^63 - 1"]),
    ({"seed": 1.0}, ["seed=1.0", "integer"]),
    ({"seed": True}, ["seed=True", "integer"]),
    ({"stop": 3}, ["stop=3", "strings"]),
    ({"stop": ["a", ""]}, ["stop=['a', '']", "at least one character"]),
    ({"stop": [b"a"]}, ["stop=[b'a']", "strings"]),
    ({"stop": ["\ud800"]}, ["stop=", "without surrogates"]),
    ({"cache_salt": 3}, ["cache_salt=3", "string"]),
    ({"cache_salt": "\ud800"}, ["cache_salt=", "without surrogates"]),
    ({"stop_token_ids": 3}, ["stop_token_ids=3", "list"]),
    ({"stop_token_ids": "3"}, ["stop_token_ids='3'", "list"]),
    ({"stop_token_ids": [1, -1]}, ["stop_token_ids=-1", "from 0"]),
    ({"stop_token_ids": [True]}, ["stop_token_ids=True", "integers"]),
    ({"ignore_eos": 1}, ["ignore_eos=1", "true or false"]),
    ({"max_tokens": 0}, ["max_tokens=0", "at least 1"]),
    ({"max_tokens": 2.0}, ["max_tokens=2.0", "integer"]),
    ({"max_tokens": True}, ["max_tokens=True", "integer"]),
    ({"logprobs": 21}, ["logprobs=21", "None or an integer from 0 to 20"]),
    ({"logprobs": -1}, ["logprobs=-1", "None or an integer from 0 to 20"]),
    ({"logprobs": 1.0}, ["logprobs=1.0", "integer"]),
    ({"logprobs": False}, ["logprobs=False", "integer"]),
    ({"n": 0}, ["n=0", "from 1 to 16"]),
    ({"n": 17}, ["n=17", "from 1 to 16"]),
    ({"n": True}, ["n=True", "integer"]),
    ({"presence_penalty": 2.01}, ["presence_penalty=2.01", "from -2 to 2"]),
    ({"presence_penalty": None}, ["presence_penalty=None", "a number"]),
    ({"frequency_penalty": -2.01}, ["frequency_penalty=-2.01", "from -2 to 2"]),
    ({"frequency_penalty": float("nan")}, ["frequency_penalty=nan", "from -2 to 2"]),
    ({"frequency_penalty": "1"}, ["frequency_penalty='1'", "a number"]),
    ({"min_tokens": -1}, ["min_tokens=-1", "from 0 to max_tokens, which is 128"]),
    ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens=5", "to max_tokens, which is 4"]),
    ({"min_tokens": 1.0}, ["min_tokens=1.0", "integer"]),
    ({"logit_bias": [3]}, ["logit_bias=[3]", "must map"]),
    ({"logit_bias": {-1: 1}}, ["logit_bias=-1", "from 0 on"]),
    ({"logit_bias": {"-1": 1}}, ["logit_bias='-1'", "from 0 on"]),
    ({"logit_bias": {"": 1}}, ["logit_bias=''", "from 0 on"]),
    ({"logit_bias": {"²": 1}}, ["logit_bias='²'", "from 0 on"]),
    ({"logit_bias": {"9" * 5000: 1}}, ["logit_bias='99", "from 0 on"]),
    ({"logit_bias": {1.0: 1}}, ["logit_bias=1.0", "integers"]),
    ({"logit_bias": {True: 1}}, ["logit_bias=True", "integers"]),
    ({"logit_bias": {3: 1, "3": 2}}, ["logit_bias='3'", "each token once"]),
    ({"logit_bias": {3: 100.5}}, ["logit_bias={3: 100.5}", "from -100 to 100"]),
    ({"logit_bias": {3: float("nan")}}, ["logit_bias={3: nan}", "from -100 to 100"]),
    ({"logit_bias": {3: "1"}}, ["logit_bias={3: '1'}", "numbers"]),
    ({"logit_bias": {3: True}}, ["logit_bias={3: True}", "numbers"]),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, ["301 entries", "at most 300"]),
    ({"include_stop_str_in_output": 1}, ["include_stop_str_in_output=1", "true or false"]),
    ({"policy": "p=0.5"}, ["policy='p=0.5'", "map names"]),
]


def test_values_are_validated_on_construction():
    for given, said in BAD:
        with pytest.raises(ValueError, match=rf"^{next(iter(given))}\b.*must") as error:
            SamplingParams(**given)
        assert all(part in str(error.value) for part in said), (given, str(error.value))


def test_values_are_normalised():
    own = SamplingParams(stop="end", stop_token_ids=[3, 4], top_k=5.0, temperature=np.float32(0.5))
    assert (own.stop, own.stop_token_ids, own.top_k) == (("end",), (3, 4), 5)
    assert type(own.temperature) is float
    assert (
        own
        == SamplingParams(stop=["end"], stop_token_ids=(3, 4), top_k=5, temperature=0.5)
        != SamplingParams()
    )
    assert len({own, SamplingParams(), SamplingParams(policy={})}) == 2


def test_biases_are_stored_by_id():
    given = {"7": 1, 3: fractions.Fraction(-1, 2), np.int32(5): np.float32(2.5)}
    own = SamplingParams(logit_bias=given)
    assert own.logit_bias is not None
    assert own.logit_bias == {7: 1.0, 3: -0.5, 5: 2.5}
    assert {type(key) for key in own.logit_bias} == {int}
    assert {type(value) for value in own.logit_bias.values()} == {float}
    given[1] = 1
    assert 1 not in own.logit_bias
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), -100)).logit_bias) == 300
    assert hash(own) == hash(SamplingParams())


def test_options_can_be_copied_and_printed():
    given = {"p": 0.9}
    own = SamplingParams(policy=given, stop="end")
    assert copy.deepcopy(own) == own == pickle.loads(pickle.dumps(own))
    assert dataclasses.asdict(own)["policy"] == {"p": 0.9}
    given["p"] = 0.1
    assert own.policy == {"p": 0.9}
