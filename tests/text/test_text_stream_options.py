"""Tests that `generate` applies the stop-string options of SamplingParams."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jsparse
from jsparse import SamplingParams
from jsparse.runtime import sampling, turn

GGUF = Path(__file__).parents[1] / "fixtures" / "hf" / "llama" / "model.gguf"


def test_generate_passes_options_on(monkeypatch):
    texts = jsparse.load(GGUF, dtype="float32")
    assert texts.tokenizer is not None
    ids = texts.tokenizer.encode("one. two. one. two.", add_special_tokens=False)
    table = jnp.asarray([[token] * 3 for token in ids], jnp.int32)
    monkeypatch.setattr(turn, "chooser", lambda *_: (sampling.forced, table))
    first = len(texts.tokenizer.encode("one. two.", add_special_tokens=False))
    usual: dict[str, Any] = {"stop": "two", "ignore_eos": True, "max_tokens": len(ids)}
    asked = [
        SamplingParams(**usual),
        SamplingParams(**usual, include_stop_str_in_output=True),
        SamplingParams(**usual, min_tokens=first),
    ]
    outs = jsparse.generate(texts, [[1, 2, 3]] * 3, sampling=asked)
    assert [out.text for out in outs] == ["one. ", "one. two", "one. two. one. "]
    assert {out.finish_reason for out in outs} == {"stop"}
