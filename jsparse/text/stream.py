"""Decodes token ids into pieces of text as they arrive, cut at stop strings."""

from collections.abc import Sequence

import numpy as np

from jsparse.models.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# the most tokens per UTF-8 character, since each token has at least one byte
LONGEST = 4


class TextStream:
    """The decoder of one row's ids, which returns their text piece by piece.

    Text is withheld while its last character is incomplete, and while its end could still grow into
    a stop string to be cut off. `text` is everything so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...],
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        before: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Creates an empty text; without a tokenizer it stays empty.

        Of several stop strings, the one that starts first ends the text; a control token always
        does. Stop strings count only after `min_tokens` ids. `before` has the prompt's ids:
        decoders drop the space at the start of a text, but a completion's first token must keep it.
        """
        self.stopped = False
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        control = tokenizer.control_tokens if tokenizer and stop and skip_special else {}
        self._stop_tokens = {control[text]: text for text in stop if text in control}
        self._ids = self._last_of(before) if tokenizer else []
        self._given = len(self._ids)
        # ids whose text is final; decoding starts a few ids before the rest, for context
        self._settled = self._given
        self._context = 0
        self._text = ""
        self._emitted = 0
        self._searched = 0  # characters that complete no stop string

    @property
    def text(self) -> str:
        """The text decoded so far; a stop string ends it."""
        return self._text

    def shown(self, first: int = 0) -> str:
        """Returns the text of all pieces so far, from `first` on."""
        return self._text[first : self._emitted]

    def push(self, *tokens: int) -> str:
        """Adds ids and returns the text that is now certain, possibly none."""
        if self._tokenizer is None:
            return ""
        for token in tokens:
            new = len(self._ids) - self._given
            if token in self._stop_tokens and new >= self._min_tokens:
                return self._end_at(self._stop_tokens[token])
            self._ids.append(token)
        return self._advance(final=False)

    def _end_at(self, stop: str) -> str:
        """Returns the rest of the text, which ends at a stop string that is a control token."""
        piece = self._advance(final=True)
        if not self.stopped:
            self.stopped = True
            if self._include_stop:
                self._text, self._emitted = self._text + stop, self._emitted + len(stop)
                return piece + stop
        return piece

    def finish(self) -> str:
        """Returns the withheld text."""
        if self._tokenizer is None or self.stopped:
            return ""
        return self._advance(final=True)

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _last_of(self, before: Sequence[int] | np.ndarray) -> list[int]:
        """Returns the last ids with a text, from the start of a character on."""
        size = 2 * LONGEST
        while size < len(before) and self._decode([*before[-size:]])[:1] in ("", UNFINISHED):
            size *= 2
        return [*before[-size:]]

    def _advance(self, *, final: bool) -> str:
        grown = self._decode(self._ids[self._context :])
        if final or not grown.endswith(UNFINISHED):
            self._settle(len(self._ids), grown)
        elif len(self._ids) - self._settled > 2 * LONGEST:
            # invalid bytes: a text that ends LONGEST ids before the end is final
            for end in range(len(self._ids) - LONGEST, len(self._ids) - 2 * LONGEST, -1):
                part = self._decode(self._ids[self._context : end])
                if grown.startswith(part):  # no character spans its end
                    self._settle(end, part)
                    break
        self._cut()
        safe = len(self._text) if final or self.stopped else len(self._text) - self._held_back()
        piece, self._emitted = self._text[self._emitted : safe], max(safe, self._emitted)
        return piece

    def _settle(self, end: int, grown: str) -> None:
        """Adds the text up to id `end`; `grown` is the text from the start of the context on."""
        known = self._decode(self._ids[self._context : self._settled])
        # a prompt may end within a character, which `known` has as U+FFFD
        pairs = enumerate(zip(known, grown, strict=False))
        same = next((nth for nth, (old, new) in pairs if old != new), len(known))
        self._text += grown[same:]
        if len(grown) > len(known):  # ids without text are no context: a decoder may drop a space
            self._context = self._settled
        self._settled = end

    def _cut(self) -> None:
        if len(self._ids) - self._given > self._min_tokens:
            starts = [(self._found(stop), len(stop)) for stop in self._stop]
            matches = [(at, at + size) for at, size in starts if at >= 0]
            if matches:
                start, end = min(matches)
                self._text = self._text[: end if self._include_stop else start]
                self.stopped = True
        self._searched = len(self._text)

    def _found(self, stop: str) -> int:
        """Returns where the stop string starts, if the new text completes it, else -1."""
        return self._text.find(stop, max(0, self._searched + 1 - len(stop)))

    def _held_back(self) -> int:
        """Returns the length of the longest end of the text that starts a stop string to cut."""
        if self._include_stop:
            return 0
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text) - self._emitted), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0
