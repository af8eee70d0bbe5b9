"""Tests configs of files: those of GGUF files, and refusals when a model is loaded."""

import json
from dataclasses import replace

import pytest

from jsparse.models.checkpoint import load
from jsparse.models.config import ModelConfig
from jsparse.models.families import FAMILIES
from tests.support.writers import (
    hf_config,
    hf_tensors,
    write_folder,
    write_gguf,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_metadata_give_the_config_of_config_json(family, tmp_path):
    config = hf_config(family, tie_word_embeddings=True)
    loaded = load(write_gguf(tmp_path / "m.gguf", config, hf_tensors(config))).config
    expected = FAMILIES[family].config_from_hf(config)
    if family == "mistral":
        expected = replace(expected, family="llama")
    assert loaded.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert loaded == ModelConfig(**{**vars(expected), "rms_norm_eps": loaded.rms_norm_eps})


def test_gguf_head_dim_defaults_to_an_equal_share(tmp_path):
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"))
    for family in FAMILIES:
        config = hf_config(family)
        stated = lengths | {"rope.dimension_count": 8}
        file = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config), metadata=stated)
        assert load(file).config.head_dim == 8, family


def test_config_that_cannot_be_decoded_is_refused(tmp_path):
    for family, change in [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}),
        ("llama", {"rope_scaling": {"type": ["yarn"], "factor": 4.0}}),
        ("llama", {"rope_scaling": {"type": "linear"}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.0}}),
        ("llama", {"rope_scaling": {"type": "yarn"}}),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}),
        ("llama", {"rope_scaling": YARN | {"beta_slow": 0}}),
        ("llama", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"rope_theta": 0.0}),
        ("llama", {"hidden_size": "32"}),
        ("llama", {"num_hidden_layers": True}),
        ("llama", {"num_key_value_heads": 3}),
        ("llama", {"head_dim": 7}),
        ("llama", {"head_dim": None, "hidden_size": "32"}),
        ("llama", {"use_sliding_window": True}),
        ("mistral", {"sliding_window": 0}),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"]}),
        ("mistral", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1.5}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"head_dim": None}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"num_experts_per_tok": 7}),
        ("qwen3_moe", {"num_experts": 10**9}),
        ("qwen3_moe", {"norm_topk_prob": "yes"}),
        ("qwen3_moe", {"moe_intermediate_size": None}),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}),
        ("qwen2_moe", {"use_sliding_window": True}),
    ]:
        good = hf_config(family)
        folder = write_folder(tmp_path / family, good, hf_tensors(good))
        (folder / "config.json").write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=r"config\.json: [^\n]+$"):
            load(folder)


def test_quantised_checkpoint_is_refused_with_its_method(tmp_path):
    config = hf_config("llama", quantization_config={"quant_method": "bitsandbytes", "bits": 4})
    folder = write_folder(tmp_path, config, hf_tensors(config))
    with pytest.raises(ValueError, match=r"config\.json: .*quant_method='bitsandbytes' is not"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    load(folder)


def test_gguf_metadata_that_cannot_be_decoded_is_refused(tmp_path):
    for key, value, named in [
        ("expert_count", 8, "expert_count=8"),
        ("rope.dimension_count", 4, "rope.dimension_count=4"),
        ("attention.value_length", 4, "attention.value_length=4"),
        ("attention.sliding_window", 64, "attention.sliding_window=64"),
        ("attention.head_count", 0, "attention.head_count|num_heads"),
        ("attention.head_count_kv", 0, "num_kv_heads=0"),
        ("block_count", None, "block_count"),
        ("vocab_size", None, "vocab_size"),
    ]:
        config = hf_config("llama")
        file = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config), metadata={key: value})
        with pytest.raises(ValueError, match=named):
            load(file)
