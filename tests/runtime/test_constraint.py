"""Tests which tokens may follow in a structured output, against what the format says."""

import json
import re

import jsonschema
import numpy as np
import pytest

from jsparse import SamplingParams
from jsparse.runtime.constraint import Constraint, constraint
from jsparse.runtime.structured_outputs import StructuredOutputsParams, bits
from jsparse.text.tool_calls import calls_only, split_tool_calls
from tests.support.characters import tokenizer_of_characters
from tests.support.tiny import VOCAB

TOKENIZER = tokenizer_of_characters()
BYTES = TOKENIZER.token_bytes()
ENDS = frozenset(TOKENIZER.eos_token_ids)
NO_PROMPT = np.zeros(0, np.int32)


def begun(ends=ENDS, prompt=NO_PROMPT, **wanted) -> Constraint:
    return constraint(TOKENIZER, StructuredOutputsParams(**wanted), ends, VOCAB, prompt)


def allowed(state: Constraint) -> list[int]:
    """The ids that may follow."""
    flags = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return np.flatnonzero(flags).tolist()


def drawn(state: Constraint, rng: np.random.Generator, most: int = 200) -> str | None:
    """A random output; None: it is not complete after `most` tokens."""
    made: list[int] = []
    while not state.complete and len(made) < most:
        ids = allowed(state)
        # random strings rarely end: quotes and brackets are likelier
        weights = [9 if BYTES[token][:1] in b'"}],:' else 1 for token in ids]
        token = int(rng.choice(ids, p=np.array(weights) / sum(weights)))
        if token in ENDS:
            return TOKENIZER.decode(made)
        state.take([token])
        made.append(token)
    assert state.error is None
    return TOKENIZER.decode(made) if state.complete else None


def test_next_tokens_of_choices_are_those_that_lead_to_one():
    choices = ["yes", "yesterday", "no", "nö", "n\n"]
    of_all = [choice.encode() for choice in choices]
    rng = np.random.default_rng(0)
    for _ in range(20):
        state, made = begun(choice=choices), b""
        while True:
            expected = [
                token
                for token in range(len(BYTES))
                if BYTES[token]
                and token not in ENDS
                and any(choice.startswith(made + BYTES[token]) for choice in of_all)
            ]
            expected += [end for end in ENDS if made in of_all]
            # bytes that must follow need not be cut into tokens in every way
            given = allowed(state)
            assert {*given} <= {*expected}, made
            for rest in (choice[len(made) :] for choice in of_all if choice.startswith(made)):
                assert (
                    any(rest.startswith(BYTES[token]) for token in given)
                    if rest
                    else ({*given} >= ENDS)
                )
            token = int(rng.choice(given))
            if token in ENDS:
                break
            made += BYTES[token]
            state.take([token])
            assert state.complete == (made in of_all and made != b"yes")
            if state.complete:
                break
        assert made in of_all


@pytest.mark.parametrize("pattern", ["[0-9]{3}-(a|bc)+", r"[a-z]{1,9}( \d{1,3}){2}", "(tr|es)*!?"])
def test_outputs_match_the_expression(pattern):
    rng = np.random.default_rng(1)
    found = [drawn(begun(regex=pattern), rng) for _ in range(20)]
    texts = [text for text in found if text is not None]
    assert len(texts) > 10 and all(re.fullmatch(pattern, text) for text in texts)


def random_schema(rng: np.random.Generator, depth: int = 0) -> dict:
    """A schema of types, bounds and alternatives."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] * (depth < 3)
    low = int(rng.integers(-20, 20))
    match kind := str(rng.choice(kinds)):
        case "string":
            return {"type": kind, "minLength": 1, "maxLength": int(rng.integers(1, 9))}
        case "integer" | "number":
            return {"type": kind, "minimum": low, "maximum": low + int(rng.integers(0, 99))}
        case "enum":
            return {"enum": [["a", 1, None, True, "tr"][nth] for nth in rng.permutation(5)[:3]]}
        case "const":
            return {"const": [{"a": [1]}, "x", -3, False][int(rng.integers(4))]}
        case "object":
            names = [f"p{nth}" for nth in range(int(rng.integers(0, 4)))]
            needed = [name for name in names if rng.random() < 0.6]
            own = {name: random_schema(rng, depth + 1) for name in names}
            extra = bool(rng.random() < 0.2)
            return {"type": kind, "properties": own, "required": needed} | (
                {} if extra else {"additionalProperties": False}
            )
        case "array":
            least = int(rng.integers(0, 3))
            items = random_schema(rng, depth + 1)
            bounds = {"minItems": least, "maxItems": least + int(rng.integers(0, 3))}
            return {"type": kind, "items": items} | bounds
        case "anyOf":
            return {kind: [random_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


def complete_outputs(schemas: int) -> int:
    """Draws an output of each of some random schemas; returns how many are complete.

    Each of these must be valid.
    """
    rng, count = np.random.default_rng(2), 0
    for nth in range(schemas):
        schema, compact = random_schema(rng), bool(nth % 2)
        text = drawn(begun(json=schema, disable_any_whitespace=compact), rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            count += 1
    return count


def test_outputs_are_valid_by_their_schema():
    assert complete_outputs(60) > 45


@pytest.mark.slow
def test_outputs_of_two_thousand_schemas_are_valid():
    assert complete_outputs(2000) > 1500


def test_any_object_and_grammars_of_both_kinds():
    rng = np.random.default_rng(3)
    objects = [drawn(begun(json_object=True), rng) for _ in range(10)]
    assert all(isinstance(json.loads(text), dict) for text in objects if text)
    lark = 'start: "a" body* "b"\nbody: "(" body ")" | "x"'
    gbnf = 'root ::= "a" body* "b"\nbody ::= "(" body ")" | "x"'
    for grammar in (lark, gbnf):
        texts = [drawn(begun(grammar=grammar), rng) for _ in range(10)]
        assert any(texts)
        for text in filter(None, texts):
            while "(x)" in text:
                text = text.replace("(x)", "x")
            assert re.fullmatch("ax*b", text), text


def test_only_ends_of_the_request_end_it():
    (end,), stop = ENDS, TOKENIZER.encode("!")[0]
    for ends, expected in ((frozenset(), []), (frozenset([stop]), [stop]), (ENDS, [end])):
        state = begun(ends=ends, regex="a+")
        assert not set(allowed(state)) & {end, stop}
        state.take(TOKENIZER.encode("a"))
        assert sorted(set(allowed(state)) & {end, stop}) == expected


@pytest.mark.parametrize("vocab_size", [len(BYTES), VOCAB, 1000])
def test_models_may_have_more_logits_than_tokens(vocab_size):
    wanted = StructuredOutputsParams(regex="(?s:.*)")
    state = constraint(TOKENIZER, wanted, ENDS, vocab_size, NO_PROMPT)
    assert state.allowed().shape == (-(-vocab_size // 32),)
    ids = allowed(state)
    assert TOKENIZER.encode("a")[0] in ids and max(ids) < len(BYTES)


@pytest.mark.parametrize(
    "options", [{"ends": frozenset()}, {"min_tokens": 1}], ids=["ignore_eos", "min_tokens"]
)
def test_formats_that_allow_no_first_token_are_refused(options):
    wanted, ends = StructuredOutputsParams(regex=""), options.get("ends", ENDS)
    assert allowed(begun(regex="")) == [*ENDS]
    with pytest.raises(ValueError, match="structured_outputs.regex='': must allow a first token"):
        constraint(TOKENIZER, wanted, ends, VOCAB, NO_PROMPT, options.get("min_tokens", 0))


def test_many_choices_and_long_chains_of_rules_compile():
    choices = [f"c{nth}\x7f" for nth in range(9000)]
    assert drawn(begun(choice=choices), np.random.default_rng(0)) in choices
    chain = "\n".join(["start: r0", *(f"r{nth}: r{nth + 1}" for nth in range(7500)), 'r7500: "a"'])
    assert allowed(begun(grammar=chain)) == TOKENIZER.encode("a")
    nested = {
        f"a{nth}": {"properties": {"x": {"$ref": f"#/$defs/a{nth + 1}"}}} for nth in range(2000)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": nested | {"a2000": {"type": "null"}}}
    assert allowed(begun(json=schema))


def test_copies_are_independent():
    state = begun(choice=["ab", "cd"])
    other = state.copy()
    state.take(TOKENIZER.encode("a"))
    assert allowed(state) != allowed(other) == allowed(begun(choice=["ab", "cd"]))


def test_reasoning_is_free_and_precedes_the_output():
    a, think = TOKENIZER.encode("a"), TOKENIZER.encode("<think>")
    # not the padding past the last token
    free = [token for token in range(len(BYTES)) if token not in ENDS]
    for opened in (False, True):
        prompt = np.array(TOKENIZER.encode("x<think>\n" if opened else "x"))
        state = begun(prompt=prompt, choice=["a"], after_reasoning=True)
        if not opened:
            assert allowed(state) == sorted([*a, *think])
            at_once = state.copy()
            at_once.take(a)
            assert at_once.complete
            state.take(think)
        state.take(TOKENIZER.encode("never mind a</thin"))
        assert allowed(state) == free
        state.take([VOCAB - 1])  # a token without bytes
        state.take(TOKENIZER.encode("k>"))
        assert allowed(state) == a and not state.complete
        state.take(a)
        assert state.complete
    state = begun(choice=["a"])
    assert allowed(state) == a


def test_bits_are_those_of_the_ids():
    for ids in ([], [0], [31, 32, 299], [*range(VOCAB)]):
        words = bits(ids, VOCAB)
        assert words.dtype == np.uint32 and words.shape == (10,)
        assert [n for n in range(320) if words[n // 32] >> (n % 32) & 1] == ids


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "structured_outputs has no format: must have one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice: must have one of"),
        ({"json": 3}, "structured_outputs.json=3: must be a JSON schema"),
        ({"json": "{"}, "structured_outputs.json: "),
        ({"json": {"type": "text"}}, "structured_outputs.json: Invalid type: text"),
        ({"json": {"enum": [{1, 2}]}}, "structured_outputs.json: must be JSON"),
        ({"json": {"$ref": "#/nowhere"}}, "structured_outputs.json: Pointer '/nowhere'"),
        ({"regex": "(a"}, "structured_outputs.regex:[^!]*unclosed group"),
        ({"regex": "a" * 300_000}, "regex has 300,000 characters: must have at most 131,072"),
        ({"grammar": "start: nothing"}, 'structured_outputs.grammar:[^!]*unknown name: "nothing"'),
        ({"grammar": ["a"]}, "structured_outputs.grammar=.*: must be a string"),
        ({"choice": []}, "structured_outputs.choice=.*: must be a list of 1 to 10,000 strings"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json"),
        ({"regex": "a\ud800"}, "structured_outputs.regex=.*: must be text without surrogates"),
        ({"json": 0}, "structured_outputs.json=0: must be a JSON schema"),
        ({"choice": "ab"}, "structured_outputs.choice='ab': must be a list"),
        ({"choice": ["a", ""]}, "must be a list of 1 to 10,000 strings of at least one"),
        ({"json_object": 1}, "structured_outputs.json_object=1: must be true"),
        ({"json_object": True, "disable_any_whitespace": 1}, "must be true or false"),
        ({"jason": {}}, "structured_outputs.jason: must be among json, regex"),
    ],
)
def test_malformed_formats_are_named(wanted, message):
    def compiled():
        own = SamplingParams(structured_outputs=wanted).structured_outputs
        assert isinstance(own, StructuredOutputsParams)
        constraint(TOKENIZER, own, ENDS, VOCAB, NO_PROMPT)

    with pytest.raises(ValueError, match=message):
        compiled()


@pytest.mark.parametrize("special", [False, True])
def test_tags_of_calls_may_be_special_tokens(special):
    tokenizer = tokenizer_of_characters(special)
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"const": 1}}}}}
    grammar = calls_only("hermes", [tool], several=False, special_tags=special)
    wanted, made = StructuredOutputsParams(grammar=grammar), []
    state = constraint(tokenizer, wanted, ENDS, VOCAB, NO_PROMPT)
    while not state.complete:
        made.append(allowed(state)[-1])  # tags are the last tokens
        state.take(made[-1:])
    text = tokenizer.decode(made, skip_special_tokens=False)
    (call,) = split_tool_calls(text).calls
    assert call.name == "f" and json.loads(call.arguments) in ({}, {"a": 1})
    assert tokenizer.encode("<tool_call>") == made[:1]
