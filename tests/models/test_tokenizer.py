"""Tests ids against llama.cpp's (fixtures/tokenizers), and texts against given ones."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jsparse.models.tokenizer import Tokenizer
from tests.support import model_tokenizers
from tests.support.marks import slow_except

pytestmark = pytest.mark.pure

FOLDER = Path(__file__).parents[1] / "fixtures" / "tokenizers"
CORPUS = json.loads((FOLDER / "corpus.json").read_text())
CASES = json.loads((FOLDER / "ids.json").read_text())["cases"]


def metadata_of(case: str) -> dict[str, Any]:
    name = (CASES[case]["file"] or "smollm2").removesuffix(".gguf")
    return model_tokenizers.metadata_of(name) | CASES[case]["changes"]


@functools.cache
def tokenizer_of(case: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of(case))


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_those_of_llama_cpp(case):
    tokenizer = tokenizer_of(case)
    expected = dict(zip(CORPUS["strings"], CASES[case]["ids"], strict=True))
    assert {text: tokenizer.encode(text) for text in expected} == expected
    ids = tokenizer.encode(CORPUS["long_text"])
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
    assert {"count": len(ids), "sha256": digest} == CASES[case]["long"]


def test_special_ids_come_from_the_metadata():
    for case, bos, eos, size in [("smollm", 1, (2, 0), 49152), ("qwen2", 1157, (1159, 1157), 1162),
     ("llama-bpe", 1157, (1158, 1161), 1162), ("llama", 1, (2,), 1226)]:  # fmt: skip
        tokenizer = tokenizer_of(case)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, eos), case
        assert tokenizer.vocab_size == size, case


def test_gguf_end_tokens_are_recognised_by_their_text():
    for case, text, eos_id in [("qwen2", "<|im_end|>", 1157), ("qwen2", "<|endoftext|>", 1159),
     ("llama-bpe", "<|eot_id|>", 1158), ("llama-bpe", "<|end_of_text|>", 1161)]:  # fmt: skip
        keys = ("eot_token_id", "eom_token_id", "chat_template")
        metadata = {k: v for k, v in metadata_of(case).items() if not k.endswith(keys)}
        metadata["tokenizer.ggml.eos_token_id"] = eos_id
        end = metadata["tokenizer.ggml.tokens"].index(text)
        assert {eos_id, end} <= set(Tokenizer.from_gguf(metadata).eos_token_ids), case
        types = list(metadata["tokenizer.ggml.token_type"])
        types[end] = 1  # ordinary text that may occur in a prompt
        plain = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": types})
        assert end not in plain.eos_token_ids, case


# SmolLM2's vocabulary lacks these bytes, so that they are in no token; llama.cpp also drops them.
LACKING = {"smollm": {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}}


@pytest.mark.parametrize("case", slow_except(["smollm", "llama-bpe"], "llama-bpe"))
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
@example("nul \x00 and \U0010ffff, a\u0301 \u200d, \ufffd")
def test_byte_level_text_survives(case, text):
    tokenizer = tokenizer_of(case)
    assume(LACKING.get(case, set()).isdisjoint(text.encode()))
    assume(not any(token in text for token in tokenizer.control_tokens))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
@example("  leading spaces stay  ")
def test_sentencepiece_text_survives(text):
    tokenizer = tokenizer_of("llama")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_skips_only_control_tokens():
    tokenizer = tokenizer_of("qwen2")
    ids = tokenizer.encode("<|im_start|>a<tool_call>b<|im_end|>")
    assert tokenizer.decode(ids) == "a<tool_call>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<tool_call>b<|im_end|>"


def test_decode_refuses_invalid_ids():
    for ids in [[-1], [2**32], [[1, 2]], 3, [0.5], ["a"], [True], "ab"]:
        with pytest.raises(ValueError, match="ids"):
            tokenizer_of("qwen2").decode(ids)


def test_encode_refuses_non_text():
    for text, message in [(b"bytes", "of type bytes"), (None, "NoneType"), ("a\ud800", "at 1")]:
        with pytest.raises(ValueError, match=message):
            tokenizer_of("qwen2").encode(text)


def test_maximum_number_of_characters_of_a_token():
    assert tokenizer_of("smollm").max_characters_per_token == max(
        map(len, tokenizer_of("smollm").token_bytes())
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    assert Tokenizer(words).max_characters_per_token is None


# folders


def write_folder(folder: Path, **files: Any) -> Path:
    """Writes a tokenizer of four words and the given values, each as name.json."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3, "a": 4, "b": 5}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.add_special_tokens(["<unk>", "<s>", "</s>", "<turn>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    core.enable_truncation(2)
    core.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_folder_with_tokenizer_json_alone(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    assert tokenizer.encode("a b a<turn>") == [1, 4, 5, 4, 3]  # not truncated
    assert tokenizer.decode([1, 4, 5, 2]) == "a b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert (tokenizer.chat_template, tokenizer.vocab_size) == (None, 6)


def test_folder_names_special_tokens(tmp_path):
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    ends = {"generation_config": {"eos_token_id": [3, 2]}, "config": {"eos_token_id": 2}}
    path = write_folder(tmp_path, tokenizer_config=config | {"chat_template": "x"}, **ends)
    tokenizer = Tokenizer.from_folder(str(path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 3))
    assert tokenizer.chat_template == "x"


def test_folder_chat_templates_by_name_and_by_file(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "from the file"


def stated(content: str, **flags: bool) -> dict[str, Any]:
    """A token in the form of added_tokens_decoder."""
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True} | usual | flags


NEW = {"added_tokens_decoder": {"6": stated("<tool>")}}


# results of transformers 5.24 for these folders
def test_tokens_missing_from_tokenizer_json_are_added(tmp_path):
    for nth, (files, text, ids, decoded) in enumerate([
        ({}, "a<turn>b", [4, 3, 5], "a b"),
        ({"tokenizer_config": NEW}, "a<tool>b", [4, 6, 5], "a b"),
        # ids are consecutive, in the order of the stated ones
        ({"tokenizer_config": {"added_tokens_decoder": {"90": stated("<x>"), "9": stated("<y>")}}},
         "<x><y>", [7, 6], ""),
        ({"tokenizer_config": {"added_tokens_decoder": {"3": stated("<turn>", special=False)}}},
         "a<turn>", [4, 3], "a"),
        ({"tokenizer_config": {"added_tokens_decoder": {"3": stated("<turn>", single_word=True)}}},
         "a<turn>b", [4, 0, 0, 0, 5], "a b"),
        ({"tokenizer_config": {"added_tokens_decoder": {"6": stated("b a", special=False)}}},
         "b a b", [6, 5], "b a b"),
        ({"tokenizer_config": {"additional_special_tokens": ["<x>", "<turn>", "<y>"]}},
         "<y><turn><x>", [7, 3, 6], ""),
        ({"tokenizer_config": {"pad_token": "<pad>"}}, "a<pad>", [4, 6], "a"),
        ({"tokenizer_config": NEW | {"additional_special_tokens": ["<x>", "<tool>"]}},
         "<x><tool>", [7, 6], ""),
        ({"special_tokens_map": {"pad_token": "<pad>"}}, "a<pad>", [4, 6], "a"),
        ({"added_tokens": {"<x>": 6}}, "a<x>", [4, 6], "a <x>"),
    ]):  # fmt: skip
        folder = tmp_path / str(nth)
        folder.mkdir()
        tokenizer = Tokenizer.from_folder(write_folder(folder, **files))
        assert tokenizer.encode(text, add_special_tokens=False) == ids, files
        assert tokenizer.decode(ids) == decoded, files


def test_end_tokens_may_be_named_only_in_the_config(tmp_path):
    folder = write_folder(tmp_path, tokenizer_config=NEW | {"eos_token": "<tool>"})
    assert Tokenizer.from_folder(folder).eos_token_ids == (6,)


def test_token_after_an_assistant_message_ends_a_turn(tmp_path):
    no = "{{ raise_exception('no') }}"
    cases = ("<turn>\n", (2, 3)), ("</s>", (2,)), ("\n", (2,)), (no, (2,))
    for nth, (after, ends) in enumerate(cases):
        folder = tmp_path / str(nth)
        folder.mkdir()
        template = "{% for m in messages %}<s>{{ m.content }}" + after + "{% endfor %}"
        config = {"eos_token": "</s>", "chat_template": template}
        write_folder(folder, tokenizer_config=config, generation_config={"eos_token_id": 2})
        assert Tokenizer.from_folder(folder).eos_token_ids == ends, after


def test_malformed_folders_are_refused(tmp_path):
    config = "tokenizer_config.json"
    cases = [
        ("tokenizer.json", "{}", "not a tokenizer"),
        (config, "{", "not valid JSON"),
        (config, "[]", "must be an object"),
        (config, '{"eos_token": "<nope>"}', "eos_token is '<nope>'"),
        (config, '{"chat_template": {"a": 1}}', "chat_template is of type dict"),
        (config, '{"added_tokens_decoder": [1]}', "added_tokens_decoder must map"),
        (config, '{"added_tokens_decoder": {"x": {}}}', "must map ids"),
        ("generation_config.json", '{"eos_token_id": 6}', "eos_token_ids holds 6"),
        ("config.json", '{"eos_token_id": "</s>"}', "eos_token_ids holds '</s>'"),
    ]
    for nth, (name, content, message) in enumerate(cases):
        folder = tmp_path / str(nth)
        folder.mkdir()
        write_folder(folder)
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_folder(folder)


def test_saved_files_restore_the_tokenizer(tmp_path):
    for nth, case in enumerate(["smollm", "qwen2", "llama-bpe", "llama", "llama with eos"]):
        folder = tmp_path / str(nth)
        folder.mkdir()
        tokenizer = tokenizer_of(case)
        tokenizer.to_files(folder / "new")
        back = Tokenizer.from_folder(folder / "new")
        for name in ("bos_token_id", "eos_token_ids", "vocab_size", "chat_template"):
            assert getattr(back, name) == getattr(tokenizer, name), case
        for text, ids in zip(CORPUS["strings"], CASES[case]["ids"], strict=True):
            assert back.encode(text) == ids, case
            assert back.decode(ids) == tokenizer.decode(ids), case


# wrong metadata


def changed(case: str, name: str, value: Any) -> dict[str, Any]:
    """Changes tokenizer.ggml.`name` in the case's metadata, or drops it if `value` is None."""
    metadata = metadata_of(case) | {f"tokenizer.ggml.{name}": value}
    return {key: value for key, value in metadata.items() if value is not None}


def test_wrong_metadata_are_refused():
    for case, name, value, message in [
        ("qwen2", "model", "bert", "'bert'; known tokenizer models are 'gpt2' and 'llama'"),
        ("qwen2", "model", None, "model is None"),
        ("qwen2", "pre", "falcon", "'falcon'; known pre-tokenizers are .*'smollm', 'qwen2'"),
        ("qwen2", "pre", None, "pre is None"),
        ("qwen2", "tokens", None, "tokens is missing"),
        ("qwen2", "tokens", [], "tokens is empty"),
        ("qwen2", "tokens", ["a", "b", "a"], "'a' twice"),
        ("qwen2", "tokens", ["a", 3], "holds 3"),
        ("qwen2", "token_type", [1, 1], "token_type has 2 entries, tokenizer.ggml.tokens has 1162"),
        ("qwen2", "merges", None, "merges is missing"),
        ("qwen2", "merges", ["ab"], r"merges\[0\]"),
        ("qwen2", "bos_token_id", 1162, "bos_token_id is 1162.*1162"),
        ("qwen2", "eos_token_id", -1, "eos_token_id is -1"),
        ("qwen2", "eot_token_id", 10**9, "eot_token_id is 1000000000"),
        ("llama-bpe", "bos_token_id", None, "bos_token_id is missing"),
        ("llama", "scores", None, "scores is missing"),
        ("llama", "scores", [0.0] * 7, "scores has 7 entries"),
        ("llama", "scores", [float("nan")] * 1226, "NaN"),
        ("llama", "tokens", [f"t{i}" for i in range(1226)], "lacks 256 of the 256 byte tokens"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            Tokenizer.from_gguf(changed(case, name, value))
        assert "\n" not in str(error.value), message


def test_first_rank_of_a_repeated_merge_counts():
    metadata = metadata_of("qwen2")
    merges = metadata["tokenizer.ggml.merges"]
    again = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": merges + merges[:20]})
    for text, ids in zip(CORPUS["strings"], CASES["qwen2"]["ids"], strict=True):
        assert again.encode(text) == ids
