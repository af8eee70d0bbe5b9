"""Classifies the text boundary after each token, from the bytes of a vocabulary.

Boundaries are the separators of LycheeCluster's table 4, and control tokens, by class, the best
first:

    1  an empty line, ``` --- *** } ] > or a control token, such as the end of a turn
    2  . ? ! 。 ？ ！ or the end of a line
    3  , ; : ， ； ： 、
    4  a blank, which is a space or a tab
    0  none

A boundary follows a token whose last bytes, apart from blanks, are one of these; after a mark of
class 1 the token may also contain the end of the line. Some boundaries depend on the neighbours,
since tokens mostly start with the blank that separates them and the newlines of an empty line may
be two tokens; the flags are for these.
"""

from typing import Protocol

import numpy as np
from jaxtyping import UInt8

STARTS_WITH_BLANK, IS_NEWLINES, ENDS_IN_NEWLINE = 1, 2, 4

_BLANKS = b" \t"
_ENDS = (
    (b"```", b"---", b"***", b"}", b"]", b">"),
    tuple(mark.encode() for mark in ".?!。？！\n"),
    tuple(mark.encode() for mark in ",;:，；：、"),
)


class Vocabulary(Protocol):
    """The methods of a tokenizer that boundaries need."""

    def token_bytes(self) -> list[bytes]: ...

    def control_token_ids(self) -> list[int]: ...


def boundary_classes(tokenizer: Vocabulary, vocab_size: int) -> UInt8[np.ndarray, "V 2"]:
    """Returns the class of the boundary after each token, and the token's flags.

    The flags are a sum: STARTS_WITH_BLANK; IS_NEWLINES, for one or more newlines and otherwise only
    blanks; ENDS_IN_NEWLINE, apart from blanks. A token that ends inside a character has class 0;
    control tokens have class 1 and no flags; ids past the tokenizer's vocabulary have 0.
    """
    table = np.zeros((vocab_size, 2), np.uint8)
    tokens = tokenizer.token_bytes()[:vocab_size]
    if tokens:
        table[: len(tokens)] = [_of_token(token) for token in tokens]
    table[[token_id for token_id in tokenizer.control_token_ids() if token_id < vocab_size]] = 1, 0
    return table


def _of_token(token: bytes) -> tuple[int, int]:
    """Returns the class and the flags of one token."""
    token = token.replace(b"\r\n", b"\n")
    text = token.rstrip(_BLANKS)
    in_newline = text.endswith(b"\n")
    flags = STARTS_WITH_BLANK * token.startswith((b" ", b"\t"))
    if in_newline:
        flags += ENDS_IN_NEWLINE + IS_NEWLINES * (not text.strip(_BLANKS + b"\n"))
        if text[:-1].rstrip(_BLANKS).endswith(b"\n"):
            return 1, flags
    if text.rstrip(_BLANKS + b"\n").endswith(_ENDS[0]):
        return 1, flags
    for number, ends in enumerate(_ENDS[1:], 2):
        if text.endswith(ends):
            return number, flags
    return 4 * (len(text) < len(token)), flags
