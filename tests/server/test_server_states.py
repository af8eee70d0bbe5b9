"""Tests the responses of a server while its engine is loading, full, hung or failed."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from jsparse.server import run
from jsparse.server.front import Options
from tests.support import patient
from tests.support.serving_http import a_service, an_engine, serving, with_words
from tests.support.tiny import with_nan

WORDS = "w3 w14 w15 w92 w65"


def test_full_engine_sends_retry_after():
    service = a_service(max_waiting=1)
    body = {"prompt": WORDS, "max_tokens": 80, "temperature": 0}
    with serving(service, an_engine(max_waiting=1)) as url:

        async def ask():
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                posts = (client.post("/v1/completions", json=body) for _ in range(12))
                return await asyncio.gather(*posts)

        got = asyncio.run(ask())
        codes = [each.status_code for each in got]
        assert 200 in codes and 429 in codes and set(codes) == {200, 429}
        refused = got[codes.index(429)]
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        never = patient.post(f"{url}/v1/completions", json=body | {"n": 6})
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"


def test_nan_logits_are_a_server_error():
    engine = an_engine(params=with_nan(with_words(), 7))
    body = {"max_tokens": 3, "temperature": 0}
    with serving(a_service(), engine) as url:

        def post(prompt, stream):
            asked = body | {"prompt": prompt, "stream": stream}
            return patient.post(f"{url}/v1/completions", json=asked)

        for stream, status in ((False, 500), (True, 200)):
            got, fine = post("w7 w3", stream), post("w3", stream)
            error = json.loads(got.text.removeprefix("data: ").split("\n")[0])["error"]
            assert (got.status_code, error["code"]) == (status, "nan_logits"), stream
            assert "logits are NaN" in error["message"], stream
            assert fine.status_code == 200 and "error" not in fine.text, stream


def test_health_follows_the_engine(monkeypatch):
    """Not ready, then ready, then failed."""
    service = a_service()
    with serving(service, None) as url:
        assert patient.get(f"{url}/health").status_code == 503
        assert patient.get(f"{url}/version").status_code == 200
        got = patient.post(f"{url}/v1/completions", json={"prompt": "w1"})
        assert got.status_code == 503 and "being loaded" in got.json()["error"]["message"]
        engine = an_engine()
        service.begin(engine)
        assert patient.get(f"{url}/health").json() == {"status": "ready"}

        def fail(*_, **__):
            raise OSError("the device is gone: /secret/path")

        monkeypatch.setattr(engine.engine._runner, "run", fail)
        got = patient.post(f"{url}/v1/completions", json={"prompt": "w1"})
        assert got.status_code == 500 and "secret" not in got.text
        assert patient.get(f"{url}/health").status_code == 503
        assert patient.post(f"{url}/v1/completions", json={"prompt": "w1"}).status_code == 503


def test_hung_program_is_unhealthy_and_a_lost_process_reaches_clients(monkeypatch):
    service, engine, go_on, hangs = a_service(), an_engine(), threading.Event(), threading.Event()
    step, steps = engine.engine.step, []

    def slow():
        steps.append(1)
        if len(steps) > 4:
            hangs.set()
            go_on.wait(60)
        return step()

    monkeypatch.setattr(engine.engine, "step", slow)
    with serving(service, engine) as url, ThreadPoolExecutor(1) as pool:
        service.max_busy_seconds = 0
        assert patient.get(f"{url}/health").status_code == 200  # asleep
        body = {"prompt": "w1", "max_tokens": 80, "ignore_eos": True, "stream": True}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        try:
            assert hangs.wait(60)
            hung = patient.get(f"{url}/health")
            run.notify_clients(service)
            assert service.inside == 0
            got = answer.result(10)
            assert patient.get(f"{url}/health").status_code == 503
        finally:
            go_on.set()
    assert hung.status_code == 503
    assert hung.json() == {"status": "the engine has been running one step for more than 0 s"}
    assert got.status_code == 200
    last = got.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "engine_error"


def test_runtime_error_at_startup_is_reported_like_other_refusals():
    """The command prints an OSError as one line."""

    def fail():
        raise RuntimeError("device not available")

    with run.listen("127.0.0.1", 0) as listening:
        message = "^the engine could not be prepared: device not available$"
        with pytest.raises(OSError, match=message):
            run.serve(Options("tiny"), fail, listening)


def test_default_variables_that_the_template_lacks_end_the_start():
    with closing(an_engine()) as engine:
        message = "chat_template_kwargs={'unknown': 1}: must be a variable of the chat template"
        with pytest.raises(ValueError, match=message):
            a_service(template_kwargs={"more": "w8", "unknown": 1}).begin(engine)


def test_reasoning_is_returned_apart():
    """The prompt opens it, and </think> ends it; counted in usage, streamed and not."""
    words = with_words(**{"<think>": 8, "</think>": 9})
    body = {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 4, "temperature": 0}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    fives, ends = "w5 w5 w5 w5", "</think> </think> </think>"
    with serving(a_service(splits_reasoning=True), an_engine(params=words)) as url:
        for word, opens, parts, number in (
            (5, "<think>", (fives, ""), 4),
            (9, "<think>", ("", ends), 1),
            (5, "", ("", fives), 0),
        ):
            asked = body | {"logit_bias": {word: 100}, "chat_template_kwargs": {"more": opens}}
            whole, streamed = (
                patient.post(f"{url}/v1/chat/completions", json=asked | {"stream": stream})
                for stream in (False, True)
            )
            message = whole.json()["choices"][0]["message"]
            events = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            for name, part in zip(("reasoning_content", "content"), parts, strict=True):
                assert message.get(name, "").strip() == part
                assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "")
            for usage in (whole.json()["usage"], events[-1]["usage"]):
                assert usage["completion_tokens_details"] == {"reasoning_tokens": number}
        # a message that begins with reasoning is continued
        begun = {"role": "assistant", "content": "<think> w3"}
        asked = body | {"messages": [begun], "continue_final_message": True}
        made = patient.post(f"{url}/v1/chat/completions", json=asked | {"logit_bias": {5: 100}})
        message = made.json()["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == (fives, "")
        # tokens whose text a stop string holds back count too
        stops = asked | {"logit_bias": {5: 100}, "stop": [f"{fives} w5"], "stream": True}
        streamed = patient.post(f"{url}/v1/chat/completions", json=stops).text.split("\n\n")
        usage = json.loads(streamed[-3].removeprefix("data: "))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_calls_of_tools_are_returned_apart():
    """Whole and streamed; each token of this model is a whole call, or a broken one."""
    call, broken = '<tool_call>{"name":"f"}</tool_call>', "<tool_call>{</tool_call>"
    words = with_words(**{call: 8, broken: 9})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 2, "temperature": 0}
    body |= {"ignore_eos": True, "tools": tools}
    said = f"{broken} {broken}"
    with serving(a_service(), an_engine(params=words)) as url:
        for word, more, content, count in (
            (8, {}, None, 2),
            (8, {"parallel_tool_calls": False}, None, 1),
            (9, {}, said, 0),
            (8, {"tool_choice": "none"}, f"{call} {call}", 0),
        ):
            asked = body | {"logit_bias": {word: 100}} | more
            whole, streamed = (
                patient.post(f"{url}/v1/chat/completions", json=asked | {"stream": stream})
                for stream in (False, True)
            )
            choice = whole.json()["choices"][0]
            deltas = [
                json.loads(line[6:])["choices"][0]["delta"]
                for line in streamed.text.split("\n\n")[:-2]
            ]
            told = choice["message"]["content"]
            assert (told and told.strip()) == content
            assert "".join(delta.get("content") or "" for delta in deltas) == (told or "")
            calls = choice["message"].get("tool_calls", [])
            later = [each for delta in deltas for each in delta.get("tool_calls", [])]
            assert [each.pop("index") for each in later] == [*range(count)]
            assert len({each.pop("id") for each in (*calls, *later)}) == 2 * count
            expected = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
            assert calls == later == [expected] * count
        # a reply that ends with a call, which may lack its last tag, has its own reason
        stops = body | {"logit_bias": {8: 100}, "stop": "</tool_call>"}
        for choice, reason in (("auto", "tool_calls"), ("none", "stop")):
            asked = stops | {"tool_choice": choice}
            made = patient.post(f"{url}/v1/chat/completions", json=asked).json()
            assert made["choices"][0]["finish_reason"] == reason
        # OpenAI's client reads calls, and joins those of a stream
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
        given: Any = {name: stops[name] for name in ("messages", "tools", "logit_bias", "stop")}
        whole = client.chat.completions.create(model="tiny", **given)
        with client.chat.completions.stream(model="tiny", **given) as stream:
            joined = stream.get_final_completion()
        for each in (whole, joined):
            calls = each.choices[0].message.tool_calls
            assert calls is not None and len(calls) == 1 and calls[0].type == "function"
            assert (calls[0].function.name, calls[0].function.arguments) == ("f", "{}")
