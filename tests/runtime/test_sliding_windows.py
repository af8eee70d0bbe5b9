"""Tests prefill, decoding and verification with sliding windows against transformers' logits."""

from pathlib import Path

import numpy as np
import pytest

import jsparse
from jsparse.evaluation.head_calibration import calibrate_heads
from jsparse.evaluation.inspection import inspect_step
from jsparse.models.checkpoint import Params, load
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.tiny import assert_close, engine_logits

HF = Path(__file__).parents[1] / "fixtures" / "hf"
NAMES = ("mistral", "qwen2_windows")  # windows of 23 tokens in all layers; in all but the first
POLICIES = (
    "dense",
    "quest(budget=1024)",
    "offloaded(streaming(sink=0, recent=1024))",
    "double_sparsity(budget=1024)",
)
EXACT = {"policy": "streaming(recent=4)", "exact": True}


@shared
def model(name: str) -> Params:
    return load(HF / name, dtype="float32")


def expected_of(name: str) -> dict[str, np.ndarray]:
    with np.load(HF / name / "expected.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", slow_except(NAMES, "qwen2_windows"))
@pytest.mark.parametrize("policy", slow_except(POLICIES, "dense", "quest(budget=1024)"))
def test_steps_after_chunks_give_the_logits_of_one_pass(name, policy):
    expected = expected_of(name)
    tokens, positions = expected["tokens"], expected["positions"].tolist()
    seen = engine_logits(
        model(name), policy, tokens[:, :-20].tolist(), tokens[:, -20:], chunk=64, page_size=8
    )
    first = tokens.shape[1] - 21
    for position in positions[-3:-1]:
        at = expected["logits"][:, positions.index(position)]
        assert_close(seen[position - first], at, position=position)


@pytest.mark.parametrize("options", slow_except([{}, EXACT], EXACT))
def test_texts_are_those_of_whole_passes(options):
    """Greedy texts of several windows equal the argmaxes of a pass over them."""
    params, prompt = model("qwen2_windows"), expected_of("qwen2_windows")["tokens"][0, :40].tolist()
    out = jsparse.generate(params, prompt, max_new_tokens=24, eos_token_id=[], **options)
    logits = np.asarray(jsparse.logits(params, prompt + out.token_ids))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == out.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_windows", "qwen3_moe"])
def test_engine_gives_texts_of_whole_passes(name):
    """Prompts of different lengths share a prefix, which the second call takes from the cache."""
    params, (row, other) = model(name), expected_of(name)["tokens"][:, :64].tolist()
    prompts = [row, row[:48], row[:48] + other[:9]]
    llm = jsparse.LLM(params, "quest(budget=1024)", max_model_len=96)
    options = jsparse.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(2):
        for prompt, out in zip(prompts, llm.generate(prompts, options), strict=True):
            made = out.outputs[0].token_ids
            logits = np.asarray(jsparse.logits(params, prompt + made))[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made


def test_window_of_a_saved_model_is_kept(tmp_path):
    params = model("qwen2_windows")
    jsparse.save(params, tmp_path / "saved")
    assert load(tmp_path / "saved").config == params.config


def test_uses_that_need_all_tokens_are_refused():
    params = model("mistral")
    prompt = list(range(40))
    with pytest.raises(ValueError, match="policy=h2o.*must keep every token.*below the 512 tokens"):
        jsparse.generate(params, prompt, policy="h2o(budget=16)", max_new_tokens=8)
    with pytest.raises(ValueError, match="page_size=64: must be at most 32"):
        jsparse.generate(params, prompt, max_new_tokens=8, page_size=64)
    with pytest.raises(ValueError, match=r"params=.*sliding windows of 23 tokens"):
        inspect_step(params, "dense", prompt)
    with pytest.raises(ValueError, match=r"params=.*sliding windows of 23 tokens"):
        jsparse.compare(params, prompt * 4, ["quest"])
    with pytest.raises(ValueError, match=r"params=.*sliding windows of 23 tokens"):
        calibrate_heads(params)
