"""Splits the text of models that think before they answer into reasoning and answer.

Qwen3, DeepSeek-R1 and their relatives write their reasoning between <think> and </think>. Some chat
templates write <think> themselves, at the end of the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

BEGIN, END = "<think>", "</think>"
TAIL = 16  # tokens at a prompt's end that hold <think> and the line breaks after it


class Split(NamedTuple):
    """A text in two parts, without the tags and the line breaks around them."""

    reasoning: str
    answer: str


def split_reasoning(text: str, *, opened: bool = False) -> Split:
    """Splits a whole text.

    Args:
        text: a model's output.
        opened: whether the prompt left <think> open. A text with </think> but without <think> is
            taken for the output of such a prompt anyway.

    Returns:
        The reasoning, "" if there is none, and the answer.
    """
    opened = opened or (END in text and BEGIN not in text)
    return ReasoningSplitter(opened=opened).push(text, ended=True)


def opens_reasoning(prompt: str, continued: str | None = None) -> bool:
    """Returns whether a prompt leaves <think> open.

    Args:
        prompt: its end.
        continued: the message that the model continues; None: it starts one.
    """
    if continued is None:
        return prompt.rstrip().endswith(BEGIN)
    return continued.rfind(BEGIN) > continued.rfind(END)


def held_from(text: str, tag: str, spaces: str | None = None) -> int:
    """Returns where the end of a text begins that may belong to a tag.

    That is a proper start of the tag, with the `spaces` before it; None: any whitespace.
    """
    begun = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return len(text[: len(text) - begun].rstrip(spaces))


class ReasoningSplitter:
    """Splits a text that arrives in pieces.

    Attributes:
        tokens: the number of tokens of the reasoning so far, its tags included.
    """

    def __init__(self, *, opened: bool, end_token: int | None = None) -> None:
        """Begins a text.

        Args:
            opened: whether the prompt left <think> open; the text may repeat it.
            end_token: the token of </think>, if it is one; otherwise the tokens of the piece that
                holds </think> count as reasoning.
        """
        self.tokens = 0
        # whether the next text is reasoning; None until it is known whether <think> comes first
        self._reasons: bool | None = None
        self._opened, self._end_token = opened, end_token
        self._held, self._at_start = "", True
        self._ids: list[int] = []

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str, ids: Sequence[int] = (), *, ended: bool) -> Split:
        """Returns the two parts of a further piece.

        Args:
            text: the piece; text that may belong to a tag is held back until it is known.
            ids: its tokens, to be counted.
            ended: whether the text ends with it.
        """
        self._held += text
        self._ids += ids
        reasoning = answer = ""
        if self._reasons is None:
            self._start(ended)
        if self._reasons:
            reasoning = self._reasoning(ended)
        if self._reasons is False:
            answer, self._held = self._after_breaks(self._held), ""
            self._ids.clear()
        return Split(reasoning, answer)

    def _start(self, ended: bool) -> None:
        """Decides whether the text starts with reasoning, once that is known."""
        begun = self._held.lstrip()
        if begun.startswith(BEGIN):
            self._reasons, self._held = True, begun.removeprefix(BEGIN)
        elif ended or not BEGIN.startswith(begun):
            self._reasons = self._at_start = self._opened

    def _reasoning(self, ended: bool) -> str:
        """Returns the reasoning that is complete; afterwards `_held` is what follows."""
        before, found, after = self._held.partition(END)
        ids, self._ids = self._ids, []
        if found:
            ends = [nth for nth, token in enumerate(ids, 1) if token == self._end_token]
            self.tokens += ends[0] if ends else len(ids)
            made = self._after_breaks(before).rstrip("\n")
            self._reasons, self._held, self._at_start = False, after, True
            return made
        self.tokens += len(ids)
        at = len(self._held) if ended else held_from(self._held, END, "\n")
        made, self._held = self._after_breaks(self._held[:at]), self._held[at:]
        return made

    def _after_breaks(self, text: str) -> str:
        """Returns text without line breaks at the start of its part."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
