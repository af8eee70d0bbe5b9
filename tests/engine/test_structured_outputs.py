"""Tests structured outputs in the engine against a loop over full passes of the model."""

import json
import re

import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.engine.stall_budget import StallBudget
from jsparse.models.checkpoint import spread
from jsparse.runtime.constraint import constraint
from jsparse.runtime.structured_outputs import StructuredOutputsParams
from tests.support.characters import tokenizer_of_characters, with_characters
from tests.support.serving import assert_at_rest, bits, greedy, tiny_llm
from tests.support.tiny import VOCAB

TOKENIZER = tokenizer_of_characters()
PROMPTS = ["a person: ", "the city is ", "more text", "number "]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"choice": ["Oslo", "Rome", "Osorno"]},
    None,
    {"regex": "[0-9]{3}-[a-z]{2,4}"},
]


def options(nth, **others):
    return greedy(24, structured_outputs=STRUCTURES[nth], **others)


def expected(params, prompt, wanted, tokens=24):
    """Greedy decoding: a full pass per token, and the likeliest token that may follow."""
    ids, made = TOKENIZER.encode(prompt), []
    state = wanted and constraint(
        TOKENIZER,
        StructuredOutputsParams(**wanted),
        frozenset(TOKENIZER.eos_token_ids),
        VOCAB,
        np.asarray(ids),
    )
    while len(made) < tokens and not (state and state.complete):
        text = [*ids, *made]
        padded = text + [0] * (64 - len(text))  # one shape
        logits = np.asarray(jsparse.logits(params, padded))[0, len(text) - 1]
        if state:
            flags = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")[:VOCAB]
            logits = np.where(flags, logits, -np.inf)
        made.append(int(logits.argmax()))
        if made[-1] in TOKENIZER.eos_token_ids:
            break
        if state:
            state.take(made[-1:])
    return made


@pytest.fixture(scope="module")
def llm():
    """A dense engine whose programs take several steps."""
    return tiny_llm(params=with_characters(), steps_per_program=4, decode_rows=[4])


def test_outputs_are_those_of_masked_full_passes(llm):
    """Beside each other and beside a free request, which is not affected."""
    outs = llm.generate(PROMPTS, [options(nth) for nth in range(4)])
    for nth, out in enumerate(outs):
        (made,) = out.outputs
        assert made.token_ids == expected(llm.engine.params, PROMPTS[nth], STRUCTURES[nth]), nth
    texts = [out.outputs[0].text for out in outs]
    if outs[0].outputs[0].finish_reason == "stop":
        assert {*json.loads(texts[0])} == {"name", "age"}
    assert texts[1] in {"Oslo", "Rome", "Osorno"} and re.fullmatch("[0-9]{3}-[a-z]{2,4}", texts[3])
    assert [out.outputs[0].finish_reason for out in outs][1::2] == ["stop", "stop"]
    assert_at_rest(llm)


def test_request_is_the_same_alone_and_free_rows_take_several_steps(llm, monkeypatch):
    plans, plan = [], llm.engine.scheduler.plan
    monkeypatch.setattr(StallBudget, "most_steps", lambda _, steps: steps)
    monkeypatch.setattr(llm.engine.scheduler, "plan", lambda: plans.append(plan()) or plans[-1])
    together = llm.generate(PROMPTS, [options(nth) for nth in range(4)])
    alone = [llm.generate(PROMPTS[nth], options(nth))[0] for nth in range(4)]
    for one, other in zip(together, alone, strict=True):
        assert [ids for ids, _ in bits(one)] == [ids for ids, _ in bits(other)]
    decoded = [each.decode for each in plans if each.decode]
    assert {1, 4} <= {each.steps for each in decoded}
    # more steps would choose tokens before it is known which ones may follow
    first = [each for each in decoded if each.rows[0].seq == decoded[0].rows[0].seq]
    assert all(each.rows[0].steps == 1 for each in first)


@pytest.mark.slow
def test_sampled_sequences_differ_and_all_match(llm):
    wanted = {"regex": "(a|b|c){6}[0-9]"}
    own = SamplingParams(
        temperature=2.0, seed=5, n=4, max_tokens=20, logprobs=3, structured_outputs=wanted
    )
    (out,) = llm.generate(PROMPTS[:1], own)
    texts = [each.text for each in out.outputs]
    assert len({*texts}) > 1 and all(re.fullmatch(wanted["regex"], text) for text in texts)
    # log-probabilities are the model's own
    for each in out.outputs:
        ids = [*TOKENIZER.encode(PROMPTS[0]), *each.token_ids]
        logits = np.asarray(jsparse.logits(llm.engine.params, ids + [0] * (64 - len(ids))))[0]
        logits = logits[len(ids) - len(each.token_ids) - 1 : len(ids) - 1]
        probabilities = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        own_ones = probabilities[range(len(each.token_ids)), each.token_ids]
        np.testing.assert_allclose(each.token_logprobs, own_ones, atol=1e-4)


def test_drafts_are_verified_beside_structured_outputs(llm):
    exact = tiny_llm(
        "quest(budget=16)",
        params=llm.engine.params,
        exact=True,
        num_speculative_tokens=3,
        decode_rows=[4],
    )
    outs = exact.generate(PROMPTS, [options(nth) for nth in range(4)])
    for nth, out in enumerate(outs):
        assert out.outputs[0].token_ids == expected(
            exact.engine.params, PROMPTS[nth], STRUCTURES[nth]
        )
    assert exact.engine.counters.drafts > 0


def test_allowed_token_ids_are_the_only_ones(llm):
    ids = TOKENIZER.encode("xyz")
    (free,) = llm.generate(PROMPTS[2], greedy(12))[0].outputs
    (out,) = llm.generate(PROMPTS[2], greedy(12, allowed_token_ids=ids))[0].outputs
    assert {*out.token_ids} <= {*ids} and out.finish_reason == "length"
    assert free.token_ids != out.token_ids


def test_bad_words_do_not_occur(llm):
    (free,) = llm.generate(PROMPTS[2], greedy(12))[0].outputs
    words = [char for char in free.text if char.isascii()][:2]
    (out,) = llm.generate(PROMPTS[2], greedy(12, bad_words=words))[0].outputs
    assert words and not any(word in out.text for word in words)
    assert (out.finish_reason, len(out.token_ids)) == ("length", 12)


def test_biases_penalties_and_stop_strings_apply_within_the_structure(llm):
    digits = {TOKENIZER.encode("7")[0]: 90.0}
    own = greedy(20, structured_outputs={"regex": "[0-9]{6}"}, logit_bias=digits)
    assert llm.generate(PROMPTS[0], own)[0].outputs[0].text == "777777"
    own = greedy(20, structured_outputs={"regex": "[0-9]{6}"}, logit_bias=digits, stop=["777"])
    (made,) = llm.generate(PROMPTS[0], own)[0].outputs
    assert (made.text, made.finish_reason) == ("", "stop")
    # no end token can be chosen before min_tokens, though the text is complete without more
    ends = {token: 90.0 for token in TOKENIZER.eos_token_ids}
    own = greedy(20, structured_outputs={"regex": "a+"}, logit_bias=ends, min_tokens=4)
    (made,) = llm.generate(PROMPTS[0], own)[0].outputs
    assert made.text == "aaaa" and made.finish_reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\]: must be of at least one id"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids=300: must be token ids from 0 to 299"),
        (
            {"allowed_token_ids": [1], "structured_outputs": {"regex": "a"}},
            r"allowed_token_ids=\[1\]: must be None with structured_outputs",
        ),
        (
            {"allowed_token_ids": [*TOKENIZER.eos_token_ids], "min_tokens": 1},
            "min_tokens=1: must be 0 if all of allowed_token_ids end the text",
        ),
        (
            {"bad_words": ["a"], "structured_outputs": {"regex": "a"}},
            r"bad_words=\['a'\]: must be empty with structured_outputs",
        ),
        ({"bad_words": ["a" * 5000]}, "bad_words has 5000 characters: must have at most 4096"),
        ({"bad_words": [""]}, r"bad_words=\[''\]: must be strings of at least one character"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
        ({"guided_json": {}}, "guided_json={}: use structured_outputs"),
    ],
)
def test_malformed_options_are_refused(llm, wanted, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[0], greedy(4, **wanted))


@pytest.mark.slow
def test_generate_gives_the_same_outputs(llm):
    sampling = [options(nth) for nth in range(4)]
    outs = jsparse.generate(llm.engine.params, PROMPTS, sampling=sampling)
    for nth, out in enumerate(outs):
        assert out.token_ids == expected(llm.engine.params, PROMPTS[nth], STRUCTURES[nth]), nth
    drafting = {"exact": True, "policy": "quest(budget=16)"}
    with pytest.raises(ValueError, match="exact=True: must be False with structured_outputs or"):
        jsparse.generate(llm.engine.params, "a", sampling=options(1), **drafting)


@pytest.mark.slow
def test_turns_of_a_conversation_follow_the_structure(llm):
    chat = jsparse.Conversation(llm.engine.params, policy="lfps(budget=0.5)", sampling=options(3))
    messages = [{"role": "user", "content": "number "}]
    for _ in range(2):
        text = chat.answer(messages).text
        assert re.fullmatch("[0-9]{3}-[a-z]{2,4}", text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more "}]


@pytest.mark.slow
def test_models_on_two_devices_give_the_same_outputs(llm):
    sampling = [options(nth) for nth in range(4)]
    outs = llm.generate(PROMPTS, sampling)
    expected = [out.outputs[0].token_ids for out in outs]
    params = spread(with_characters(), 2)
    for made in (
        [out.outputs[0] for out in tiny_llm(params=params).generate(PROMPTS, sampling)],
        jsparse.generate(params, PROMPTS, sampling=sampling),
    ):
        assert [out.token_ids for out in made] == expected
