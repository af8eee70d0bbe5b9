"""Tests that bad requests are refused by name, and that no request makes the server fail."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.malformed import CHATS, COMPLETIONS, HI, MALFORMED, UNFIT
from tests.support.serving_http import a_service, an_engine, at_rest, serving


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


def test_requests_that_the_model_cannot_serve_are_refused_by_name(http):
    for path, body, param, words in [*UNFIT, MALFORMED[0]]:
        data = json.dumps(body)
        got = http.post(path, content=data, headers={"Content-Type": "application/json"})
        error = got.json()["error"]
        assert got.status_code == 400, error
        assert (error["type"], error["param"] or "") == ("invalid_request_error", param), error
        assert words in error["message"], error
        assert len(error["message"]) < 400 and "Traceback" not in error["message"]


def test_non_json_bodies_are_refused(http):
    for data in [b"", b"{", b"\xff", b"[" * 10000, b'{"prompt": NaN}', b"nul"]:
        got = http.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
        assert got.status_code == 400 and got.json()["error"]["message"], data


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


def test_options_of_the_server_bound_requests():
    service, engine = a_service(max_logprobs=0), an_engine(per_request=("p",))
    with serving(service, engine) as url, httpx.Client(base_url=url, timeout=60) as http:

        def refusal(path, **body):
            return http.post(path, json=body).json()["error"]

        body = {"prompt": [1], "max_tokens": 2}
        said = refusal(COMPLETIONS, **body, logprobs=1)["message"]
        assert "logprobs=1: must be at most 0 on this server" in said
        said = refusal(CHATS, messages=HI, logprobs=True, top_logprobs=3)
        assert said["param"] == "top_logprobs"
        said = refusal(COMPLETIONS, prompt=[1], policy={"dense": True})
        assert said["param"] == "policy"
        assert said["message"].endswith("start the server with --per-request dense")
        assert "--per-request" not in f"{refusal(COMPLETIONS, prompt=[1], policy={'q': 1})}"


@pytest.mark.slow
def test_logprobs_up_to_the_servers_maximum_are_served():
    body = {"prompt": [1], "max_tokens": 2, "logprobs": 0}
    with serving(a_service(max_logprobs=0), an_engine()) as url:
        assert httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60).status_code == 200


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def fuzzed(schemas, name):
    """Bodies with the fields of a schema, each valid or arbitrary."""
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
    ("path", "name"), [(COMPLETIONS, "CompletionRequest"), (CHATS, "ChatRequest")]
)
def test_no_body_makes_the_server_fail(http, service, path, name):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert name in schemas
    codes = set()

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(fuzzed(schemas, name))
    def fuzz(body):
        body.setdefault("max_tokens", 2)  # so that the test is short
        data = json.dumps(body)
        got = http.post(path, content=data, headers={"Content-Type": "application/json"})
        codes.add(got.status_code)
        assert got.status_code in (200, 400, 404), (body, got.text)
        assert '"server_error"' not in got.text

    fuzz()
    assert {200, 400} <= codes
    assert at_rest(service)
