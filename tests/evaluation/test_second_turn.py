"""Tests questions that come in a second turn: what they equal, and what evictors do to them."""

import numpy as np
import pytest
from encoders import smollm2
from marks import slow_except
from tiny import random_prompts, tiny_params

import jsparse
from jsparse.evaluation import evaluators
from jsparse.evaluation.shared_prefill import generate
from jsparse.evaluation.tasks import parse
from jsparse.evaluation.tasks.second_turn import ASKED
from jsparse.prompts import tokenizer_of

PROMPTS, QUESTIONS = random_prompts((70, 33, 50)), random_prompts((3, 9, 1), seed=4)
NEW = 12
OPTIONS = {"max_new_tokens": NEW, "eos_token_id": []}
LOSSY = "snapkv(budget=12, window=4)"


@pytest.mark.parametrize(
    "policy", slow_except(["dense()", "streaming(sink=2, recent=9)"], "dense()")
)
def test_answers_are_those_to_the_question_in_the_prompt(policy):
    """A question of any length is taken in as if it had been forced, then the answer is greedy."""
    params = tiny_params(num_layers=1)
    (made,) = generate(params, [policy], PROMPTS, questions=QUESTIONS, **OPTIONS)
    for out, prompt, question in zip(made, PROMPTS, QUESTIONS, strict=True):
        assert (len(out.token_ids), out.finish_reason) == (NEW, "length")
        (alone,) = generate(params, [policy], [prompt], questions=[question], **OPTIONS)
        assert alone[0].token_ids == out.token_ids
        if policy == "dense()":
            whole = jsparse.generate(params, [*prompt, *question], logprobs=True, **OPTIONS)
            assert out.token_ids == whole.token_ids
            np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=1e-3)


def test_a_policy_that_evicts_has_not_seen_the_question():
    """The same tokens in the prompt make it keep others, and say something else."""
    params = tiny_params(num_layers=1)
    (made,) = generate(params, [LOSSY], PROMPTS, questions=QUESTIONS, **OPTIONS)
    joined = [[*prompt, *question] for prompt, question in zip(PROMPTS, QUESTIONS, strict=True)]
    (whole,) = generate(params, [LOSSY], joined, **OPTIONS)
    assert [out.token_ids for out in made] != [out.token_ids for out in whole]
    (roomy,) = generate(
        params, ["snapkv(budget=1000, window=4)"], PROMPTS, questions=QUESTIONS, **OPTIONS
    )
    (exact,) = generate(params, ["dense()"], joined, **OPTIONS)
    assert [out.token_ids for out in roomy] == [out.token_ids for out in exact]


def test_answers_end_where_an_end_token_follows_the_question():
    """The same token inside the question ends nothing."""
    params = tiny_params(num_layers=1)
    (free,) = generate(params, ["dense()"], PROMPTS[:1], questions=QUESTIONS[:1], **OPTIONS)
    end = free[0].token_ids[2]
    options = OPTIONS | {"eos_token_id": [end, QUESTIONS[0][1]]}
    (made,) = generate(params, ["dense()"], PROMPTS[:1], questions=QUESTIONS[:1], **options)
    ids = free[0].token_ids
    assert (
        made[0].token_ids == ids[: 1 + min(ids.index(id) for id in {end, QUESTIONS[0][1]} & {*ids})]
    )
    assert made[0].finish_reason == "stop"


def test_every_prompt_needs_a_question():
    with pytest.raises(ValueError, match="questions has 2 entries: must be 3, one per prompt"):
        generate(tiny_params(num_layers=1), ["dense()"], PROMPTS, questions=QUESTIONS[:2])


@pytest.mark.parametrize("name", ASKED)
def test_samples_are_those_of_the_task_cut_before_the_question(name):
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


def test_the_evaluation_feeds_the_question_after_the_context(monkeypatch):
    """What it hands over is the prompt of the task itself, in two parts, in a chat too."""
    params, seen = jsparse.load("smollm2"), {}
    tokenizer = tokenizer_of(params, "the test")

    def record(params, policies, prompt, **options):
        seen.update(prompt=prompt, **options)
        raise InterruptedError

    monkeypatch.setattr(evaluators, "generate", record)
    for chat in (False, True):
        task = parse("passkey_turn2")[0]
        answers = evaluators.Answers(params, tokenizer, task, 512, 2, chat)
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
