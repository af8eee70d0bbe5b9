"""Converts text to token ids and back, for every checkpoint format that jsparse reads.

`Tokenizer` wraps the Rust `tokenizers` library, which has its own file format (tokenizer.json);
`gguf_tokenizer` builds the same from GGUF metadata, and `tokenizer_files` reads it from a folder.
"""

import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jsparse.models import chat_template as chat_templates
from jsparse.models import gguf_tokenizer, tokenizer_files
from jsparse.models import token_bytes as bytes_of_tokens
from jsparse.models.chat_template import PLAIN_CHAT, ChatOptions
from jsparse.models.spelled_tokens import SpelledTokens

# a placeholder message, to find the end of the assistant's turn
_ANSWER = "\uf8ffanswer\uf8ff"


class Tokenizer:
    """A wrapper of a `tokenizers.Tokenizer`, which converts text to ids and back.

    Attributes:
        eos_token_ids: the ids that end a text or a turn, including the token that the chat template
            puts after an assistant's message; generation stops at any of them.
        vocab_size: the number of ids. The model's embedding may have more rows (padding).
        chat_template: the Jinja source of the chat template, or None.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ):
        """Wraps `core`, which must have a token for each of the ids.

        `named_tokens` are further tokens by their name in the chat template.
        """
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"chat_template is of type {type(chat_template).__name__}; it must be a string or "
                "None"
            )
        self._core = core
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self._bos_token = self._token("bos_token_id", bos_token_id)
        eos_tokens = {
            self._token("eos_token_ids", token_id): token_id for token_id in eos_token_ids
        }
        self._eos_token = next(iter(eos_tokens), None)
        self._named_tokens = dict(named_tokens or {})
        self.eos_token_ids = tuple(dict.fromkeys([*eos_tokens.values(), *self._turn_ends()]))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; special tokens written in the text are recognised.

        Bytes without a token are dropped, as in llama.cpp. With `add_special_tokens`, the
        checkpoint's special tokens are added around the text.

        Raises:
            ValueError: `text` is not a string, or has surrogates, which are not characters.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is of type {type(text).__name__}; it must be a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds {text[error.start]!a} at {error.start}, which UTF-8 cannot encode"
            ) from None
        return self._core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, a list or one-dimensional integer array.

        Bytes that do not form a character become U+FFFD. Ids past the vocabulary decode to nothing.
        Control tokens are omitted unless `skip_special_tokens` is False.

        Raises:
            ValueError: `ids` is not one-dimensional, or has values that are not ids.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"ids has shape {array.shape} and dtype {array.dtype}; it must be a flat list of "
                "integers"
            )
        if array.size and not 0 <= array.min() <= array.max() < 2**32:
            raise ValueError(
                f"ids range from {array.min()} to {array.max()}; they must be in [0, 2^32)"
            )
        return self._core.decode(array.tolist(), skip_special_tokens=skip_special_tokens)

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each id inside a text; b"" for ids without a token.

        Raises:
            ValueError: the tokenizer's spelling of tokens is unknown.
        """
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return bytes_of_tokens.token_bytes(self._core)

    def token_text(self, token_id: int) -> str:
        """Returns a token's text inside a text, including its leading space, if any.

        Bytes that do not form a character become U+FFFD; ids without a token give no text.
        """
        try:
            table = self.token_bytes()
        except ValueError:  # an unknown spelling: decode as at the start of a text
            return self.decode([token_id], skip_special_tokens=False)
        return table[token_id].decode(errors="replace") if token_id < len(table) else ""

    @cached_property
    def max_characters_per_token(self) -> int | None:
        """The maximum number of characters per token; None: unbounded or unknown."""
        model = self._core.model
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None:
            return None
        try:
            return max(map(len, self.token_bytes()), default=None)
        except ValueError:
            return None

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens by their text; `decode` omits them by default."""
        return self._spelled_tokens.ids

    @property
    def named_tokens(self) -> dict[str, str]:
        """The texts of tokens with a role, by name, such as bos_token and eos_token."""
        own = {"bos_token": self._bos_token, "eos_token": self._eos_token}
        return self._named_tokens | {
            name: token for name, token in own.items() if token is not None
        }

    def control_token_ids(self) -> list[int]:
        """Returns the ids of the tokens that are not text, such as the end of a turn."""
        special = set(self.control_tokens.values())
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        return sorted(special.union(bos, self.eos_token_ids))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], /, *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """Returns `messages` rendered by the model's chat template.

        If the template writes the beginning-of-sequence token, encode the text without
        `add_special_tokens`. `extra` are further variables for the template, such as tools or
        enable_thinking.

        Raises:
            ValueError: there is no template, the messages are malformed or the template fails.
        """
        if self.chat_template is None:
            raise ValueError(
                "chat_template is None: this checkpoint has no chat template, pass it plain text"
            )
        variables: dict[str, Any] = self.named_tokens
        variables |= {
            "tools": None,
            "documents": None,
            **extra,
            "add_generation_prompt": add_generation_prompt,
        }
        return chat_templates.render(self.chat_template, messages, variables)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions = PLAIN_CHAT,
        *,
        special_tokens: bool = False,
    ) -> list[int]:
        """Returns the ids of a chat for the model to continue, by the model's chat template.

        A content may be a list of parts {"type": "text", "text": …}. With `special_tokens`, special
        tokens spelled in messages count as such, so a message can then contain other turns, even
        system turns. Otherwise only the template's own count, and those that it joins from several
        strings.

        Raises:
            ValueError: an option is invalid, or as for `apply_chat_template`.
        """
        extra = chat_templates.variables(options, self.chat_template or "")
        # in no message; digits, since templates may escape other characters
        mark, end = (f"{secrets.randbelow(10**40):040d}" for _ in range(2))

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._spelled_tokens.hide(value, mark)
            if isinstance(value, Mapping):
                return {hidden(name): hidden(each) for name, each in value.items()}
            return [*map(hidden, value)] if isinstance(value, list | tuple) else value

        whole = chat_templates.normalised(messages)
        if not special_tokens:
            whole, extra = hidden(whole), hidden(extra)
        if options.continue_final_message and whole:
            last = whole[-1]
            if last.get("tool_calls"):
                raise ValueError("continue_final_message=True: the last message has tool calls")
            if isinstance(content := last.get("content"), str):
                whole = [*whole[:-1], {**last, "content": content + end}]
        text = self.apply_chat_template(whole, add_generation_prompt=options.generates, **extra)
        if options.continue_final_message:
            text, *others = text.split(end)
            if len(others) != 1:
                raise ValueError(
                    "continue_final_message=True: the chat template must write the last message, "
                    "and once"
                )
        ids = []
        # every other part is the id of a special token spelled in a message
        for nth, part in enumerate(text.split(mark)):
            if nth % 2:
                ids += self._spelled_tokens.as_text[int(part)]
            elif part:
                ids += self.encode(part, add_special_tokens=False)
        return ids

    @cached_property
    def _spelled_tokens(self) -> SpelledTokens:
        return SpelledTokens(self._core)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and, if they exist, the files around it.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file is malformed, or names a token that is not in the vocabulary.
        """
        return cls(**tokenizer_files.folder_parts(Path(path))._asdict())

    @classmethod
    def from_transformers(cls, tokenizer: Any, eos_token_ids: Iterable[Any] = ()) -> "Tokenizer":
        """Copies a fast transformers tokenizer: its ids, special tokens and chat template.

        `eos_token_ids` are further stop ids, or lists of them.

        Raises:
            ValueError: it is a slow one, or splits special tokens; or an id has no token.
        """
        return cls(**tokenizer_files.transformers_parts(tokenizer, eos_token_ids)._asdict())

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer from a GGUF file's metadata; its ids are llama.cpp's."""
        core, bos_token_id, eos_token_ids = gguf_tokenizer.build(metadata)
        template = metadata.get("tokenizer.chat_template")
        return cls(
            core, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids, chat_template=template
        )

    def with_template(self, chat_template: str) -> "Tokenizer":
        """Returns the tokenizer with another chat template, whose end of a turn it adds."""
        return Tokenizer(
            self._core,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            chat_template=chat_template,
            named_tokens=self._named_tokens,
        )

    def to_files(self, path: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json into a folder for `from_folder`."""
        config = {
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            "eos_token_ids": list(self.eos_token_ids),
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._named_tokens,
        }
        tokenizer_files.write(Path(path), self._core, config)

    def _turn_ends(self) -> list[int]:
        """Returns the token that the chat template puts after an assistant's message, if any."""
        if self.chat_template is None:
            return []
        roles = ("user", "assistant")
        messages = [{"role": role, "content": _ANSWER} for role in roles]
        try:
            text = self.apply_chat_template(messages, add_generation_prompt=False)
        except ValueError:  # the template cannot render this chat; `encode_chat` reports it
            return []
        _, found, after = text.rpartition(_ANSWER)
        added = self._core.get_added_tokens_decoder().items()
        begins = [(len(token.content), token_id) for token_id, token in added
                  if found and after.lstrip().startswith(token.content)]  # fmt: skip
        return [max(begins)[1]] if begins else []

    def _token(self, name: str, token_id: int | None) -> str | None:
        """Returns the text of a special token, for templates; None for the id None."""
        if token_id is None:
            return None
        token = (
            self._core.id_to_token(token_id)
            if isinstance(token_id, int) and token_id >= 0
            else None
        )
        if token is None:
            raise ValueError(
                f"{name} holds {token_id!r}; it must be an id of the vocabulary ({self.vocab_size} "
                "ids)"
            )
        return token


def as_tokenizer(tokenizer: Any, eos_token_ids: Iterable[Any] = ()) -> Tokenizer:
    """Returns a jsparse tokenizer unchanged, or copies a transformers one."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return Tokenizer.from_transformers(tokenizer, eos_token_ids)
