"""Finds special tokens spelled out in a text, and encodes their spelling as text."""

import re
from functools import cached_property

import tokenizers


class SpelledTokens:
    """A mask for special tokens spelled out in messages, which are then encoded as plain text."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core

    def hide(self, content: str, mark: str) -> str:
        """Returns the text with each special token replaced by its id, between two marks."""
        if not self.ids:
            return content
        return self._pattern.sub(lambda match: f"{mark}{self.ids[match[0]]}{mark}", content)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each special token by its text."""
        added = self._core.get_added_tokens_decoder()
        return {token.content: nth for nth, token in added.items() if token.special}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def as_text(self) -> dict[int, list[int]]:
        """The ids of each special token's spelling as text, by the token's id."""
        plain = tokenizers.Tokenizer.from_str(self._core.to_str())
        plain.encode_special_tokens = True
        return {
            nth: plain.encode(spelled, add_special_tokens=False).ids
            for spelled, nth in self.ids.items()
        }
