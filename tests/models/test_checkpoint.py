"""Tests loading and saving: all formats give the same weights, and a saved model loads again."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jsparse.models.checkpoint import load, save
from jsparse.models.generation_config import resolve_settings
from jsparse.models.tokenizer import Tokenizer
from jsparse.models.transformer import weight_shapes
from tests.support.writers import (
    assert_refused,
    expected_weights,
    hf_config,
    hf_tensors,
    write_folder,
    write_gguf,
)

CONFIG = hf_config("llama", num_hidden_layers=1)
TENSORS = hf_tensors(CONFIG)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, TENSORS)


def assert_same(weights, expected):
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("qwen2", True),
        ("qwen3", False),
        ("qwen2_moe", False),
        pytest.param("mistral", True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
    ],
)
def test_every_format_gives_the_same_weights(family, tied, tmp_path):
    config = hf_config(family, tie_word_embeddings=tied)
    tensors = hf_tensors(config)
    expected = expected_weights(config, tensors)

    single = load(write_folder(tmp_path / "single", config, tensors))
    assert_same(single.weights, expected)
    shapes = weight_shapes(single.config, jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), single.weights) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    assert_same(
        load(write_folder(tmp_path / "sharded", config, tensors, num_shards=3)).weights, expected
    )
    assert_same(load(write_gguf(tmp_path / "m.gguf", config, tensors)).weights, expected)
    save(single, tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert_same(saved.weights, expected)
    assert saved.config == single.config


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_weights_are_cast_to_the_requested_dtype(stored, dtype, tmp_path):
    tensors = {name: tensor.astype(stored) for name, tensor in TENSORS.items()}
    params = load(write_folder(tmp_path, CONFIG, tensors), dtype=dtype)
    assert params.dtype == jnp.dtype(dtype)
    expected = expected_weights(
        CONFIG, {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    )
    assert_same(params.weights, expected)


def test_saved_model_keeps_its_bits_and_can_be_cast(folder, tmp_path):
    params = load(folder, dtype="bfloat16")
    save(params, tmp_path / "saved")
    assert_same(load(tmp_path / "saved", dtype="bfloat16").weights, params.weights)
    wide = load(tmp_path / "saved", dtype=jnp.float32).weights
    assert_same(wide, jax.tree.map(lambda array: np.asarray(array, np.float32), params.weights))


def test_dtype_defaults_to_float32_without_a_gpu(folder, monkeypatch):
    for backend, dtype in [("cpu", jnp.float32), ("gpu", jnp.bfloat16)]:
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert load(folder).dtype == dtype, backend


def test_other_dtypes_are_refused(folder):
    for dtype in ["int8", "float64", "no such", 3.5, "float8_e4m3fn"]:
        with pytest.raises(ValueError, match="dtype=.*must be one of"):
            load(folder, dtype=dtype)


def test_progress_ends_at_the_total(folder, tmp_path):
    save(load(folder), tmp_path / "saved")
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    for model in (write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS), tmp_path / "saved"):
        calls = []
        load(model, on_progress=lambda *call, calls=calls: calls.append(call))
        assert calls[-1] == (total, total)
        assert {t for _, t in calls} == {total}
        assert calls == sorted(calls)
        assert model.is_dir() or len(calls) == len(TENSORS)


def test_rope_scaling_survives_saving(folder, tmp_path):
    for rule in [
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "attention_factor": 1.5, "truncate": False},
        {"rope_type": "linear"},
    ]:
        rule |= {"factor": 8.0, "original_max_position_embeddings": 64}
        (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": rule}))
        params, saved = load(folder), tmp_path / rule["rope_type"]
        assert params.config.rope_scaling is not None
        assert params.config.rope_scaling.rope_type == rule["rope_type"]
        save(params, saved)
        assert load(saved).config == params.config
        if rule["rope_type"] == "llama3":  # version 0.1 had no other rule and wrote no type
            config = json.loads((saved / "config.json").read_text())
            del config["rope_scaling"]["rope_type"]
            (saved / "config.json").write_text(json.dumps(config))
            assert load(saved).config == params.config


def tiny_tokenizer():
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(core, eos_token_ids=[2])


def test_tokenizer_is_optional_but_must_be_valid(folder, tmp_path):
    assert load(folder).tokenizer is None
    tiny_tokenizer().to_files(folder)
    params = load(folder)
    assert params.tokenizer is not None
    assert params.tokenizer.encode("b a") == [1, 0]
    save(params, tmp_path / "saved")
    restored = load(tmp_path / "saved").tokenizer
    assert restored is not None
    assert (restored.encode("b a"), restored.eos_token_ids) == ([1, 0], (2,))
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert_refused(folder, "tokenizer.json")


def test_generation_defaults(folder, tmp_path):
    settings = {"temperature": 0.6, "min_p": 0.1, "eos_token_id": [1, 2]}
    for nth, (stated, expected) in enumerate([
        ({"do_sample": True, "top_p": 0.9, "top_k": 20},
         {"temperature": 1.0, "top_p": 0.9, "top_k": 20}),
        (settings | {"do_sample": True, "bos_token_id": 7}, settings),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
         {"repetition_penalty": 1.1}),
        ({"temperature": 0.6, "top_p": 0.5, "eos_token_id": 3}, {"eos_token_id": 3}),
        (None, {}),
    ]):  # fmt: skip
        (file := folder / "generation_config.json").unlink(missing_ok=True)
        if stated is not None:
            file.write_text(json.dumps(stated))
        params = load(folder)
        assert params.generation_defaults == expected
        save(params, tmp_path / f"saved {nth}")
        assert load(tmp_path / f"saved {nth}").generation_defaults == expected


@pytest.mark.parametrize(
    ("stated", "expected", "ignored"),
    [
        ({}, {}, []),
        (
            {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
            [],
        ),
        ({"top_k": -1}, {"temperature": 1.0, "top_k": -1}, []),
        ({"penalty_repeat": 1.05}, {"repetition_penalty": 1.05}, []),
        ({"penalty_repeat": 1.05, "penalty_last_n": 64}, {"repetition_penalty": 1.05},
         ["penalty_last_n"]),
        ({"mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0, "penalty_last_n": 9}, {}, []),
        ({"mirostat": 2, "mirostat_tau": 5.0, "sequence": "k;p"}, {},
         ["mirostat", "mirostat_tau", "sequence"]),
    ],
)  # fmt: skip
def test_sampling_keys_of_a_gguf_file_are_defaults(stated, expected, ignored, tmp_path, caplog):
    file = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, settings=stated)
    assert load(file).generation_defaults == expected
    said = [record.getMessage().partition("ignored: ")[2] for record in caplog.records]
    named = ", ".join(f"general.sampling.{key}" for key in ignored)
    assert said == ([named] if named else [])


def test_settings_without_effect_are_warned_of_unless_neutral(caplog):
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "guidance_scale": 1}
    neutral |= {"penalty_alpha": 0.0, "bad_words_ids": [], "forced_eos_token_id": None}
    assert resolve_settings(neutral, "file") == {} and not caplog.records
    for name in neutral:
        assert resolve_settings(neutral | {name: 2}, "file") == {}
        assert caplog.messages == [f"file: not supported and ignored: {name}"]
        caplog.clear()


def test_malformed_generation_defaults_are_refused(folder):
    for stated in [
        {"temperature": "hot"},
        {"top_k": True},
        {"eos_token_id": "2"},
        {"eos_token_id": [1, -2]},
        [1],
        {"top_p": [0.5]},
    ]:
        (folder / "generation_config.json").write_text(json.dumps(stated))
        assert_refused(folder, "generation_config.json")


def test_save_overwrites_nothing(folder, tmp_path):
    params = load(folder)
    with pytest.raises(ValueError, match="exists"):
        save(params, folder)
    (tmp_path / "empty").mkdir()
    save(params, tmp_path / "empty")
    with pytest.raises(ValueError, match="exists"):
        save(params, tmp_path / "empty" / "config.json")


def test_damaged_saves_are_refused(folder, tmp_path):
    save(load(folder), saved := tmp_path / "saved")
    config = json.loads((saved / "config.json").read_text())
    for change, match in (
        ({"family": "gpt"}, "family is 'gpt'"),
        ({"num_layers": 2}, "layers_1"),
        ({"num_layers": 10**12}, "num_layers"),
        ({"vocab_size": 41}, "embed has shape"),
        ({"nonsense": 1}, "nonsense"),
        ({"rope_scaling": {"factor": 2.0}}, "config.json"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'llama3', 'yarn', 'linear'"),
        ({"rope_factors": [1.0]}, "rope_factors"),
    ):
        (saved / "config.json").write_text(json.dumps(config | change))
        assert_refused(saved, match)
    (saved / "config.json").write_text(json.dumps(config))
    load(saved)
    (saved / "weights" / "_METADATA").write_text("{")
    assert_refused(saved, "weights is damaged, or not an orbax checkpoint")
    shutil.rmtree(saved / "weights")
    assert_refused(saved, "does not exist", FileNotFoundError)
