"""Tests that what is wrong is refused by name, and that nothing makes the server fail."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving_http import a_service, an_engine, at_rest, serving

from jsparse.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "w1"}]


@pytest.fixture(scope="module")
def service():
    return a_service()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, an_engine()) as url:
        yield url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


def part(kind, **more):
    return [{"role": "user", "content": [{"type": kind, **more}]}]


MALFORMED = [
    (COMPLETIONS, {}, "prompt", "must be given"),
    (COMPLETIONS, {"prompt": None}, "prompt", "must be given"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "must be text, token ids, or a list"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "prompt=3: must be text"),
    (COMPLETIONS, {"prompt": [1, "w1"]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": [[1.5]]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": [300]}, "prompt", "token id 300: must be from 0 to 299"),
    (COMPLETIONS, {"prompt": [[-1]]}, "prompt", "token id -1"),
    (COMPLETIONS, {"prompt": ["w1"] * 129}, "prompt", "at most 128 prompts"),
    (COMPLETIONS, {"prompt": [1] * 90}, "prompt", "must be at most max_model_len=96"),
    (COMPLETIONS, {"prompt": "\ud800"}, "", "Invalid JSON"),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": 0}, "max_tokens", "max_tokens=0: "),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": "9"}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": 10**30}, "prompt", "must be at most"),
    (COMPLETIONS, {"prompt": "w1", "temperature": -1}, "temperature", "at least 0"),
    (COMPLETIONS, {"prompt": "w1", "temperature": "hot"}, "temperature", "temperature='hot'"),
    (COMPLETIONS, {"prompt": "w1", "top_p": 0}, "top_p", "above 0 and at most 1"),
    (COMPLETIONS, {"prompt": "w1", "top_k": -2}, "top_k", "at least 0"),
    (COMPLETIONS, {"prompt": "w1", "best_of": 2}, "best_of", "use n"),
    (COMPLETIONS, {"prompt": "w1", "best_of": True}, "best_of", "use n"),
    (COMPLETIONS, {"prompt": "w1", "n": 16, "x" * 999: 1}, "x" * 300 + "…", "xxx"),
    (COMPLETIONS, {"prompt": "w1", "min_p": 2}, "min_p", "from 0 to 1"),
    (COMPLETIONS, {"prompt": "w1", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    (COMPLETIONS, {"prompt": "w1", "presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    (COMPLETIONS, {"prompt": "w1", "frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    (COMPLETIONS, {"prompt": "w1", "n": 17}, "n", "from 1 to 16"),
    (COMPLETIONS, {"prompt": "w1", "n": True}, "n", "n=True"),
    (COMPLETIONS, {"prompt": "w1", "seed": -1}, "seed", "from 0 to"),
    (COMPLETIONS, {"prompt": "w1", "stop": [""]}, "stop[0]", "at least 1 character"),
    (COMPLETIONS, {"prompt": "w1", "stop": ["a"] * 17}, "stop", "at most 16"),
    (COMPLETIONS, {"prompt": "w1", "stop": "a" * 129}, "stop[0]", "at most 128"),
    (COMPLETIONS, {"prompt": "w1", "stop_token_ids": [300]}, "stop_token_ids", "0 to 299"),
    (COMPLETIONS, {"prompt": "w1", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (COMPLETIONS, {"prompt": "w1", "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    (COMPLETIONS, {"prompt": "w1", "min_tokens": 20}, "min_tokens", "from 0 to max_tokens"),
    (COMPLETIONS, {"prompt": "w1", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    (COMPLETIONS, {"prompt": "w1", "echo": True, "logprobs": 1}, "echo", "must be false"),
    (COMPLETIONS, {"prompt": "w1", "policy": {"q": 1}}, "policy", "'q'"),
    (COMPLETIONS, {"prompt": "w1", "policy": {"p": 2}}, "policy", "p=2.0: must be"),
    (COMPLETIONS, {"prompt": "w1", "stream": "yes"}, "stream", "stream='yes'"),
    (COMPLETIONS, {"prompt": "w1", "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    (COMPLETIONS, {"prompt": "w1", "suffix": "x"}, "suffix", "never filled in"),
    (COMPLETIONS, {"prompt": "w1", "frobnicate": 1}, "frobnicate", "unknown field"),
    (COMPLETIONS, [1], "", "object"),
    (CHATS, {}, "messages", "must be given"),
    (CHATS, {"messages": []}, "messages", "at least 1"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "must be given"),
    (CHATS, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    (CHATS, {"messages": part("image_url", image_url={})}, "messages[0].content", "images"),
    (CHATS, {"messages": part("input_audio")}, "messages[0].content", "audio"),
    (CHATS, {"messages": HI, "tools": [{}]}, "tools", "tools are not supported"),
    (CHATS, {"messages": HI, "tool_choice": "auto"}, "tool_choice", "not supported"),
    (CHATS, {"messages": HI, "functions": []}, "functions", "not supported"),
    (CHATS, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "not"),
    (CHATS, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template", "never run"),
    (CHATS, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "must have logprobs=true"),
    (CHATS, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHATS, {"messages": HI, "prompt": "w1"}, "prompt", "unknown field"),
    (CHATS, {"messages": HI * 95, "max_tokens": 9}, "messages", "max_model_len=96"),
    (CHATS, {"messages": HI * 96}, "messages", "max_model_len=96"),
    (CHATS, {"messages": HI * 4097}, "messages", "at most 4096 items"),
    ("/tokenize", {}, "prompt", "must be given"),
    ("/tokenize", {"prompt": "w1", "messages": HI}, "prompt", "not both"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ("/detokenize", {"tokens": "w1"}, "tokens", "tokens='w1'"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    MALFORMED,
    ids=[f"{nth}-{param}" for nth, (_, _, param, _) in enumerate(MALFORMED)],
)
def test_what_is_malformed_is_refused_by_name(http, path, body, param, words):
    data = json.dumps(body)
    got = http.post(path, content=data, headers={"Content-Type": "application/json"})
    error = got.json()["error"]
    assert got.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "") == param, error
    assert words in error["message"], error
    assert len(error["message"]) < 400 and "Traceback" not in error["message"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 10000, b'{"prompt": NaN}', b"nul"])
def test_what_is_no_json_is_refused(http, data):
    got = http.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    assert got.status_code == 400 and got.json()["error"]["message"]


def test_other_refusals(http):
    assert http.post(COMPLETIONS, json={"prompt": "w1", "model": "other"}).status_code == 404
    form = http.post(
        COMPLETIONS, content=b'{"prompt": "w1"}', headers={"Content-Type": "text/plain"}
    )
    assert form.status_code == 415
    assert http.get(COMPLETIONS).status_code == 405
    for path in ("/v1/nothing", "/docs", "/redoc"):
        assert http.get(path).json()["error"]["type"] == "invalid_request_error"


def test_the_whole_batch_is_refused(http, service):
    got = http.post(COMPLETIONS, json={"prompt": [[1], [2], [3] * 95], "max_tokens": 9})
    assert got.status_code == 400
    assert at_rest(service)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": HI} | {f"x{nth}": 1 for nth in range(1000)}),
        (CompletionRequest, {"prompt": "w1", "logit_bias": {f"{nth}": "x" for nth in range(1000)}}),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_body_that_is_wrong_a_thousand_times_is_told_so_once(kind, body):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert raised.value.error_count() <= 3


def test_what_asks_for_nothing_is_dropped(http):
    more = {"metadata": {}, "store": False, "top_k": -1, "best_of": 1, "tools": []}
    more |= {"tool_choice": "none", "response_format": {"type": "text"}}
    more |= {"stream_options": {"include_obfuscation": False}}
    body = {"prompt": [1], "max_tokens": 2, "temperature": 0}
    plain, made = (http.post(COMPLETIONS, json=body | given) for given in ({}, more))
    assert made.status_code == 200, made.text
    assert made.json()["choices"] == plain.json()["choices"]
    roles = ("system", "developer")
    chats = [
        http.post("/tokenize", json={"messages": [{"role": role, "content": "w1", "name": "me"}]})
        for role in roles
    ]
    assert chats[0].json() == chats[1].json()


def test_more_likely_tokens_than_the_server_has_are_refused():
    service = a_service(max_logprobs=0)
    with serving(service, an_engine()) as url, httpx.Client(base_url=url, timeout=60) as http:
        body = {"prompt": [1], "max_tokens": 2}
        assert http.post(COMPLETIONS, json=body | {"logprobs": 0}).status_code == 200
        got = http.post(COMPLETIONS, json=body | {"logprobs": 1})
        assert "logprobs=1: must be at most 0 on this server" in got.json()["error"]["message"]
        chat = {"messages": HI, "logprobs": True, "top_logprobs": 3}
        assert http.post(CHATS, json=chat).json()["error"]["param"] == "top_logprobs"


def test_null_is_absent(http):
    body = {"prompt": [1], "max_tokens": 1, "tools": None, "stop": None, "seed": None, "user": "me"}
    assert http.post(COMPLETIONS, json=body).status_code == 200


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def fuzzed(schemas, name):
    """Bodies with the fields of a schema, each as it should be, or anything."""
    fields = schemas[name]["properties"]
    likely = {
        "prompt": st.just([1, 2]) | st.just("w1") | st.just(["w1", "w2"]),
        "messages": st.just(HI),
        "max_tokens": st.integers(1, 4),
        "n": st.integers(1, 3),
        "model": st.just("tiny"),
        "tokens": st.just([1]),
        "stream": st.booleans(),
        "temperature": st.floats(0, 2),
        "policy": st.just({"p": 0.5}),
        "logprobs": st.integers(0, 3) | st.booleans(),
    }
    values = {field: likely.get(field, st.nothing()) | ANY for field in fields}
    needed = [field for field in ("prompt", "messages", "tokens") if field in values][:1]
    must = {field: values.pop(field) for field in needed}
    return st.fixed_dictionaries(must, optional=values)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (COMPLETIONS, "CompletionRequest"),
        (CHATS, "ChatRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
    ],
)
def test_no_body_makes_the_server_fail(http, service, path, name):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert name in schemas
    codes = set()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(fuzzed(schemas, name))
    def fuzz(body):
        # the length of answers is bounded, so that the test is short
        body.setdefault("max_tokens", 2) if "kenize" not in path else None
        data = json.dumps(body)
        got = http.post(path, content=data, headers={"Content-Type": "application/json"})
        codes.add(got.status_code)
        assert got.status_code in (200, 400, 404), (body, got.text)
        assert '"server_error"' not in got.text

    fuzz()
    assert {200, 400} <= codes
    assert at_rest(service)
