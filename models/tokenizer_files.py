"""Reads the parts of a tokenizer from files or from a transformers one, and writes its files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from jsparse.models.safetensors_files import read_json

_NAMED_TOKENS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that chat templates may name, besides bos_token and eos_token."""
_FLAGS = {"special", "normalized", "lstrip", "rstrip", "single_word"}


class TokenizerParts(NamedTuple):
    """Arguments of jsparse.models.tokenizer.Tokenizer, documented there."""

    core: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: list[Any]
    chat_template: str | None
    named_tokens: dict[str, str]


def folder_parts(folder: Path) -> TokenizerParts:
    """Reads tokenizer.json and the files around it, as `Tokenizer.from_folder` describes."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"path is {str(folder)!r}, but there is no tokenizer.json in it")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{str(file)!r} is not a tokenizer: {error}") from error
    core.no_truncation()
    core.no_padding()

    config = _read_json(folder / "special_tokens_map.json") | _read_json(
        folder / "tokenizer_config.json"
    )
    _add_stated_tokens(core, config, folder)
    bos_id = _special_id(core, config, "bos_token")
    eos_ids = config.get("eos_token_ids")
    if eos_ids is None:
        eos_id = _special_id(core, config, "eos_token")
        eos_ids = _flat([eos_id, *stated_ends(folder)])
    _add_named_tokens(core, config)
    return TokenizerParts(
        core,
        bos_token_id=bos_id,
        eos_token_ids=eos_ids,
        chat_template=_read_chat_template(folder, config),
        named_tokens=_named_tokens(config),
    )


def transformers_parts(tokenizer: Any, eos_token_ids: Iterable[Any]) -> TokenizerParts:
    """Copies a fast transformers tokenizer, as `Tokenizer.from_transformers` describes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer).__name__
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"tokenizer is of type {kind}: must be a fast transformers tokenizer (with a "
            "backend_tokenizer), as AutoTokenizer.from_pretrained gives, or a jsparse one"
        )
    if getattr(tokenizer, "split_special_tokens", False):
        raise ValueError(
            f"tokenizer, of type {kind}, has split_special_tokens=True: must be False, since "
            "prompts and chats write special tokens as text"
        )
    core = tokenizers.Tokenizer.from_str(backend.to_str())
    core.no_truncation()
    core.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    return TokenizerParts(
        core,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=_flat([tokenizer.eos_token_id, *eos_token_ids]),
        chat_template=template,
        named_tokens=_named_tokens(tokenizer.special_tokens_map),
    )


def write(folder: Path, core: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a folder, for `folder_parts`."""
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def stated_ends(folder: Path) -> list[Any]:
    """Returns the eos_token_id of each of the model's own files: an id, a list of ids or None."""
    files = (folder / "generation_config.json", folder / "config.json")
    return [_read_json(file).get("eos_token_id") for file in files]


def _flat(values: Iterable[Any]) -> list[Any]:
    """Returns the ids as one list, without None."""
    lists = (ids if isinstance(ids, list) else [] if ids is None else [ids] for ids in values)
    return [token_id for ids in lists for token_id in ids]


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in `file`, or an empty one if the file does not exist."""
    return read_json(file) if file.is_file() else {}


def _add_stated_tokens(core: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Adds the tokens of added_tokens_decoder, whose flags override those of tokenizer.json.

    As in transformers, a new token gets the next id, whatever id is stated, and added_tokens.json
    is used if added_tokens_decoder is missing.
    """
    added = core.get_added_tokens_decoder().values()
    named = {_content(value) for key, value in config.items() if key.endswith("_token")}
    stated = config.get("added_tokens_decoder")
    if stated is None:
        older = _read_json(folder / "added_tokens.json")
        new = older.keys() - {token.content for token in added}
        stated = {older[text]: {"content": text, "special": text in named} for text in new}
    try:
        by_id = sorted((int(token_id), fields) for token_id, fields in stated.items())
        tokens = [
            AddedToken(fields["content"], **{name: fields[name] for name in _FLAGS & fields.keys()})
            for _, fields in by_id
        ]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ValueError(
            f"{str(folder)!r}: added_tokens_decoder must map ids to objects with a content and "
            f"flags, among {', '.join(sorted(_FLAGS))}"
        ) from None
    known = {repr(token) for token in added}
    for token in tokens:
        if repr(token) not in known:
            token.special = token.special or token.content in named
            core.add_tokens([token])


def _add_named_tokens(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the special tokens that the config names but no file describes."""
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    further = further.values() if isinstance(further, dict) else further
    tokens = [value for key, value in config.items() if key.endswith("_token")] + [*further]
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for token in tokens:
        content = _content(token)
        if isinstance(content, str) and content and content not in known:
            flags = token if isinstance(token, dict) else {}
            strips = {name: flags.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            core.add_tokens([AddedToken(content, special=True, **strips)])


def _special_id(core: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    token = _content(config.get(name))
    if token is None:
        return None
    token_id = core.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise ValueError(f"{name} is {token!r}; it must be a token of the vocabulary")
    return token_id


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _content(token: Any) -> Any:
    """Returns a token's text, which files may store with its stripping rules."""
    return token.get("content") if isinstance(token, dict) else token


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template
