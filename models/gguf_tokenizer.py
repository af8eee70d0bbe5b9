"""Builds tokenizers from GGUF metadata, with llama.cpp's token ids.

Two families are supported: byte-level BPE ("gpt2": SmolLM2, Qwen2/2.5/3, Llama 3) and SentencePiece
pieces with byte fallback ("llama": Llama 2). Both become a `tokenizers` BPE model. Steps that
llama.cpp omits (such as Qwen2's NFC normalisation) are also omitted here.

Two differences remain. llama.cpp treats plain tokens as control tokens if their text looks like one
("</s>" is ordinary text for Qwen2, although its vocabulary has it); here only token_type decides.
Characters newer than the Unicode tables of either side (so far Unicode 16) may be split from their
neighbours differently.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's character for a space

# Values of token_type: unknown, control and user-defined tokens are recognised in text, others are
# not.
_USER_DEFINED = 4
_ADDED = (2, 3, _USER_DEFINED)

# Files often give the id of only one end token, so llama.cpp also stops at these tokens.
_ENDS_BY_TEXT = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class _PreTokenizer(NamedTuple):
    """Rules by which a byte-level BPE splits text into words before merging."""

    patterns: tuple[str, ...]
    """Regexes, each applied to the pieces of the previous one."""

    ignore_merges: bool = False
    """Whether a word that is itself a token stays whole, even if no merges produce it."""

    add_bos: bool = False
    """The default if the metadata lacks `add_bos_token`."""


def _cased_words(numbers: str) -> str:
    """Returns the pattern of Llama 3 and Qwen2, which differ only in `numbers`."""
    # Not (?i:...), because case folding would also match the long s, U+017F, which llama.cpp does
    # not.
    contractions = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    others = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{contractions}|{words}|{numbers}|{others}|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT2_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _PreTokenizer((_cased_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((_cased_words(r"\p{N}"),))

_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")),
    "gpt-2": _PreTokenizer((_GPT2_WORDS,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2_WORDS)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


class GGUFTokenizer(NamedTuple):
    """The parts of a tokenizer built from metadata."""

    core: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class _Vocabulary(NamedTuple):
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]


def build(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
        ValueError: the kind of tokenizer is unknown, a key is missing, or the values contradict
            each other.
    """
    kind = metadata.get(_KEY + "model")
    if kind == "gpt2":
        return _build_byte_level(metadata, _read_vocabulary(metadata))
    if kind == "llama":
        return _build_sentencepiece(metadata, _read_vocabulary(metadata))
    raise ValueError(f"{_KEY}model is {kind!r}; known tokenizer models are 'gpt2' and 'llama'")


def _build_byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> GGUFTokenizer:
    name = metadata.get(_KEY + "pre")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{_KEY}pre is {name!r}; known pre-tokenizers are "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]

    merges = _read_merges(metadata, vocabulary.ids)
    core = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    return _finish(core, metadata, vocabulary, add_bos=pre.add_bos, default_ids={})


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> GGUFTokenizer:
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if missing:
        raise ValueError(
            f"{_KEY}tokens lacks {len(missing)} of the 256 byte tokens, {missing[0]} first"
        )

    merges = _merges_from_scores(vocabulary, _read_scores(metadata, vocabulary.tokens))
    core = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, byte_fallback=True))
    # Normalisation runs on each stretch between added tokens, so each gets the leading space.
    prefixed = bool(metadata.get(_KEY + "add_space_prefix", True))
    prepend = [normalizers.Prepend(_SPACE)] if prefixed else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finish(core, metadata, vocabulary, add_bos=True, default_ids={"bos": 1, "eos": 2})


def _finish(
    core: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    *,
    add_bos: bool,
    default_ids: Mapping[str, int],
) -> GGUFTokenizer:
    """Adds the special tokens of both families: those within the text and those around it."""
    core.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in _ADDED
        ]
    )

    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom"):
        token_id = _read_token_id(metadata, name, len(vocabulary.tokens))
        token_id = default_ids.get(name) if token_id is None else token_id
        if token_id is not None:
            ids[name] = token_id

    flags = {
        "bos": metadata.get(_KEY + "add_bos_token", add_bos),
        "eos": metadata.get(_KEY + "add_eos_token", False),
    }
    around = [name for name, flag in flags.items() if flag]
    for name in around:
        if name not in ids:
            raise ValueError(
                f"{_KEY}{name}_token_id is missing, but that token must be added to the text"
            )
    if around:
        template = ("bos " if "bos" in around else "") + "$A" + (" eos" if "eos" in around else "")
        special = [
            {"id": name, "ids": [ids[name]], "tokens": [vocabulary.tokens[ids[name]]]}
            for name in around
        ]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    by_text = [vocabulary.ids[text] for text in _ENDS_BY_TEXT if text in vocabulary.ids]
    ends = (
        *(ids[name] for name in ("eos", "eot", "eom") if name in ids),
        *(token_id for token_id in by_text if vocabulary.types[token_id] in _ADDED),
    )
    return GGUFTokenizer(core, ids.get("bos"), ends)


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Converts scores to BPE merges, which list every way to join two tokens, best score first.

    llama.cpp merges greedily by score, so this is exact; ties go to the lower id.
    """
    tokens, ids, types = vocabulary
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        # The text of an added token never reaches the merges.
        if types[token_id] in _ADDED:
            continue
        token = tokens[token_id]
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in halves if left in ids and right in ids]
    return merges


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _read_list(metadata, "tokens", str)
    if not tokens:
        raise ValueError(f"{_KEY}tokens is empty; it must hold one token or more")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise ValueError(f"{_KEY}tokens holds {twice!r} twice; each token must occur once")
    types = (
        _read_list(metadata, "token_type", int)
        if _KEY + "token_type" in metadata
        else [1] * len(tokens)
    )
    _check_length("token_type", types, tokens)
    return _Vocabulary(tokens, ids, types)


def _read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs: dict[tuple[str, str], None] = {}  # of duplicate merges, the first rank counts
    for rank, merge in enumerate(_read_list(metadata, "merges", str)):
        left, _, right = merge.partition(" ")
        unknown = [piece for piece in (left, right, left + right) if piece not in ids]
        if unknown:
            raise ValueError(
                f"{_KEY}merges[{rank}] is {merge!r}, but {unknown[0]!r} is not in {_KEY}tokens"
            )
        pairs[left, right] = None
    return list(pairs)


def _read_scores(metadata: Mapping[str, Any], tokens: list[str]) -> list[float]:
    scores = _read_list(metadata, "scores", (int, float))
    _check_length("scores", scores, tokens)
    if any(map(math.isnan, scores)):
        raise ValueError(f"{_KEY}scores must be numbers, but there is a NaN among them")
    return scores


def _read_list(metadata: Mapping[str, Any], name: str, kinds: type | tuple[type, ...]) -> list[Any]:
    values = metadata.get(_KEY + name)
    if not isinstance(values, list):
        description = "missing" if values is None else f"of type {type(values).__name__}"
        raise ValueError(f"{_KEY}{name} is {description}; it must be a list")
    wrong = next((value for value in values if not isinstance(value, kinds)), None)
    if wrong is not None:
        raise ValueError(f"{_KEY}{name} holds {wrong!r}, of the wrong type {type(wrong).__name__}")
    return values


def _check_length(name: str, values: list[Any], tokens: list[str]) -> None:
    if len(values) != len(tokens):
        raise ValueError(
            f"{_KEY}{name} has {len(values)} entries, {_KEY}tokens has {len(tokens)}; they must "
            "agree"
        )


def _read_token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"{_KEY}{name}_token_id"
    token_id = metadata.get(key)
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
        raise ValueError(
            f"{key} is {token_id!r}; it must be an id below the number of tokens, {num_tokens}"
        )
    return token_id
