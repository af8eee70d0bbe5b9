"""Tests the greedy answers of bench.same_answers on a tiny model."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import jsparse
from bench.same_answers import jsparse_answerer

TINY = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"


@pytest.mark.slow
def test_jsparse_answers_greedily_past_end_tokens_in_float32(monkeypatch):
    params, prompt = jsparse.load(TINY, dtype="float32"), [5, 17, 3, 40, 8]
    _, dtype, ask = jsparse_answerer(TINY)
    given = ask(prompt)
    ends = dataclasses.replace(params, generation_defaults={"eos_token_id": given["ids"][3]})
    monkeypatch.setattr(jsparse, "load", lambda *_, **__: ends)
    assert jsparse_answerer(TINY)[2](prompt) == given
    logits = np.asarray(jsparse.logits(params, [*prompt, *given["ids"]]))[0, len(prompt) - 1 : -1]
    assert dtype == "float32"
    assert given["ids"] == logits.argmax(-1).tolist()
    likely = logits.max(-1) - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(given["logprobs"], likely, atol=1e-4)
