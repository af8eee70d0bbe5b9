"""Tests structured outputs and forced tool calls through HTTP, with OpenAI's own client too."""

import json
import re
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.support import patient
from tests.support.characters import with_characters
from tests.support.serving_http import a_service, an_engine, serving

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "sights": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "sights"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"to": {"enum": [1, 9]}}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("visit", CITY),
        ("count", COUNT),
    )
]


def a_tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


HELLO = {"messages": [{"role": "user", "content": "hello "}], "max_tokens": 90, "temperature": 0}


class City(pydantic.BaseModel):
    """The same as CITY."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    sights: Annotated[int, pydantic.Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def url():
    engine = an_engine(params=with_characters(), max_model_len=192, kv_cache_tokens=768)
    with serving(a_service(tool_call_parser="hermes"), engine) as address:
        yield address


def posted(url, path, **body):
    return patient.post(f"{url}/v1/{path}", json=body)


def chat(url, **more) -> dict[str, Any]:
    """The only choice, which must be the same streamed."""
    got = posted(url, "chat/completions", **HELLO | more)
    assert got.status_code == 200, got.text
    (choice,) = got.json()["choices"]
    details = got.json()["usage"].get("completion_tokens_details", {})
    lines = posted(url, "chat/completions", **HELLO | more, stream=True).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines.split("\n\n")[:-2]]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said == (choice["message"]["content"] or "")
    return choice | details


def test_json_is_valid_by_the_schema(url):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    ways: list[dict[str, Any]] = [
        {"response_format": schema},
        {"structured_outputs": {"json": CITY}},
        {"structured_outputs": {"json": json.dumps(CITY), "disable_any_whitespace": True}},
    ]
    for way in ways:
        choice = chat(url, **way)
        made = City.model_validate_json(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and made.city in ("Oslo", "Rome")
    whole = chat(url, response_format={"type": "json_object"}, max_tokens=12)
    assert whole["message"]["content"].lstrip().startswith("{")


def test_completions_take_choices_expressions_and_grammars(url):
    body = {"prompt": "hello ", "max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 3}
    for wanted, pattern in (
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"grammar": 'root ::= "x" | "(" "y" ")"'}, r"x|\(y\)"),
    ):
        got = posted(url, "completions", **body, structured_outputs=wanted).json()
        assert all(re.fullmatch(pattern, each["text"]) for each in got["choices"]), wanted
        assert {each["finish_reason"] for each in got["choices"]} == {"stop"}
    got = posted(url, "completions", **body, allowed_token_ids=[64, 65]).json()
    assert all({*each["text"]} <= {*"ab"} for each in got["choices"]), got


def test_tools_can_be_demanded(url):
    named = {"type": "function", "function": {"name": "count"}}
    for choice, names in (("required", {"visit", "count"}), (named, {"count"})):
        made = chat(url, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        (call,) = made["message"]["tool_calls"]
        assert call["function"]["name"] in names and made["finish_reason"] == "tool_calls"
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "visit":
            City.model_validate(arguments)
        else:
            assert all(value <= 9 for value in arguments.values())


def test_arguments_may_refer_to_definitions(url):
    parameters = {"$defs": {"City": CITY}, "properties": {"to": {"$ref": "#/$defs/City"}}}
    parameters["required"] = ["to"]
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    made = chat(url, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = made["message"]["tool_calls"]
    assert City.model_validate(json.loads(call["function"]["arguments"])["to"])


def test_output_that_the_grammar_refuses_later_is_the_clients_error(url):
    # the object's 600 optional properties are too many for the parser after the brace
    schema = {"type": "object", "properties": {f"p{nth}": {} for nth in range(600)}}
    got = posted(url, "chat/completions", **HELLO, structured_outputs={"json": schema})
    assert got.status_code == 400 and "structured_outputs" in got.json()["error"]["message"]
    assert "<state>" not in got.text
    assert chat(url, structured_outputs={"regex": "ab"})["message"]["content"] == "ab"


def test_openais_client_parses_its_own_models(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    given: Any = HELLO
    made = client.chat.completions.parse(model="tiny", response_format=City, **given)
    assert isinstance(made.choices[0].message.parsed, City)
    tool = openai.pydantic_function_tool(City)
    made = client.chat.completions.parse(
        model="tiny", tools=[tool], tool_choice="required", parallel_tool_calls=False, **given
    )
    calls = made.choices[0].message.tool_calls
    assert calls is not None and isinstance(calls[0].function.parsed_arguments, City)


@pytest.mark.slow
def test_models_may_think_first():
    """The structure follows their reasoning, which the logit bias makes empty."""
    params = with_characters()
    assert params.tokenizer is not None
    think, end = (params.tokenizer.encode(tag)[0] for tag in ("<think>", "</think>"))
    engine = an_engine(params=params, max_model_len=192, kv_cache_tokens=768)
    service = a_service(tool_call_parser="hermes", splits_reasoning=True)
    wanted = {"structured_outputs": {"json": CITY, "disable_any_whitespace": True}}
    with serving(service, engine) as url:
        for opening, bias, number in (
            ("", {think: 90, end: 100}, 2),
            ("<think>", {end: 100}, 1),
            ("", {think: -100}, 0),
        ):
            asked = wanted | {"chat_template_kwargs": {"opening": opening}}
            asked["logit_bias"] = {str(token): value for token, value in bias.items()}
            choice = chat(url, **asked)
            City.model_validate_json(choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
            # the tags count
            assert choice["reasoning_tokens"] == number
        # a message is continued within its reasoning
        begun = {"role": "assistant", "content": "<think>I"}
        asked = {"structured_outputs": {"regex": "[0-9]{3}"}, "messages": [begun]}
        asked |= {"continue_final_message": True, "logit_bias": {str(end): 100}}
        choice = chat(url, **asked)
        assert re.fullmatch("[0-9]{3}", choice["message"]["content"])


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format", "must be given"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "structured_outputs",
            "Invalid type: x",
        ),
        (
            "chat",
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "must not be given with response_format",
        ),
        ("chat", {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        (
            "completions",
            {"structured_outputs": {"jsn": "a"}},
            "structured_outputs",
            "must be among",
        ),
        ("completions", {"structured_outputs": {}}, "structured_outputs", "has no format"),
        ("completions", {"allowed_token_ids": [1000]}, "allowed_token_ids", "from 0 to 299"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "must be among tools"),
        ("chat", {"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
        *(
            ("chat", {"tools": [a_tool(parameters)], "tool_choice": "required"}, "tools", message)
            for parameters, message in (
                (5, "tools[0].function.parameters=5: must be the schema of an object"),
                ({"type": "string"}, "must be the schema of an object"),
                ({"properties": {"a": {"type": "x"}}}, "tools: calls"),
            )
        ),
        (
            "chat",
            {"tools": TOOLS, "tool_choice": {"function": {"name": "fly"}}},
            "tool_choice",
            "tool_choice='fly': must be among tools",
        ),
        (
            "chat",
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "must be 'auto' or 'none'",
        ),
    ],
)
def test_malformed_requests_are_refused(url, path, body, param, message):
    given = {"prompt": "a"} if path == "completions" else HELLO
    path = path if path == "completions" else "chat/completions"
    got = posted(url, path, **given | body)
    error = got.json()["error"]
    assert got.status_code == 400 and message in error["message"], got.text
    assert error["param"] == param, got.text
