"""Tests the limits that keep a server responsive, beside tests/server/attacks."""

import time

import httpx
import pytest

from tests.support import patient
from tests.support.serving_http import a_service, an_engine, at_rest, serving

BODY = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def service():
    return a_service(default_max_tokens=7)


@pytest.fixture(scope="module")
def url(service):
    with serving(service, an_engine(steps_per_program=4)) as address:
        yield address


def test_accepted_requests_are_served_during_shutdown(service, url):
    def body():
        yield b'{"prompt": "w1", '
        while not service.inside:
            time.sleep(0.01)
        service.draining = True
        yield b'"max_tokens": 2}'

    kind = {"Content-Type": "application/json"}
    try:
        got = httpx.post(f"{url}/v1/completions", content=body(), headers=kind, timeout=60)
        assert got.status_code == 200, got.text
        refused = patient.post(f"{url}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert patient.get(f"{url}/metrics").status_code == 200
        assert patient.get(f"{url}/health").status_code == 503
    finally:
        service.draining = False
    assert at_rest(service)


def test_tokenisation_counts_as_arriving(service, url, monkeypatch):
    monkeypatch.setattr(service, "_arriving", 10**6)
    for path, body in (("/tokenize", {"prompt": "w1"}), ("/detokenize", {"tokens": [1]})):
        got = patient.post(f"{url}{path}", json=body)
        assert got.status_code == 429, path


def test_chats_without_a_number_use_the_servers_default(url):
    asked = {"messages": [{"role": "user", "content": "w1"}], "ignore_eos": True}
    made = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
    assert made["usage"]["completion_tokens"] == 7
    made = httpx.post(f"{url}/v1/chat/completions", json=asked | {"max_tokens": 9}, timeout=60)
    assert made.json()["usage"]["completion_tokens"] == 9


def test_tokens_of_one_program_have_one_time(service, url):
    def count():
        lines = patient.get(f"{url}/metrics").text.splitlines()
        (line,) = (each for each in lines if "jsparse:inter_token_latency_seconds_count" in each)
        return float(line.split()[-1])

    before = count()
    body = BODY | {"max_tokens": 9, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    assert at_rest(service)
    # one from the prompt, then two programs of four steps
    assert count() - before == 2
