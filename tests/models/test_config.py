"""Tests configs: the results for config.json and GGUF metadata, and refusals."""

from dataclasses import replace

import pytest

from jsparse.models.config import Experts, LinearRope, Llama3Rope, ModelConfig, YarnRope
from jsparse.models.families import FAMILIES
from tests.support.writers import hf_config

pytestmark = pytest.mark.pure

LLAMA = FAMILIES["llama"]
EXPERTS = {
    "qwen2_moe": Experts(6, 2, 20, normalized=False, shared_size=28),
    "qwen3_moe": Experts(6, 2, 20, normalized=True),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_config_json_becomes_a_model_config():
    for family in FAMILIES:
        assert FAMILIES[family].config_from_hf(hf_config(family)) == ModelConfig(
            family=family,
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_theta=5000.0,
            qkv_bias=family in ("qwen2", "qwen2_moe"),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=EXPERTS.get(family),
        ), family


def test_both_styles_of_rope_give_the_same_config():
    old = hf_config("llama", rope_theta=5e5, rope_scaling=LLAMA3)
    new = hf_config("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    del new["rope_theta"]
    config = LLAMA.config_from_hf(new)
    assert config == LLAMA.config_from_hf(old)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 64))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_and_linear_scaling_are_read_in_either_style():
    for family in FAMILIES:  # fmt: skip
        for stated, rule in [
        (YARN, YarnRope(4.0, 64)),
        (YARN | {"beta_fast": 8, "beta_slow": 2}, YarnRope(4.0, 64, 8.0, 2.0)),
        (YARN | {"attention_factor": 1, "truncate": False},
         YarnRope(4.0, 64, attention_factor=1.0, truncate=False)),
        ({"rope_type": "linear", "factor": 2}, LinearRope(2.0)),
    ]:  # fmt: skip
            older = {
                ("type" if key == "rope_type" else key): value for key, value in stated.items()
            }
            named = hf_config(family, rope_theta=5e5, rope_scaling=stated)
            old = hf_config(family, rope_theta=5e5, rope_scaling=older)
            new = hf_config(family, rope_parameters=stated | {"rope_theta": 5e5})
            del new["rope_theta"]
            config = FAMILIES[family].config_from_hf(new)
            assert (
                config
                == FAMILIES[family].config_from_hf(old)
                == FAMILIES[family].config_from_hf(named)
            ), family
            assert (config.rope_theta, config.rope_scaling) == (5e5, rule), family


def test_theta_may_be_in_the_rope_rule_or_at_the_top():
    for stated, theta in [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e6}, 5e5),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {}, "rope_theta": 5e5}, 5e5),
    ]:
        config = hf_config("llama")
        del config["rope_theta"]
        read = LLAMA.config_from_hf(config | stated)
        assert (read.rope_theta, read.rope_scaling) == (theta, None), stated


def test_rules_by_layer_type_are_refused():
    rules = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(ValueError, match="rope_parameters='full_attention': must be one rule"):
        FAMILIES["qwen3"].config_from_hf(hf_config("qwen3", rope_parameters=rules))


def test_yarn_has_the_defaults_of_transformers():
    for stated, changes, rule in [
        # 0.1 mscale ln(factor) + 1, over the same with mscale_all_dim
        ({"mscale": 0.707, "mscale_all_dim": 1}, {}, YarnRope(4.0, 64, attention_factor=0.964327)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, {}, YarnRope(4.0, 64, attention_factor=1.0)),
        ({"mscale": 0.707}, {}, YarnRope(4.0, 64)),
        ({"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}, {},
         YarnRope(4.0, 64, attention_factor=1.2)),
        ({"beta_fast": None, "truncate": None, "attention_factor": None}, {}, YarnRope(4.0, 64)),
        ({}, {"original_max_position_embeddings": 32}, YarnRope(4.0, 32)),
        ({"original_max_position_embeddings": None}, {}, YarnRope(4.0, 128)),
    ]:  # fmt: skip
        config = hf_config("llama", rope_parameters=YARN | stated | {"rope_theta": 5e5}, **changes)
        read = LLAMA.config_from_hf(config).rope_scaling
        assert isinstance(read, YarnRope), stated
        assert read.attention_factor == pytest.approx(rule.attention_factor), stated
        assert replace(read, attention_factor=rule.attention_factor) == rule, stated


def test_fields_may_be_null_or_disabled():
    for changes, expected in [
        ({"head_dim": None}, {"head_dim": 8}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"sliding_window": 64, "use_sliding_window": False}, {}),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, {}),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, {}),
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}),
    ]:
        config = LLAMA.config_from_hf(hf_config("llama", **changes))
        assert config == replace(LLAMA.config_from_hf(hf_config("llama")), **expected), changes


def test_windows_are_those_of_transformers():
    sliding, full = "sliding_attention", "full_attention"
    for family, stated, windows in [
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 64}, (64, 64)),
        ("mistral", {"sliding_window": 64, "layer_types": [full, sliding]}, (None, 64)),
        ("qwen2", {"sliding_window": 64, "max_window_layers": 0}, ()),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, ()),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
         (None, 64)),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28},
         (None, None)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ("llama", {"sliding_window": 64}, ()),
    ]:  # fmt: skip
        read = FAMILIES[family].config_from_hf(hf_config(family, **stated))
        assert read.windows == windows, (family, stated)
    unstated = hf_config("mistral")
    del unstated["sliding_window"]
    assert FAMILIES["mistral"].config_from_hf(unstated).windows == (4096, 4096)


def test_experts_have_valid_fields():
    for name, value in (("ranks", 0), ("normalized", "yes"), ("shared_size", -1), ("chosen", 7)):
        with pytest.raises(ValueError, match=rf"experts\.{name}={value!r}: must be"):
            replace(EXPERTS["qwen3_moe"], **{name: value})


def test_window_of_at_least_the_context_is_none():
    config = FAMILIES["mistral"].config_from_hf(hf_config("mistral", sliding_window=64))
    assert [config.window(0, capacity) for capacity in (63, 64, 65)] == [None, None, 64]
    assert [config.windowed(capacity) for capacity in (64, 65)] == [False, True]


def test_yarn_extends_the_longest_context():
    for stated, longest, expected in [
        # as in Qwen's instructions, and as in a config that is scaled already
        (YARN, 64, 256),
        (YARN, 256, 256),
        (YARN, 300, 300),
        ({"type": "yarn", "factor": 2.5}, 128, 320),
        ({"type": "linear", "factor": 2.0}, 128, 128),
        (LLAMA3, 128, 128),
    ]:
        config = hf_config("qwen2", rope_scaling=stated, max_position_embeddings=longest)
        assert FAMILIES["qwen2"].config_from_hf(config).max_position_embeddings == expected, stated


def test_missing_yarn_factor_follows_from_the_lengths():
    stated = {"type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    config = FAMILIES["qwen2"].config_from_hf(hf_config("qwen2", rope_scaling=stated))
    assert config.rope_scaling == YarnRope(4.0, 32)


def test_missing_field_is_named():
    for field in [key for key in hf_config("llama") if key.endswith(("_size", "_layers", "_eps"))]:
        config = hf_config("llama")
        del config[field]
        with pytest.raises(ValueError, match=field):
            LLAMA.config_from_hf(config)


def test_unknown_rope_scaling_is_refused_with_the_known_types():
    for kind in ["dynamic", "longrope", "proportional", 3]:
        known = r"\['default', 'llama3', 'yarn', 'linear'\]"
        with pytest.raises(ValueError, match=f"rope_type={kind!r} is not supported.*{known}"):
            LLAMA.config_from_hf(
                hf_config("llama", rope_scaling={"rope_type": kind, "factor": 2.0})
            )


def gguf_config(**metadata) -> ModelConfig:
    """The config of a Llama's metadata; `__` stands for a dot in a key."""
    sizes = {
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 40,
    }
    fields = sizes | {key.replace("__", "."): value for key, value in metadata.items()}
    named = {f"llama.{key}": value for key, value in fields.items()}
    return LLAMA.config_from_gguf({"general.architecture": "llama"} | named, ())


GGUF_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


def test_gguf_rope_scaling():
    for metadata, rule, longest in [
        ({}, None, 128),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None, 128),
        ({"rope__scaling__type": "linear"}, None, 128),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None, 128),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, LinearRope(4.0), 128),
        ({"rope__scale_linear": 2.0}, LinearRope(2.0), 128),
        ({"rope__scale_linear": 0.0}, None, 128),
        (GGUF_YARN, YarnRope(4.0, 128), 512),
        (GGUF_YARN | {"rope__scaling__original_context_length": 32}, YarnRope(4.0, 32), 128),
        (
            GGUF_YARN
            | {"rope__scaling__yarn_attn_factor": 0.5}
            | {"rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0}
            | {"rope__scaling__yarn_ext_factor": 1.0, "rope__scaling__attn_factor": 1.0},
            YarnRope(4.0, 128, 8.0, 2.0, attention_factor=0.5),
            512,
        ),
    ]:
        expected = replace(gguf_config(), rope_scaling=rule, max_position_embeddings=longest)
        assert gguf_config(**metadata) == expected, metadata


def test_unknown_gguf_rope_scaling_is_refused():
    for metadata, named in [
        ({"rope__scaling__type": "longrope"}, "type='longrope'.*'none', 'linear', 'yarn'"),
        ({"rope__scaling__type": "yarn"}, "'rope.scaling.factor' is missing"),
        (GGUF_YARN | {"rope__scaling__factor": -1.0}, "factor=-1.0: must be a number above 0"),
        (GGUF_YARN | {"rope__scaling__attn_factor": 1.2}, "attn_factor=1.2"),
        (GGUF_YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
        (GGUF_YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1"),
    ]:
        with pytest.raises(ValueError, match=named):
            gguf_config(**metadata)
