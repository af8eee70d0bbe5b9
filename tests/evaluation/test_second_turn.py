"""Tests questions asked in a second turn: they match a single prompt unless a policy evicts."""

import numpy as np
import pytest

import jsparse
from jsparse.evaluation import evaluators
from jsparse.evaluation.shared_prefill import generate
from jsparse.evaluation.tasks import parse
from jsparse.evaluation.tasks.second_turn import ASKED
from tests.support.encoders import smollm2
from tests.support.model_tokenizers import tokenizer_of
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params

PROMPTS, QUESTIONS = random_prompts((70, 33, 50)), random_prompts((3, 9, 1), seed=4)
NEW = 12
OPTIONS = {"max_new_tokens": NEW, "eos_token_id": []}


def asked(**options):
    params = tiny_params(num_layers=1)
    return generate(params, ["dense()"], PROMPTS, questions=QUESTIONS, **OPTIONS | options)[0]


@shared
def free():
    """Unlimited outputs, and those to the same tokens as one prompt."""
    joined = [[*prompt, *question] for prompt, question in zip(PROMPTS, QUESTIONS, strict=True)]
    params = tiny_params(num_layers=1)
    return asked(), jsparse.generate(params, joined, policy="dense()", logprobs=True, **OPTIONS)


def test_outputs_match_those_to_the_whole_text():
    for out, whole in zip(*free(), strict=True):
        assert (len(out.token_ids), out.finish_reason) == (NEW, "length")
        assert out.token_ids == whole.token_ids
        np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=1e-3)


def test_outputs_stop_at_an_end_token_after_the_question():
    """The same token inside the question does not stop the sequence."""
    ids = free()[0][0].token_ids
    ends = {ids[2], QUESTIONS[0][1]}
    made = asked(eos_token_id=[*ends])[0]
    assert made.token_ids == ids[: 1 + min(ids.index(end) for end in ends & {*ids})]
    assert made.finish_reason == "stop"


def test_every_prompt_needs_a_question():
    with pytest.raises(ValueError, match="questions has 2 entries: must be 3, one per prompt"):
        generate(tiny_params(num_layers=1), ["dense()"], PROMPTS, questions=QUESTIONS[:2])


@pytest.mark.parametrize("name", ASKED)
def test_samples_are_those_of_the_task_split_before_the_question(name):
    (task,), (later,) = parse(name), parse(f"{name}_turn2")
    for index in range(3):
        whole, cut = (one.sample(smollm2, 1024, index) for one in (task, later))
        assert cut.prompt + cut.question == whole.prompt
        assert cut.question.startswith("What is") and cut.prompt.endswith("\n")
        assert cut._replace(prompt=whole.prompt, question="", meta=whole.meta) == whole
        assert smollm2(cut.prompt) + smollm2(cut.question + cut.prefix) == smollm2(
            whole.prompt + whole.prefix
        )
        assert later.score(f" {whole.answers[0]}.", cut) == 1.0


def test_evaluation_feeds_the_question_after_the_context(monkeypatch):
    """It passes the prompt of the task itself in two parts, also in a chat."""
    params, tokenizer, seen = tiny_params(num_layers=1), tokenizer_of("smollm2"), {}

    def record(params, policies, prompt, **options):
        seen.update(prompt=prompt, **options)
        raise InterruptedError

    monkeypatch.setattr(evaluators, "generate", record)
    for chat in (False, True):
        task = parse("passkey_turn2")[0]
        answers = evaluators.GreedyAnswers(params, tokenizer, task, 512, 2, chat)
        with pytest.raises(InterruptedError):
            answers(["dense()"], [0, 1])
        (whole,) = parse("passkey")
        for row in range(2):
            sample = whole.sample(answers._encode, answers._room, row)
            assert [*seen["prompt"][row], *seen["questions"][row]] == tokenizer.encode(
                sample.prompt + sample.prefix
            )
            assert tokenizer.decode(seen["questions"][row]) == (
                "What is the pass key? The pass key is"
            )
