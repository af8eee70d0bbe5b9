"""Finds the tokens that would complete a forbidden word, however texts are split into tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, UInt32

from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.structured_outputs import packed

KEPT = 16  # lists of words, by tokenizer
_tables: WeakKeyDictionary[Tokenizer, dict[tuple[int, bool], "TokenTable"]] = WeakKeyDictionary()


class BadWords:
    """The state of one output that must not contain some words.

    Attributes:
        error: why the output cannot be continued, or None.
    """

    complete = False  # something may always follow

    def __init__(self, words: "Words", ends: Iterable[int]) -> None:
        """Starts an output; `ends` are the tokens that may always end it."""
        self.words, self._ends = words, [*ends]
        self.error: str | None = None
        self._tail = b""

    def copy(self) -> "BadWords":
        """Returns the state of another output that has begun alike."""
        other = BadWords(self.words, self._ends)
        other._tail = self._tail
        return other

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """Returns a bit for each token, the lowest of the first word for id 0: may it come next?"""
        flags = self.words.allowed_after(self._tail)
        flags[self._ends] = True
        if not flags.any():
            self.error = f"bad_words={self.words.texts}: no token may follow {self._tail!r}"
            flags[:] = True
        return packed(flags)

    def take(self, ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        text = self._tail + b"".join(map(self.words.table.bytes_of, ids))
        self._tail = text[-self.words.longest :] if self.words.longest else b""


class TokenTable:
    """The bytes of a model's tokens, and their order."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, skip_special: bool) -> None:
        """Reads the bytes; special tokens have none if the text leaves them out."""
        texts = tokenizer.token_bytes()[:vocab_size]
        texts += [b""] * (vocab_size - len(texts))
        for text, token in tokenizer.control_tokens.items():
            if token < vocab_size:
                texts[token] = b"" if skip_special else text.encode()
        self.texts, self.size = texts, vocab_size
        order = sorted(range(vocab_size), key=texts.__getitem__)
        self._sorted, self._ids = [texts[token] for token in order], np.array(order)
        # a byte that no UTF-8 has keeps matches within one token
        self._joined = b"\xff".join(texts)
        self._ends = np.cumsum([len(text) + 1 for text in texts])

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes that a token adds to the text."""
        return self.texts[token] if token < self.size else b""

    def containing(self, word: bytes) -> list[int]:
        """Returns the tokens that contain a word."""
        found, at = [], self._joined.find(word)
        while at >= 0:
            token = int(np.searchsorted(self._ends, at, side="right"))
            found.append(token)
            at = self._joined.find(word, int(self._ends[token]))
        return found

    def beginning(self, text: bytes) -> np.ndarray:
        """Returns the tokens that begin with a text, which must not be empty."""
        first = bisect_left(self._sorted, text)
        last = bisect_right(self._sorted, text, lo=first, key=lambda each: each[: len(text)])
        return self._ids[first:last]


class Words:
    """Forbidden words, for the tokens of one model.

    Attributes:
        texts: the words.
        table: the tokens.
        longest: the number of bytes of a text's end that a word may begin in.
    """

    def __init__(self, texts: tuple[str, ...], table: TokenTable) -> None:
        """Finds the tokens that contain a word."""
        self.texts, self.table = texts, table
        self._words = [text.encode() for text in texts]
        self.longest = max(map(len, self._words)) - 1
        self._anywhere = np.ones(table.size, np.bool_)
        for word in self._words:
            self._anywhere[table.containing(word)] = False

    def allowed_after(self, tail: bytes) -> Bool[np.ndarray, "V"]:
        """Returns whether each token may follow a text that ends with `tail`."""
        flags = self._anywhere.copy()
        for word in self._words:
            for size in range(1, min(len(word), len(tail) + 1)):
                if tail.endswith(word[:size]):
                    flags[self.table.beginning(word[size:])] = False
        return flags


def bad_words(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    ends: Iterable[int],
    vocab_size: int,
    *,
    skip_special: bool,
) -> BadWords:
    """Returns the first state of an output without these words.

    Args:
        tokenizer: the model's.
        texts: the words.
        ends: the tokens that end the output, which are always allowed.
        vocab_size: the number of the model's logits.
        skip_special: whether special tokens are left out of the text, and always allowed.

    Raises:
        ValueError: the bytes of tokens are unknown.
    """
    made = _tables.setdefault(tokenizer, {})
    key = vocab_size, skip_special
    if key not in made:
        try:
            made[key] = TokenTable(tokenizer, vocab_size, skip_special=skip_special)
        except ValueError as error:
            raise ValueError(f"bad_words={[*texts]}: {error}") from None
    return BadWords(_words(tuple(texts), made[key]), (end for end in ends if end < vocab_size))


_words = lru_cache(KEPT)(Words)
