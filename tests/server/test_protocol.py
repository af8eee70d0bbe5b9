"""Tests which bodies the schema of requests refuses, and how, without a server."""

import json

import pytest
from pydantic import ValidationError

from jsparse.engine.errors import EngineFull
from jsparse.names import SAMPLING
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.server.body import parse
from jsparse.server.errors import ApiError, as_api_error
from jsparse.server.protocol import (
    SAME,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from tests.support.malformed import CHATS, COMPLETIONS, HI, MALFORMED, UNFIT

pytestmark = pytest.mark.pure

KINDS = {
    COMPLETIONS: CompletionRequest,
    CHATS: ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def refusal(path, body):
    """The error that clients see, or None if the schema accepts the body."""
    try:
        parsed = parse(KINDS[path], json.dumps(body).encode())
        if isinstance(parsed, GenerationRequest):
            parsed.sampling(parsed.max_new_tokens or 16, None)
    except (ApiError, ValueError) as error:
        return as_api_error(error, {name: name for name in SAME}).body["error"]
    return None


def test_malformed_bodies_are_refused_by_name():
    for path, body, param, words in MALFORMED:
        error = refusal(path, body)
        assert error is not None and error["type"] == "invalid_request_error", body
        assert (error["param"] or "") == param, body
        assert words in error["message"], body


def test_bodies_that_only_the_model_can_refuse_pass():
    assert [refusal(path, body) for path, body, _, _ in UNFIT] == [None] * len(UNFIT)


def test_options_at_their_defaults_are_dropped():
    more = {"metadata": {}, "store": False, "bad_words": [], "best_of": 1, "tools": []}
    more |= {"seed": None, "use_beam_search": False, "prompt_logprobs": None}
    plain, made = (
        parse(CompletionRequest, json.dumps({"prompt": [1]} | given).encode()).sampling(2, 0.5)
        for given in ({}, more)
    )
    assert made == plain == SamplingParams(max_tokens=2, temperature=0.5)


def test_fields_without_effect_are_accepted():
    for more in [
        {"metadata": {"a": "b"}, "store": True, "user": "me"},
        {"safety_identifier": "me", "prompt_cache_key": "me"},
        {"service_tier": "auto", "verbosity": "medium", "modalities": ["text"]},
        {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "functions": []},
        {"service_tier": "default", "parallel_tool_calls": False, "tool_choice": "none"},
        {"function_call": "auto", "documents": [], "chat_template_kwargs": {}},
        {"logprobs": False, "top_logprobs": 0, "priority": 0, "return_token_ids": False},
        # sglang-router 0.3.2 adds these to every request
        {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True},
        {"return_hidden_states": False},
    ]:
        plain, made = (
            parse(ChatRequest, json.dumps({"messages": HI} | given).encode())
            for given in ({}, more)
        )
        assert made.sampling(2, 0.5) == plain.sampling(2, 0.5), more
        assert made.chat(made.messages, {}) == plain.chat(plain.messages, {}), more


def test_parts_and_messages_may_have_fields_without_effect():
    hint = {"type": "ephemeral"}
    part = {"type": "text", "text": "w1", "cache_control": hint, "annotations": [], "id": None}
    message = {"role": "user", "content": [part], "annotations": [], "tool_calls": []}
    made = parse(ChatRequest, json.dumps({"messages": [message]}).encode())
    assert made.chat(made.messages, {})["messages"] == [{"role": "user", "content": "w1"}]
    thought = {"role": "assistant", "content": "w1", "reasoning_content": "w2"}
    made = parse(ChatRequest, json.dumps({"messages": [thought]}).encode())
    assert made.chat(made.messages, {})["messages"] == [thought]


def test_tools_their_calls_and_results_reach_the_template():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "w2", "tool_call_id": "call_1", "name": "f"}
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for choice, offered in (({}, tools), ({"tool_choice": "none"}, None)):
        body = {"messages": [*HI, asked, result], "tools": tools} | choice
        made = parse(ChatRequest, json.dumps(body).encode())
        prompt = made.chat(made.messages, {})
        assert prompt["messages"] == [*HI, asked | {"content": ""}, result]
        assert prompt["tools"] == offered


def test_variables_of_a_request_replace_the_servers():
    defaults, body = {"thinks": True, "effort": "low"}, {"messages": HI}
    for more, expected in (
        ({}, defaults),
        ({"reasoning_effort": "high"}, defaults | {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"effort": "high"}}, {"thinks": True, "effort": "high"}),
        ({"chat_template_kwargs": {"effort": None}}, defaults),
    ):
        made = parse(ChatRequest, json.dumps(body | more).encode())
        assert made.chat(made.messages, defaults)["chat_template_kwargs"] == expected


def test_values_refused_by_sampling_params_are_refused_in_bodies():
    for name, refused in SAMPLING.items():
        error = refusal(COMPLETIONS, {"prompt": "w1", name: "something"})
        assert error is not None and error["param"] == name
        assert error["message"] == f"{name}: {refused.rule}"


def test_engine_errors_have_their_status():
    for error, status, code in [
        (EngineFull("3 requests wait"), 429, "too_many_requests"),
        (ValueError("prompt: must fit max_model_len=9"), 400, "context_length_exceeded"),
        (ValueError("top_k=-2: must be at least 0"), 400, None),
        (RuntimeError("/a/file"), 500, "engine_error"),
    ]:
        answer = as_api_error(error, {"top_k": "top_k"})
        assert (answer.status, answer.code) == (status, code), error
        assert ("Retry-After" in answer.headers) == (status == 429), error
        assert answer.param == ("top_k" if "top_k" in str(error) else None), error
        assert "/a/file" not in answer.message, error


def test_body_with_a_thousand_errors_gets_one_message():
    for kind, body in [
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": HI} | {f"x{nth}": 1 for nth in range(1000)}),
        (CompletionRequest, {"prompt": "w1", "logit_bias": {f"{nth}": "x" for nth in range(1000)}}),
    ]:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate_json(json.dumps(body))
        assert raised.value.error_count() <= 3, kind
