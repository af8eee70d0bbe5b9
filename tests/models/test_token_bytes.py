"""Tests that the bytes of tokens concatenate to the text."""

import json
from pathlib import Path

import pytest
import tokenizers

from jsparse.models.tokenizer import Tokenizer
from tests.support.model_tokenizers import NAMES, tokenizer_of

pytestmark = pytest.mark.pure

FOLDER = Path(__file__).parents[1] / "fixtures" / "tokenizers"
CORPUS = json.loads((FOLDER / "corpus.json").read_text())


def of(model, decoder=None):
    core = tokenizers.Tokenizer(model)
    if decoder is not None:
        core.decoder = decoder
    return Tokenizer(core)


def test_bytes_of_a_texts_tokens_are_the_text():
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        found = tokenizer.token_bytes()
        assert len(found) == tokenizer.vocab_size, name
        for text in [*CORPUS["strings"], CORPUS["long_text"]]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            spelled = b"".join(found[token_id] for token_id in ids).decode(errors="replace")
            shown = tokenizer.decode(ids, skip_special_tokens=False)
            # SentencePiece puts a space in front of text, which decoding removes
            assert spelled == shown or (name == "llama" and spelled == " " + shown), name


def test_tokenizer_json_gives_the_same_bytes(tmp_path):
    for name in ["llama", "qwen2"]:
        tokenizer = tokenizer_of(name)
        tokenizer.to_files(tmp_path)
        assert Tokenizer.from_folder(tmp_path).token_bytes() == tokenizer.token_bytes(), name


def test_added_tokens_are_their_text_and_control_tokens_are_listed():
    qwen2, llama = tokenizer_of("qwen2"), tokenizer_of("llama")
    assert qwen2.token_bytes()[1157:] == [
        b"<|endoftext|>",
        b"<|im_start|>",
        b"<|im_end|>",
        b"<tool_call>",
        b"</tool_call>",
    ]
    assert qwen2.control_token_ids() == [1157, 1158, 1159]
    assert llama.token_bytes()[:3] == [b"<unk>", b"<s>", b"</s>"]
    assert llama.control_token_ids() == [0, 1, 2]


def test_end_ids_are_control_tokens_even_if_undeclared():
    words = {"a": 0, "</s>": 1, "<s>": 2}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    assert Tokenizer(core, bos_token_id=2, eos_token_ids=[1]).control_token_ids() == [1, 2]


def test_added_text_outside_the_byte_alphabet_is_utf8():
    words = tokenizers.models.BPE({"Ġa": 0, "Ċ": 1}, [])
    tokenizer = of(words, tokenizers.decoders.ByteLevel())
    tokenizer._core.add_tokens(["<｜end｜>", "two words", "\u0080"])
    assert tokenizer.token_bytes() == [
        b" a",
        b"\n",
        "<｜end｜>".encode(),
        b"two words",
        "\u0080".encode(),
    ]


def test_spaces_are_replaced_as_by_the_decoder():
    words = {"▁a": 0, "<0x0A>": 1, "<0xZZ>": 2}
    plain = of(tokenizers.models.BPE(words, []))
    assert plain.token_bytes() == ["▁a".encode(), b"<0x0A>", b"<0xZZ>"]
    metaspace = of(tokenizers.models.BPE(words, []), tokenizers.decoders.Metaspace())
    assert metaspace.token_bytes() == [b" a", b"<0x0A>", b"<0xZZ>"]
    both = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    assert of(tokenizers.models.BPE(words, []), both).token_bytes() == [b" a", b"\n", b"<0xZZ>"]


def test_other_spellings_are_refused():
    for decoder, named in [
        (tokenizers.decoders.WordPiece(), "WordPiece"),
        (tokenizers.decoders.Replace(tokenizers.Regex("▁+"), " "), "Regex"),
    ]:
        words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
        with pytest.raises(ValueError, match=f"step .*{named}.*: must be among ByteLevel"):
            of(words, decoder).token_bytes()
