"""Tests `generate`, conversations and evaluation on a model spread over devices.

Results are compared with those on one device. Sessions report the shares of attended tokens, which
also tests the selections of methods.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.cli.app import app
from jsparse.conversation import Conversation
from jsparse.evaluation.attention_metrics import attention_metrics, measured
from jsparse.evaluation.closeness import closeness
from jsparse.evaluation.inspection import inspect_step
from jsparse.evaluation.teacher_forcing import force
from jsparse.evaluation.yardstick import yardsticks
from jsparse.models.checkpoint import load, spread
from jsparse.policies.expressions import parse
from jsparse.runtime.compilation import traces
from jsparse.runtime.session import Session
from tests.support.policy_table import METHODS
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params

GGUF = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"
PROMPTS = random_prompts((9, 41, 21), seed=5)
# compresses the prompt and maintains the rest
EVICTING = "hard_kv(budget=10, floor=7, cap=14, period=4, window=4, sink=2)"
COMPRESSING = "ada_kv(budget=8, window=4, pool=3)"
ON_DEVICE = [each for each in METHODS if parse(each).offload is None]
# a service that recomputes tokens; and decisions over the heads of all ranks
FURTHER = [EVICTING, "lychee_decode(((1, 1), (0, 1)), value=24, sink=1, recent=6, correct_every=4)"]
SIZES = {"max_length": 96, "page_size": 8, "eos_token_id": ()}


@shared
def whole():
    return tiny_params(num_layers=2, num_heads=4, num_kv_heads=2)


@shared
def halves():
    return spread(whole(), 2)


@shared
def on_one(expression, **options):
    return answers(whole(), expression, **options)


def answers(params, policy, **options):
    """The tokens of responses, and their attended shares."""
    outs = jsparse.generate(params, PROMPTS, policy=policy, **SIZES | options)
    shares = [[out.stats.attended_fraction, out.stats.read_fraction] for out in outs]
    return [out.token_ids for out in outs], shares


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("expression", [*ON_DEVICE, *FURTHER])
def test_outputs_on_two_devices_equal_those_on_one(expression):
    assert_same(
        answers(halves(), expression, max_new_tokens=11), on_one(expression, max_new_tokens=11)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.2},
        {"exact": True, "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_sampled_and_verified_outputs_are_the_same(options):
    expression = "quest(budget=16)"
    ours = answers(halves(), expression, max_new_tokens=11, **options)
    assert_same(ours, answers(whole(), expression, max_new_tokens=11, **options))


@pytest.mark.slow
def test_first_program_is_compiled_during_prefill(monkeypatch):
    """It fits the inputs: nothing is traced again."""
    expected, traced = [], []
    advanced = Session._advanced

    def watched(session, decoding):
        expected.append(session._expected)
        if session._expected is not None:
            session._expected.result()
        before = traces()
        made = advanced(session, decoding)
        traced.append(traces() - before)
        return made

    monkeypatch.setattr(Session, "_advanced", watched)
    answers(halves(), "streaming(sink=2, recent=5)", max_new_tokens=4)
    first, *others = expected
    assert first is not None
    assert not any(others)
    assert traced == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dense", "quest(budget=16)"])
def test_conversation_continues_on_two_devices(policy):
    """A further turn truncates rows, or keeps the response, and prefills the rest."""
    said = []
    for ranks in (1, 2):
        params = load(GGUF, dtype="float32", tensor_parallel_size=ranks)
        assert params.tokenizer is not None
        params.tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}<|eot_id|>{{ m.content }}<|eot_id|>{% endfor %}"
        )
        chat = Conversation(params, policy=policy, max_new_tokens=9, eos_token_id=())
        first = {"role": "user", "content": "the cat sat on the mat"}
        answer = chat.answer([first])
        more = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "or so"}]
        again = chat.answer([first, *more])
        assert chat._session is not None
        said.append([answer.token_ids, again.token_ids, chat._session._positions])
    assert said[0] == said[1]


def test_logits_equal_those_of_one_device():
    ours, theirs = (jsparse.logits(each, PROMPTS[0]) for each in (halves(), whole()))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_measurements_are_the_same():
    """Records of heads cover the heads of all devices."""
    expression = "quest(budget=16)"
    found = []
    for each in (halves(), whole()):
        forcing = force(each, [measured(expression)], PROMPTS, max_new_tokens=4)
        seen = inspect_step(each, expression, PROMPTS[1], step=3)
        close = closeness(forcing)
        kl = yardsticks(forcing, close).kl
        found.append(
            [*attention_metrics(forcing)[0].heads, seen.weights, seen.attended, close.kl, kl]
        )
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert jnp.shape(found[0][0])[-1] == 2  # heads


@pytest.mark.slow
def test_commands_accept_the_number_of_devices(tmp_path):
    told = []
    for ranks in (1, 2):
        options = ["--model", GGUF, "--dtype", "float32", "--tensor-parallel-size", ranks]
        generate = ["generate", "the cat", "--json", "--max-new-tokens", 6, *options]
        made = CliRunner().invoke(app, [str(each) for each in generate])
        assert made.exit_code == 0, made.output
        out = tmp_path / f"{ranks}.json"
        sizes = ["--lengths", 64, "--steps", 4, "--samples", 2, "--tasks", "kl", "--json", out]
        made = CliRunner().invoke(
            app, [str(each) for each in ["eval", *sizes, "--policy", "quest(budget=16)", *options]]
        )
        assert made.exit_code == 0, made.output
        told.append(json.loads(out.read_text())["cells"])
    assert len(told[0]) == len(told[1]) > 0
    for ours, theirs in zip(*told, strict=True):
        assert ours.keys() == theirs.keys()
