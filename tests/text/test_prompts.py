"""Tests valid prompts and refusals."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jsparse.text.prompts import encode

pytestmark = pytest.mark.pure

VOCAB = 100
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


class LetterTokenizer:
    """Returns one id per letter; 1 precedes a text, like a beginning-of-sequence token."""

    def __init__(self, bos: bool = True):
        self.bos = bos

    def encode(self, text, *, add_special_tokens=True):
        return [1] * (self.bos and add_special_tokens) + [ord(c) - ord("a") + 2 for c in text]

    def encode_chat(self, messages, options, *, special_tokens):
        assert not special_tokens
        text = "".join(m["content"] for m in messages) + "z" * options.generates
        text += options.chat_template_kwargs.get("more", "")
        return self.encode(text, add_special_tokens=False)


def params(tokenizer: Any = None) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, config=SimpleNamespace(vocab_size=VOCAB), name="toy"
    )


LETTERS = params(LetterTokenizer())


def test_continuations_of_a_prompt():
    """Nothing is added to a text, so an empty one has no tokens."""
    for prompt, row in (("abc", [2, 3, 4]), ([5, 6], [5, 6]), (CHAT, [9, 10, 26, 16, 27])):
        assert encode(LETTERS, prompt, continues=True) == ([row], True)
    with pytest.raises(ValueError, match="^continuation is empty: must have at least one token"):
        encode(LETTERS, "", continues=True)


def test_prompts():
    for prompt, rows, alone in [
        ("abc", [[1, 2, 3, 4]], True),
        ("", [[1]], True),  # only the beginning-of-sequence token
        (["ab", "c"], [[1, 2, 3], [1, 4]], False),
        (CHAT, [[9, 10, 26, 16, 27]], True),
        ([CHAT, "a"], [[9, 10, 26, 16, 27], [1, 2]], False),
        ({"messages": CHAT}, [[9, 10, 26, 16, 27]], True),
        ({"messages": CHAT, "continue_final_message": True}, [[9, 10, 26, 16]], True),
        (
            [{"messages": CHAT, "chat_template_kwargs": {"more": "a"}}, CHAT],
            [[9, 10, 26, 16, 27, 2], [9, 10, 26, 16, 27]],
            False,
        ),
        ({"messages": CHAT, "add_generation_prompt": False}, [[9, 10, 26, 16]], True),
        ([OrderedDict(messages=CHAT)], [[9, 10, 26, 16, 27]], False),
        ([5, 6], [[5, 6]], True),
        ([0, VOCAB - 1], [[0, VOCAB - 1]], True),
        ([np.int64(5), np.int32(6)], [[5, 6]], True),
        (np.array([5, 6], np.uint8), [[5, 6]], True),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]], False),
        ([[5], [6, 7]], [[5], [6, 7]], False),
        ([np.array([5]), [6, 7], "a", (8,)], [[5], [6, 7], [1, 2], [8]], False),
    ]:
        got = encode(LETTERS, prompt)
        assert got == (rows, alone), prompt
        assert all(type(token) is int for row in got[0] for token in row), prompt


def test_refused():
    for prompt, message in [
        (np.zeros((0, 3), int), r"prompt=\[\]: must hold"),
        ([[]], r"prompt\[0\] is empty"),
        ([[1], []], r"prompt\[1\] is empty"),
        (np.zeros(0, int), "prompt is empty"),
        ([5, VOCAB], f"prompt has token id {VOCAB}: must be from 0 to {VOCAB - 1}"),
        ([5, -1], "prompt has token id -1: must be"),
        (["a", [1000]], r"prompt\[1\] has token id 1000"),
        (np.zeros((1, 1, 1), int), "prompt is an array of 3 axes"),
        (np.int32(3), "prompt is an array of 0 axes"),
        (np.array([1.0]), "prompt is an array of float64: token ids must be integers"),
        ([np.zeros((2, 2), int)], "one row per prompt"),
        (None, "prompt=None: must be text, chat messages, token ids"),
        ({1, 2}, "prompt={1, 2}: must be"),
        ([b"ab"], "prompt=b'ab': must be text, not bytes"),
        ([True, False], "prompt=True: must be text"),
        ([1, {"role": "user"}], r"prompt=\[1, {'role': 'user'}\]: must be"),
        ([[1, "a"]], r"prompt=\[1, 'a'\]: must be"),
        (
            {"role": "user"},
            "prompt={'role': 'user'}: a dict must have prompt, prompt_token_ids, or",
        ),
        ({"messages": CHAT, "documents": []}, "messages with at most add_generation_prompt"),
        ({"messages": "hi"}, "prompt={'messages': 'hi'}: must be text, chat messages"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            encode(LETTERS, prompt)
        assert "\n" not in str(error.value), message


def test_empty_text_without_a_beginning_of_sequence_is_refused():
    with pytest.raises(ValueError, match="prompt is empty: must have at least one token"):
        encode(params(LetterTokenizer(bos=False)), "")


def test_text_needs_a_tokenizer():
    for prompt, purpose in [("hi", "a text prompt"), (CHAT, "a chat"), ([[1], "hi"], "a text")]:
        with pytest.raises(
            ValueError,
            match=f"{purpose}.* needs a tokenizer, and model 'toy' has none: give token ids",
        ):
            encode(params(), prompt)
        assert encode(params(), [1, 2]) == ([[1, 2]], True), prompt
