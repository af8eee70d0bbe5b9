"""Loads the text of `jsparse eval` for benchmarks."""

from importlib.resources import files

from jsparse.models.checkpoint import Params
from jsparse.text.prompts import tokenizer_of


def text_tokens(params: Params) -> list[int]:
    """Returns the tokens of the text of `jsparse eval`."""
    text = (
        files("jsparse.evaluation")
        .joinpath("texts/shakespeare_1911.txt")
        .read_text(encoding="utf-8")
    )
    return tokenizer_of(params, "the benchmark").encode(text)
