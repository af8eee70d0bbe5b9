"""Tests the outputs of sequences made of given tokens."""

from pathlib import Path

import numpy as np
import pytest

from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.collecting import NewTokens, OutputBuilder
from jsparse.runtime.request import Request
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.server.text import Texts, TokenLogprobs

FILE = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "llama.gguf"
PROMPT, T, A, END = 275, 264, 266, 2  # "is", " t", " a", "</s>"


@pytest.fixture(scope="module")
def tokenizer():
    """A SentencePiece-style tokenizer, whose words begin with a space."""
    return Tokenizer.from_gguf(GGUFFile(FILE).metadata)


def answer(tokenizer, ids, **options):
    request = Request(np.array([PROMPT], np.int32), SamplingParams(**options), frozenset(), 0)
    builder = OutputBuilder(request, 0, tokenizer)
    shares = np.zeros((len(ids), 2), np.float32)
    builder.take(NewTokens(ids, [0.0] * len(ids), shares, None, None))
    return builder.output()


def test_text_keeps_its_first_space(tokenizer):
    out = answer(tokenizer, [T, A, T], max_tokens=3, logprobs=0)
    assert out.text == " t a t"
    assert out.logprobs is not None
    named = [own.decoded_token for each in out.logprobs for own in each.values()]
    assert named == [" t", " a", " t"]
    texts = Texts(tokenizer)
    shown, end = texts.completion_logprobs(TokenLogprobs.of_completion(out), 0)
    texts.close()
    assert "".join(shown["tokens"]) == out.text
    assert [*shown["text_offset"], end] == [0, 2, 4, 6]


@pytest.mark.parametrize(("stop", "ids", "text"), [(" a", [T, A], " t"), ("</s>", [T, END], " t")])
def test_stop_strings_end_a_sequence(tokenizer, stop, ids, text):
    out = answer(tokenizer, [*ids, T], max_tokens=9, stop=stop)
    assert (out.text, out.token_ids, out.finish_reason) == (text, ids, "stop")
