"""Tests that Open WebUI can use the server as an OpenAI connection.

Open WebUI needs its own database, so the tests send the requests that its version 0.12.4 posts:
`routers/openai.py` (models, and the removal of its own fields), `utils/middleware.py` (chats, and
the requests after tool calls), `utils/payload.py` (parameters) and `routers/tasks.py` (tasks).
"""

import json
from typing import Any

import pytest

from tests.support import patient
from tests.support.serving_http import a_service, an_engine, serving, with_words

CALL = '<tool_call>{"name":"get_current_timestamp","arguments":{}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It.",
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, properties in (
        ("get_current_timestamp", {}),
        ("search_notes", {"query": {"type": "string"}, "count": {"type": "integer", "default": 5}}),
    )
]
# without metadata, which it removes, and with usage, if the model has this capability
CHAT = {"stream": True, "model": "tiny", "stream_options": {"include_usage": True}}
HISTORY = [
    {"role": "system", "content": "w1"},
    {"role": "user", "content": "w3 w14"},
    {"role": "assistant", "content": "w15"},
    {"role": "user", "content": "w92"},
]
# the advanced parameters of a chat; it sends those that are set
PARAMETERS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 42,
    "max_tokens": 6,
    "stop": ["w9 w9"],
}


@pytest.fixture(scope="module")
def url():
    with serving(a_service(api_key="key"), an_engine(params=with_words(**{CALL: 8}))) as address:
        yield f"{address}/v1"


def sent(url: str, body: dict[str, Any]):
    got = patient.post(
        f"{url}/chat/completions", json=body, headers={"Authorization": "Bearer key"}
    )
    assert got.status_code == 200, got.text
    return got


def streamed(url: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], str, dict]:
    """Returns a stream's text, calls, reason and usage, joined as Open WebUI joins them."""
    got = sent(url, body)
    assert got.headers["content-type"].startswith("text/event-stream")
    text, calls, reason, usage = "", [], "", {}
    for line in filter(None, got.text.split("\n")):
        assert line.startswith("data:")
        if (data := line[5:].strip()) == "[DONE]":
            break
        event = json.loads(data)
        usage |= event.get("usage") or {}
        for choice in event["choices"][:1]:
            text += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls", [])
            reason = choice["finish_reason"] or reason
    else:
        pytest.fail("the stream has no end")
    assert [call["index"] for call in calls] == [*range(len(calls))]
    return text, calls, reason, usage


def test_open_webui_finds_the_model(url):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    got = patient.get(f"{url}/models", headers=headers)
    assert got.status_code == 200
    assert [model["id"] for model in got.json()["data"]] == ["tiny"]
    # it shows the text of an error
    assert patient.get(f"{url}/models").json()["error"]["message"]


def test_open_webui_chats(url):
    for parameters in ({"max_tokens": 6}, PARAMETERS):
        body = CHAT | parameters | {"messages": HISTORY}
        text, calls, reason, usage = streamed(url, body)
        assert 0 < len(text.split()) <= 6 and not calls and reason in ("length", "stop")
        assert usage["completion_tokens"] > 0
    # its button Continue sends the unfinished reply as the last message
    text, *_ = streamed(
        url, body | {"messages": [*HISTORY, {"role": "assistant", "content": text}]}
    )
    assert text


def test_open_webui_calls_tools(url):
    """Its tools are always in the request; a second one has the call and its result."""
    body = CHAT | {"messages": HISTORY, "tools": TOOLS, "logit_bias": {"8": 100}}
    body |= {"temperature": 0, "max_tokens": 4, "stop": ["</tool_call>"]}
    _, (call,), reason, _ = streamed(url, body)
    assert (reason, call["function"]) == (
        "tool_calls",
        {"name": "get_current_timestamp", "arguments": "{}"},
    )
    made = {"role": "assistant", "content": "", "tool_calls": [{**call}]}
    made["tool_calls"][0].pop("index")
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"current_timestamp": 1}'}
    after = body | {"messages": [*HISTORY, made, result]}
    del after["logit_bias"]
    text, calls, _, usage = streamed(url, after)
    assert text and not calls and usage["completion_tokens"] == 4


def test_open_webui_gets_titles_tags_and_follow_ups(url):
    """Tags and follow-ups set no limit, and a title sets that of the model, or 1000."""
    for limit in ({}, {"max_tokens": 50}):
        asked = [{"role": "user", "content": "w1 w2 w3"}]
        got = sent(url, {"model": "tiny", "messages": asked, "stream": False} | limit)
        (choice,) = got.json()["choices"]
        assert choice["message"]["content"]
        assert got.json()["usage"]["completion_tokens"] <= limit.get("max_tokens", 96)
