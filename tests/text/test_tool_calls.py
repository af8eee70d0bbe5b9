"""Tests that calls of functions are found in texts, whole or in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.text.tool_calls import PARSERS, Reply, ToolCall, parser_of, split_tool_calls

pytestmark = pytest.mark.pure

WEATHER = '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}'
TIME = '{"name": "time", "arguments": {}}'
CALLS = (ToolCall("weather", '{"city": "Zürich", "days": [1, 2]}'), ToolCall("time", "{}"))


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


NESTED = f'{{"name": "f", "arguments": {{"x": {"[" * 200}{"]" * 200}}}}}'
HERMES = {
    "": Reply(""),
    "no call {}\n": Reply("no call {}\n"),
    tagged(WEATHER): Reply("", CALLS[:1]),
    tagged(WEATHER, TIME): Reply("", CALLS),
    f"Let me look.\n\n{tagged(WEATHER)}\n": Reply("Let me look.", CALLS[:1]),
    f"{tagged(WEATHER)}\nThen:\n{tagged(TIME)} Done. ": Reply("Then: Done. ", CALLS),
    f"<tool_call>{TIME}": Reply("", CALLS[1:]),  # ends without the last tag
    '<tool_call>{"name": "time"}</tool_call>': Reply("", CALLS[1:]),
    "a < b, <tool and <tool_call": Reply("a < b, <tool and <tool_call"),
    # broken calls stay in the text
    "<tool_call>{</tool_call>": Reply("<tool_call>{</tool_call>"),
    f"So:\n<tool_call>[{TIME}]</tool_call> and\n{tagged(TIME)}": Reply(
        f"So:\n<tool_call>[{TIME}]</tool_call> and", CALLS[1:]
    ),
    tagged('{"name": "f", "arguments": {"x": NaN}}'): Reply(
        tagged('{"name": "f", "arguments": {"x": NaN}}')
    ),
    tagged('{"name": "", "arguments": {}}'): Reply(tagged('{"name": "", "arguments": {}}')),
    tagged('{"name": 3}'): Reply(tagged('{"name": 3}')),
    tagged('{"name": "f", "arguments": "{}"}'): Reply(tagged('{"name": "f", "arguments": "{}"}')),
    tagged("[" * 100_000): Reply(tagged("[" * 100_000)),
    tagged(NESTED): Reply(tagged(NESTED)),
    tagged('{"name": "f", "arguments": {"x": 1e999}}'): Reply(
        tagged('{"name": "f", "arguments": {"x": 1e999}}')
    ),
    tagged('{"name": "f", "arguments": {"x": "a\nb"}}'): Reply(
        "", (ToolCall("f", r'{"x": "a\nb"}'),)
    ),
    # half of a surrogate pair stays an escape; no function has such a name
    tagged(r'{"name": "f", "arguments": {"x": "\ud83d"}}'): Reply(
        "", (ToolCall("f", r'{"x": "\ud83d"}'),)
    ),
    tagged(r'{"name": "\ud83d"}'): Reply(tagged(r'{"name": "\ud83d"}')),
    # a string may contain the last tag
    tagged('{"name": "f", "arguments": {"x": "a</tool_call>b</tool_call>"}}', TIME): Reply(
        "", (ToolCall("f", '{"x": "a</tool_call>b</tool_call>"}'), CALLS[1])
    ),
    '<tool_call>{"x": "a</tool_call>b': Reply('<tool_call>{"x": "a</tool_call>b'),
}
LLAMA = {
    "": Reply(""),
    "no call {}": Reply("no call {}"),
    WEATHER.replace("arguments", "parameters"): Reply("", CALLS[:1]),
    f" {WEATHER}; {TIME}\n": Reply("", CALLS),
    f"<|python_tag|>{TIME}": Reply("", CALLS[1:]),
    "<|python": Reply("<|python"),
    f"{TIME} is a call": Reply(f"{TIME} is a call"),
    '{"answer": 3}': Reply('{"answer": 3}'),
    '{"name": "Ada", "born": 1815}': Reply('{"name": "Ada", "born": 1815}'),
    "{" * 100_000: Reply("{" * 100_000),
}
ALL = {"hermes": HERMES, "llama3_json": LLAMA}


@pytest.mark.parametrize("parser", ALL)
def test_calls_and_text_are_split(parser):
    for text, reply in ALL[parser].items():
        assert split_tool_calls(text, parser) == reply, text[:80]


@pytest.mark.parametrize("parser", ALL)
@given(data=st.data())
def test_pieces_give_what_the_whole_text_gives(parser, data):
    text = data.draw(st.sampled_from([text for text in ALL[parser] if len(text) < 1000]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    splitter = PARSERS[parser]()
    made = [splitter.push(piece, ended=False) for piece in pieces]
    made.append(splitter.push("", ended=True))
    calls = tuple(call for part in made for call in part.calls)
    assert Reply("".join(part.text for part in made), calls) == ALL[parser][text]


def test_text_is_not_held_back_longer_than_it_may_be_a_call():
    parser = PARSERS["hermes"]()
    for piece, said in (
        ("Hello,", "Hello,"),
        (" <", ""),
        ("b>", " <b>"),
        ("\n<tool_call>", ""),
        (TIME, ""),
    ):
        assert parser.push(piece, ended=False) == Reply(said)
    assert parser.push("</tool_call>", ended=False) == Reply("", CALLS[1:])
    assert PARSERS["llama3_json"]().push("The", ended=False) == Reply("The")


@given(st.text(), st.dictionaries(st.text(), st.integers() | st.text()))
def test_any_arguments_are_found(name, arguments):
    whole = json.dumps({"name": name, "arguments": arguments})
    found = split_tool_calls(f"<tool_call>{whole}</tool_call>").calls
    assert [(call.name, json.loads(call.arguments)) for call in found] == (
        [(name, arguments)] if name else []
    )


def test_the_format_is_inferred_from_the_template():
    assert parser_of("… <tool_call>\n{{ call | tojson }}") == "hermes"
    assert parser_of("… <tool_call>\n<function={{ call.name }}>") is None
    assert parser_of('{% if m.tool_calls %}{"name": "f", "parameters": {…}}') == "llama3_json"
    assert parser_of('Schemas have {"parameters": …}') is None
    assert parser_of("{{ messages[0].content }}") is None
    with pytest.raises(ValueError, match="parser='xml': must be 'hermes' or 'llama3_json'"):
        split_tool_calls("", "xml")
