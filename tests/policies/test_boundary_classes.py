"""Tests which boundary follows a token, for every separator and every kind of tokenizer."""

import numpy as np
import pytest

from jsparse.policies.clusters.boundary_classes import (
    ENDS_IN_NEWLINE,
    IS_NEWLINES,
    STARTS_WITH_BLANK,
    boundary_classes,
)
from tests.support.model_tokenizers import NAMES, tokenizer_of


class Bytes:
    """A vocabulary of these tokens, with these control ids."""

    def __init__(self, tokens, controls=()):
        self.tokens, self.controls = list(tokens), list(controls)

    def token_bytes(self):
        return self.tokens

    def control_token_ids(self):
        return self.controls


def rows(*tokens):
    tokens = [token.encode() if isinstance(token, str) else token for token in tokens]
    return boundary_classes(Bytes(tokens), len(tokens)).tolist()


def test_separators_have_one_class_alone_after_text_and_before_blanks():
    for number, separators in (
        (1, ["\n\n", "```", "---", "***", "}", "]", ">", "\r\n\r\n", "\n \t\n"]),
        (2, [".", "?", "!", "。", "？", "！", "\n", "\r\n"]),
        (3, [",", ";", ":", "，", "；", "：", "、"]),
        (4, [" ", "\t"]),
        (0, ["x", '"', ")", "--", "`", "é", "语"]),
    ):
        alone, after = rows(*separators), rows(*("word" + sep for sep in separators))
        assert {row[0] for row in alone + after} == {number}
        assert {row[0] for row in rows(*(sep + " \t" for sep in separators))} == {number or 4}
        assert {row[0] for row in rows(*(sep + "x" for sep in separators))} == {0}


def test_flags_describe_what_neighbours_need():
    empty, line, in_line = ENDS_IN_NEWLINE + IS_NEWLINES, ENDS_IN_NEWLINE, STARTS_WITH_BLANK
    for tokens, row in [
        (["x"], [0, 0]),
        ([" x", "\tx"], [0, in_line]),
        (["x\n"], [2, line]),
        (["\n", "\n  ", "\r\n"], [2, empty]),
        ([" \n"], [2, empty + in_line]),
        (["\n\n"], [1, empty]),
        ([".\n\n"], [1, line]),
        ([" "], [4, in_line]),
    ]:
        assert rows(*tokens) == [row] * len(tokens), tokens


def test_partial_characters_are_no_boundary():
    whole = "。".encode()
    assert rows(whole[:1], whole[:2], whole[1:], b"." + whole[:2]) == [[0, 0]] * 4
    assert rows(b"\x80\n", b"\xe3 ") == [[2, ENDS_IN_NEWLINE], [4, 0]]


def test_control_tokens_are_class_1_and_padding_has_no_class():
    table = boundary_classes(Bytes([b"<s>", b" end\n", b"a", b""], controls=[0, 1, 9]), 6)
    assert table.tolist() == [[1, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert table.dtype == np.uint8


def test_model_with_fewer_ids_than_its_tokenizer_has_fewer_rows():
    assert boundary_classes(Bytes([b".", b",", b"</s>"], controls=[2]), 2).tolist() == [
        [2, 0],
        [3, 0],
    ]
    assert boundary_classes(Bytes([]), 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_tokenizer_has_boundaries(name):
    tokenizer = tokenizer_of(name)
    size = tokenizer.vocab_size
    table = boundary_classes(tokenizer, size + 50)
    assert (table[size:] == 0).all()
    assert (table[tokenizer.control_token_ids()] == [1, 0]).all()
    text = "The sun, the moon: and.\nThen[0] {it}\n\nended"
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    vocabulary = tokenizer.token_bytes()
    spelled = [vocabulary[token_id] for token_id in ids]
    ends = {b",": 3, b":": 3, b".": 2, b"]": 1, b"}": 1, b"\n\n": 1}
    for token, (number, flags) in zip(spelled, table[ids].tolist(), strict=True):
        assert bool(flags & STARTS_WITH_BLANK) == token.startswith(b" ")
        assert bool(flags & ENDS_IN_NEWLINE) == token.endswith(b"\n")
        for end, its in ends.items():
            assert number == its or not token.endswith(end)
        if token[-1:].isalpha():
            assert number == 0
    assert {1, 2, 3, 0} <= {number for number, _ in table[ids].tolist()}
