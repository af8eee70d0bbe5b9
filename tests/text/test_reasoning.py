"""Tests that reasoning is split from answers, whole and in pieces."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.text.reasoning import ReasoningSplitter, opens_reasoning, split_reasoning

pytestmark = pytest.mark.pure


def test_whole_texts():
    for text, opened, expected in [
        ("<think>\nhm\n</think>\n\nHi", False, ("hm", "Hi")),
        ("hm\n</think>\n\nHi\n", True, ("hm", "Hi\n")),
        ("hm</think>Hi", False, ("hm", "Hi")),  # the prompt must have opened it
        ("\n<think></think>A", False, ("", "A")),
        ("<think>a<b\n\nc</think>x</think>y", False, ("a<b\n\nc", "x</think>y")),
        ("Hi <think>", False, ("", "Hi <think>")),
        ("Use <think>a</think>", False, ("", "Use <think>a</think>")),
        ("<think>hm</think>Hi", True, ("hm", "Hi")),  # repeated
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("cut", True, ("cut", "")),
        ("<thin", False, ("", "<thin")),
        ("", False, ("", "")),
    ]:
        assert split_reasoning(text, opened=opened) == expected, text


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "\n", "<", "/think", "a", " ", "b"]))


@given(WORDS, st.booleans(), st.lists(st.integers(0, 6)))
def test_pieces_give_the_whole(words, opened, sizes):
    text, pieces = "".join(words), []
    at = 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    pieces.append(text[at:])
    splitter, whole = (ReasoningSplitter(opened=opened, end_token=1) for _ in range(2))
    last = len(pieces) - 1
    # a token per character; that of the last one of </think> is 1
    ids = [0] * len(text)
    for found in re.finditer("</think>", text):
        ids[found.end() - 1] = 1
    at, parts = 0, []
    for nth, piece in enumerate(pieces):
        parts.append(splitter.push(piece, ids[at : at + len(piece)], ended=nth == last))
        at += len(piece)
    joined = tuple("".join(part) for part in zip(*parts, strict=True))
    assert joined == whole.push(text, ids, ended=True)
    assert splitter.tokens == whole.tokens
    assert not splitter.holds


def test_tokens_of_the_reasoning_are_counted():
    for pieces, end_token, expected in [
        ([("<think>", [1]), ("a b", [5, 6]), ("</think>x", [2, 7]), ("y", [8])], 2, 4),
        ([("<think>", [1]), ("a b", [5, 6]), ("</think>x", [2, 7]), ("y", [8])], None, 5),
        ([("<think>a", [1, 5]), ("b", [6])], 2, 3),
        ([("a", [5]), ("b", [6])], 2, 0),
    ]:
        splitter = ReasoningSplitter(opened=False, end_token=end_token)
        for nth, (text, ids) in enumerate(pieces, 1):
            splitter.push(text, ids, ended=nth == len(pieces))
        assert splitter.tokens == expected, pieces


def test_prompts_that_open_the_reasoning():
    closed = "<think>\n\n</think>\n\n"
    for prompt, continued, expected in [
        ("a<think>\n", None, True),
        (closed, None, False),
        ("say <think> b", None, False),
        ("", None, False),
        ("", "<think>\na", True),
        ("<think>", f"{closed}a", False),
    ]:
        assert opens_reasoning(prompt, continued) == expected, (prompt, continued)
