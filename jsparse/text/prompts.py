"""Checks prompts and converts them to token ids."""

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jsparse.models.chat_template import PLAIN_CHAT, ChatOptions
from jsparse.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jsparse.models.checkpoint import Params

BYTES = bytes | bytearray | memoryview
# the keys of vLLM's prompts
HELD_IN = {"prompt", "prompt_token_ids"}
# the key of a chat with options
MESSAGES = "messages"


def encode(
    params: "Params", prompt: Any, *, special_tokens: bool = False, continues: bool = False
) -> tuple[list[list[int]], bool]:
    """Returns the token ids of every prompt, and whether a single prompt was given.

    A prompt is text, chat messages (dicts with role and content), token ids (a list or an integer
    array), or a dict of one: vLLM's, or `messages` with the fields of ChatOptions. A list or 2-D
    array holds several prompts. `special_tokens`: whether special tokens spelled in chat messages
    count as such; in a text they always do. `continues`: whether the prompt follows other tokens,
    so that a text gets no beginning-of-sequence token.

    Raises:
        ValueError: a prompt is empty, has another type, or has ids outside the vocabulary.
    """
    prompt = plain(prompt)
    alone = _is_one(prompt)
    prompts = [prompt] if alone else list(prompt)
    if not prompts:
        raise ValueError("prompt=[]: must hold at least one prompt")
    rows = [_ids(params, p, special_tokens, continues) for p in prompts]
    kind = "continuation" if continues else "prompt"
    for row, ids in enumerate(rows):
        name = kind if alone else f"{kind}[{row}]"
        if not ids:
            raise ValueError(f"{name} is empty: must have at least one token")
        wrong = next((i for i in ids if not 0 <= i < params.config.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"{name} has token id {wrong}: must be from 0 to {params.config.vocab_size - 1}"
            )
    return rows, alone


def plain(prompt: Any) -> Any:
    """Returns prompts with each of vLLM's dicts replaced by its text or ids."""
    if isinstance(prompt, list | tuple):
        return [plain(each) if isinstance(each, dict) else each for each in prompt]
    if not isinstance(prompt, dict) or not prompt.keys() & HELD_IN:
        return prompt
    if len(prompt) > 1:
        raise ValueError(
            f"prompt={reprlib.repr(prompt)}: must have one key, prompt or prompt_token_ids, "
            "since prompts have no other data"
        )
    return next(iter(prompt.values()))


def tokenizer_of(params: "Params", purpose: str) -> Tokenizer:
    """Returns the model's tokenizer; raises ValueError if it has none."""
    if params.tokenizer is None:
        raise ValueError(
            f"{purpose} needs a tokenizer, and model {params.name!r} has none: give token ids"
        )
    return params.tokenizer


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str | dict):
        return True
    if hasattr(prompt, "ndim"):
        if prompt.ndim not in (1, 2):
            raise ValueError(
                f"prompt is an array of {prompt.ndim} axes: must have 1 (ids) or 2 (rows of ids)"
            )
        return prompt.ndim == 1
    if not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
        raise ValueError(
            f"prompt={prompt!r}: must be text, chat messages, token ids, or a list of them"
        )
    kinds = _kinds(prompt)
    if not all(_is_id(kind) or issubclass(kind, dict) for kind in kinds):
        return False
    some = any(issubclass(kind, dict) for kind in kinds)
    chats = some and any(isinstance(each, dict) and MESSAGES in each for each in prompt)
    return bool(prompt) and not chats


def _kinds(items: Iterable[Any]) -> set[type]:
    """Returns the types of the items; a loop over them would be slow for long prompts."""
    return set(map(type, items))


def _is_id(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool)


def _ids(params: "Params", prompt: Any, special_tokens: bool, continues: bool) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(params, "a text prompt")
        return tokenizer.encode(prompt, add_special_tokens=not continues)
    if hasattr(prompt, "ndim"):
        array = np.asarray(prompt)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"prompt is an array of {array.dtype}: token ids must be integers, one row per "
                "prompt"
            )
        return array.tolist()
    if isinstance(prompt, BYTES):  # a sequence of integers, but not of token ids
        raise ValueError(f"prompt={prompt!r}: must be text, not bytes")
    if isinstance(prompt, Sequence) and all(map(_is_id, kinds := _kinds(prompt))):
        return [*prompt] if kinds == {int} else [*map(int, prompt)]
    messages, options = _chat(prompt)
    if isinstance(messages, Sequence) and all(isinstance(item, dict) for item in messages):
        tokenizer = tokenizer_of(params, "a chat")
        return tokenizer.encode_chat(list(messages), options, special_tokens=special_tokens)
    raise ValueError(f"prompt={prompt!r}: must be text, chat messages or token ids")


def _chat(prompt: Any) -> tuple[Any, ChatOptions]:
    """Returns the messages of a chat prompt, and its options."""
    if not isinstance(prompt, dict):
        return prompt, PLAIN_CHAT
    options = {name: value for name, value in prompt.items() if name != MESSAGES}
    unknown = options.keys() - {*ChatOptions._fields}
    if unknown or MESSAGES not in prompt:
        raise ValueError(
            f"prompt={reprlib.repr(prompt)}: a dict must have prompt, prompt_token_ids, or "
            f"messages with at most {', '.join(ChatOptions._fields)}"
        )
    return prompt[MESSAGES], ChatOptions(**options)
