"""Tests that LangChain and LiteLLM work with the server as they are."""

import importlib
import importlib.util
from typing import Any, Literal

import pydantic
import pytest

from tests.support.characters import with_characters
from tests.support.serving_http import a_service, an_engine, serving


class City(pydantic.BaseModel):
    """A city."""

    city: Literal["Oslo", "Rome"]
    sights: Literal[5, 70]


@pytest.fixture(scope="module")
def url():
    engine = an_engine(params=with_characters(), max_model_len=512, kv_cache_tokens=2048)
    with serving(a_service(tool_call_parser="hermes"), engine) as address:
        yield f"{address}/v1"


def needs(module: str) -> pytest.MarkDecorator:
    """Marks a test of a client, which the other tests do not install."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {module.replace('_', '-')}")


@needs("langchain_openai")
def test_langchain_calls_tools_and_parses_outputs(url):
    client = importlib.import_module("langchain_openai")
    messages = importlib.import_module("langchain_core.messages")
    llm = client.ChatOpenAI(model="tiny", base_url=url, api_key="-", max_tokens=90, temperature=0)
    whole = llm.invoke("hello").content
    assert whole and "".join(piece.content for piece in llm.stream("hello")) == whole
    for method in ("json_schema", "function_calling"):
        made = llm.with_structured_output(City, method=method).invoke("a city ")
        assert isinstance(made, City), method
    for choice in ("any", "City"):
        bound = llm.bind_tools([City], tool_choice=choice, parallel_tool_calls=False)
        made = bound.invoke("go ")
        (call,) = made.tool_calls
        City.model_validate(call["args"])
        pieces = [*bound.stream("go ")]
        joined = sum(pieces[1:], start=pieces[0])
        assert [each["args"] for each in joined.tool_calls] == [call["args"]]
        result = messages.ToolMessage("fine", tool_call_id=call["id"])
        after = llm.invoke([messages.HumanMessage("go "), made, result])
        assert after.usage_metadata["output_tokens"] > 0


@needs("litellm")
@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_reads_answers_calls_and_streams(url):
    client = importlib.import_module("litellm")
    tool = {
        "type": "function",
        "function": {"name": "visit", "parameters": City.model_json_schema()},
    }
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    choices = {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}
    for model in ("openai/tiny", "hosted_vllm/tiny"):
        for more in ({}, {"response_format": City}, forced, choices):
            asked: dict[str, Any] = {"model": model, "api_base": url, "api_key": "-"} | more
            asked |= {"messages": [{"role": "user", "content": "hi "}], "max_tokens": 90}
            asked |= {"temperature": 0}
            whole = client.completion(**asked)
            joined = client.stream_chunk_builder([*client.completion(**asked, stream=True)])
            said, streamed = (each.choices[0].message for each in (whole, joined))
            assert (streamed.content or "") == (said.content or "")
            if more is forced:
                for each in (said, streamed):
                    (call,) = each.tool_calls
                    City.model_validate_json(call.function.arguments)
            elif "response_format" in more:
                City.model_validate_json(said.content)
            elif more is choices:
                assert said.content in ("a", "b")
