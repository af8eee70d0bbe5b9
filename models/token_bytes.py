"""Maps every id of a vocabulary to its bytes, for tokenizers of any kind."""

import json
from typing import Any

import tokenizers

_AT_THE_ENDS = ("Fuse", "Strip")  # steps that change no token in the middle of a text
_NO_BYTE = 0xFFFF


def token_bytes(core: tokenizers.Tokenizer) -> list[bytes]:
    """Returns the bytes of each id, as in the middle of a text; b"" for ids without a token.

    Two spellings are supported: the alphabet of byte-level BPE, in which each character is a byte,
    and SentencePiece's, with a character for a space and "<0x0A>" for a byte. Added tokens are
    their text.

    Raises:
        ValueError: the decoder has an unknown step.
    """
    steps = _steps(core)
    vocabulary = core.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if any(step["type"] == "ByteLevel" for step in steps):
        byte_of = _byte_level_alphabet()
        for token, token_id in vocabulary.items():
            try:
                table[token_id] = token.translate(byte_of).encode("latin-1")
            except UnicodeEncodeError:  # an added token, which is written as text
                table[token_id] = token.encode()
        return table
    replaced = _replaced(steps)
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    for token, token_id in vocabulary.items():
        byte = _fallback_byte(token) if has_bytes else None
        if byte is None:
            for old, new in replaced:
                token = token.replace(old, new)
            byte = token.encode()
        table[token_id] = byte
    return table


def _steps(core: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Returns the decoder's steps, all of them known to `token_bytes`."""
    if core.decoder is None:
        return []
    decoder = json.loads(core.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known = ("ByteLevel", "ByteFallback", "Metaspace", "Replace", *_AT_THE_ENDS)
    for step in steps:
        if step["type"] not in known or "Regex" in step.get("pattern", {}):
            raise ValueError(
                f"the tokenizer's decoder has the step {json.dumps(step)}: must be among "
                f"{', '.join(known)}, and replace plain strings only"
            )
    return steps


def _replaced(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns the strings that the decoder replaces, with their replacements."""
    pairs = []
    for step in steps:
        if step["type"] == "Replace":
            pairs.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            pairs.append((step["replacement"], " "))
    return pairs


def _fallback_byte(token: str) -> bytes | None:
    """Returns the byte of a token such as "<0x0A>"; None for other tokens."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _byte_level_alphabet() -> dict[int, int]:
    """Returns the byte for each character of GPT-2's spelling of bytes, both as numbers.

    Bytes that are printable in Latin-1 represent themselves; the others use characters from 256 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    shifted = {256 + index: byte for index, byte in enumerate(others)}
    return dict.fromkeys(others, _NO_BYTE) | dict(zip(printed, printed, strict=True)) | shifted
