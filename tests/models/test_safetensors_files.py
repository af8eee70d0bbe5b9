"""Tests that damaged or inconsistent safetensors files are refused before a tensor is read."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jsparse.models.checkpoint import load
from tests.support.writers import (
    assert_refused,
    hf_config,
    hf_tensors,
    write_folder,
    write_raw_safetensors,
)

CONFIG = hf_config("llama", num_hidden_layers=1)
TENSORS = hf_tensors(CONFIG)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, TENSORS)


def test_truncated_files_are_refused(folder):
    for size in [0, 3, 8, 9, 200, -1]:
        file = folder / SINGLE
        save_file(TENSORS, file)
        file.write_bytes(file.read_bytes()[:size])
        assert_refused(folder, "model.safetensors is damaged")


def test_inconsistent_headers_are_refused(folder):
    for header in [
        b"not json",
        b"\xff\xfe{}",
        b"[" * 100_000,
        [1],
        {NAME: 3},
        {NAME: {"dtype": "F32", "shape": [2, 2]}},
        {NAME: {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}},
        {NAME: {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}},
        {NAME: {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]}},
        {NAME: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]}},
        {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}},
        {NAME: {"dtype": "F32", "shape": [2, 2], "data_offsets": [2**70, 2**70 + 16]}},
        {NAME: {"dtype": ["F32"], "shape": [2, 2], "data_offsets": [0, 16]}},
        {
            NAME: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
        },
    ]:
        write_raw_safetensors(folder / SINGLE, header, values=bytes(16))
        assert_refused(folder, "model.safetensors is damaged")
    header = {NAME: {"dtype": "I32", "shape": [2, 2], "data_offsets": [0, 16]}}
    write_raw_safetensors(folder / SINGLE, header, values=bytes(16))
    assert_refused(folder, "dtype 'I32': must be one of")


def test_header_longer_than_the_file_is_refused(folder):
    for length in [10_000, 2**31, 2**64 - 1]:
        write_raw_safetensors(folder / SINGLE, {}, length=length)
        assert_refused(folder, "model.safetensors is damaged")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 1200), byte=st.integers(0, 255))
def test_changed_byte_never_crashes(at, byte, folder):
    file = folder / SINGLE
    save_file(TENSORS, file)
    data = bytearray(file.read_bytes())
    data[at] = byte
    file.write_bytes(data)
    try:
        load(folder)
    except ValueError as error:
        assert str(file.parent) in str(error)


def test_config_that_contradicts_the_tensors_is_refused(folder):
    for change, match in [
        ({"num_hidden_layers": 2}, "lacks model.layers.1.*and 5 more"),
        ({"num_hidden_layers": 10**12}, "num_layers=1000000000000"),
        ({"hidden_size": 10**15}, "shape .* asks for"),
        ({"vocab_size": 41}, r"embed_tokens.weight has shape \(40, 32\): .* \(41, 32\)"),
        ({"intermediate_size": 32}, "gate_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"head_dim": 16}, "q_proj"),
        ({"model_type": "qwen2"}, "lacks .*bias"),
    ]:
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
        assert_refused(folder, match)


def test_unknown_tensors_are_refused_unless_harmless(tmp_path):
    tied = CONFIG | {"tie_word_embeddings": True}
    zeros = np.zeros(4, np.float32)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": zeros,
        "model.layers.0.mlp.gate_proj.bias": zeros,
    }
    twice = {"lm_head.weight": TENSORS["model.embed_tokens.weight"]}
    params = load(write_folder(tmp_path / "tied", tied, TENSORS | twice | harmless))
    assert "lm_head" not in params.weights["params"]
    assert params.config.tie_word_embeddings
    bias = {"model.layers.0.mlp.up_proj.bias": np.eye(1, 48, dtype=np.float32)[0]}
    assert_refused(write_folder(tmp_path / "bias", CONFIG, TENSORS | bias), "mlp.up_proj.bias")


def test_untied_head_is_used_even_if_the_config_says_tied(tmp_path):
    tied = CONFIG | {"tie_word_embeddings": True}
    params = load(write_folder(tmp_path / "own", tied, TENSORS))
    head = params.weights["params"]["lm_head"]
    np.testing.assert_array_equal(head, TENSORS["lm_head.weight"].T)
    assert not params.config.tie_word_embeddings
    smaller = {"lm_head.weight": TENSORS["lm_head.weight"][1:]}
    assert_refused(write_folder(tmp_path / "small", tied, TENSORS | smaller), "lm_head.*has shape")


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "sharded", CONFIG, TENSORS, num_shards=2)


def test_shards_outside_the_folder_are_refused(sharded):
    for shard in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"]:
        index = json.loads((sharded / INDEX).read_text())
        index["weight_map"][NAME] = shard
        (sharded / INDEX).write_text(json.dumps(index))
        assert_refused(sharded, "must be the name of a file in the same folder")


def test_wrong_index_is_refused(sharded):
    good = json.loads((sharded / INDEX).read_text())["weight_map"]
    first, second = sorted(set(good.values()))
    other = {first: second, second: first}

    def with_map(weight_map):
        (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return sharded

    assert_refused(with_map(good | {NAME: other[good[NAME]]}), "does not hold it")
    assert_refused(with_map(good | {"no.such.weight": first}), "no.such.weight")
    fewer = {name: shard for name, shard in good.items() if name != NAME}
    assert_refused(with_map(fewer), f"holds {NAME}, which the index does not place there")
    assert_refused(with_map([1]), "weight_map")
    assert_refused(with_map({NAME: 3}), "weight_map")
    (sharded / second).unlink()
    assert_refused(with_map(good), second, FileNotFoundError)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "weights.pkl"])
def test_pickles_are_never_loaded(pickle, folder):
    (folder / SINGLE).rename(folder / pickle)
    assert_refused(folder, f"{pickle}: pickle")
    assert_refused(folder / pickle, "pickle")


def test_incomplete_folders_are_refused(folder, tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere", FileNotFoundError)
    assert_refused(folder / SINGLE, "pass its folder")
    assert_refused(folder / "config.json", "must be a .gguf file or a folder")
    (folder / SINGLE).unlink()
    assert_refused(folder, "no safetensors", FileNotFoundError)
    (folder / "config.json").write_text("{")
    assert_refused(folder, "config.json is not valid JSON")
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json does not exist", FileNotFoundError)
