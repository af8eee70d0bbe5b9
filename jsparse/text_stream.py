"""Turns token ids into pieces of text as they arrive, cut at stop strings."""

from jsparse.models.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes one row's ids into text, piece by piece.

    A piece is held back while its last character is unfinished (a character may span several
    tokens) and while its end could still grow into a stop string. `text` is everything so far,
    without the stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._settled = (
            0  # ids whose text is final; decoding starts a few ids before the rest, for context
        )
        self._context = 0
        self._text = ""
        self._emitted = 0

    @property
    def text(self) -> str:
        """Returns the text decoded so far, up to a stop string."""
        return self._text

    def push(self, token: int) -> str:
        """Takes one id and returns the text that is now certain, possibly none."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Returns the text that was still held back."""
        if self._tokenizer is None or self.stopped:
            return ""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        assert self._tokenizer is not None
        known = self._tokenizer.decode(self._ids[self._context : self._settled])
        grown = self._tokenizer.decode(self._ids[self._context :])
        if final or not grown.endswith(UNFINISHED):
            self._text += grown[len(known) :]
            if len(grown) > len(
                known
            ):  # ids without text are no context: a decoder may drop a leading space
                self._context = self._settled
            self._settled = len(self._ids)
        self._cut()
        safe = len(self._text) if final or self.stopped else len(self._text) - self._held_back()
        piece, self._emitted = self._text[self._emitted : safe], max(safe, self._emitted)
        return piece

    def _cut(self) -> None:
        starts = [
            at for stop in self._stop if (at := self._text.find(stop, max(self._emitted, 0))) >= 0
        ]
        if starts:
            self._text, self.stopped = self._text[: min(starts)], True

    def _held_back(self) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text) - self._emitted), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0
