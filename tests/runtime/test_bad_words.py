"""Tests which tokens may follow if an output must not contain some words, by brute force."""

import numpy as np
import pytest

from jsparse.runtime.bad_words import BadWords, bad_words
from tests.support.characters import tokenizer_of_characters
from tests.support.tiny import VOCAB

TAGGED = tokenizer_of_characters(special_tags=True)
ENDS = frozenset(TAGGED.eos_token_ids)
SPECIAL = {*TAGGED.control_tokens.values()} - ENDS


def begun(words, *, skip_special=True) -> BadWords:
    return bad_words(TAGGED, words, ENDS, VOCAB, skip_special=skip_special)


def allowed(state: BadWords) -> set[int]:
    flags = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return {*np.flatnonzero(flags).tolist()}


@pytest.mark.parametrize("words", [["ab", "bc", "x/\n", "é("], ["aa", "a", "\x00"], ["é", "aba"]])
def test_tokens_that_would_complete_a_word_are_forbidden(words):
    """After random bytes, valid UTF-8 or not, tokens with several bytes included."""
    texts, rng = TAGGED.token_bytes(), np.random.default_rng(0)
    encoded = [word.encode() for word in words]
    for _ in range(6):
        state, made = begun(words), b""
        for _ in range(12):
            found = allowed(state)
            for token in range(VOCAB):
                text = texts[token] if token < len(texts) else b""
                plain = token not in SPECIAL | ENDS
                if plain:
                    assert (token in found) == (not any(word in made + text for word in encoded))
            assert found >= SPECIAL | ENDS
            near = TAGGED.encode("".join(words), add_special_tokens=False)
            token = int(rng.choice([*found.intersection(near), *rng.choice([*found - ENDS], 2)]))
            state.take([token])
            made += b"" if token in SPECIAL else texts[token]


def test_special_tokens_are_text_unless_they_are_left_out():
    own, word = TAGGED.control_tokens["<think>"], "hin"
    assert own in allowed(begun([word])) and own not in allowed(begun([word], skip_special=False))
    state = begun(["ab"], skip_special=False)
    state.take([*TAGGED.encode("a", add_special_tokens=False), own])
    (b,) = TAGGED.encode("b", add_special_tokens=False)
    assert b in allowed(state)  # the tag is between them
    state = begun(["ab"])
    state.take([*TAGGED.encode("a", add_special_tokens=False), own])
    assert b not in allowed(state)


def test_copies_are_independent_and_outputs_end_if_nothing_may_follow():
    state = begun(["ab"])
    state.take(TAGGED.encode("a", add_special_tokens=False))
    other = state.copy()
    other.take(TAGGED.encode("x", add_special_tokens=False))
    assert allowed(other) > allowed(state)
    every = bad_words(TAGGED, [chr(code) for code in range(128)], (), VOCAB, skip_special=False)
    some = allowed(every)
    assert some and every.error is None  # bytes that are no characters
