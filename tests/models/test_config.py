"""Tests configs: what config.json and GGUF metadata become, and what is refused."""

from dataclasses import replace

import pytest
from writers import FAMILIES, hf_config

from jsparse.models.config import LinearRope, Llama3Rope, ModelConfig, YarnRope
from jsparse.models.llama import LLAMA
from jsparse.models.qwen import QWEN2, QWEN3

pytestmark = pytest.mark.pure

FROM_HF = {
    "llama": LLAMA.config_from_hf,
    "qwen2": QWEN2.config_from_hf,
    "qwen3": QWEN3.config_from_hf,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_becomes_a_model_config(family):
    assert FROM_HF[family](hf_config(family)) == ModelConfig(
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
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def test_both_styles_of_rope_give_the_same_config():
    old = hf_config("llama", rope_theta=5e5, rope_scaling=LLAMA3)
    new = hf_config("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    del new["rope_theta"]
    config = LLAMA.config_from_hf(new)
    assert config == LLAMA.config_from_hf(old)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 64))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stated", "rule"),
    [
        (YARN, YarnRope(4.0, 64)),
        (YARN | {"beta_fast": 8, "beta_slow": 2}, YarnRope(4.0, 64, 8.0, 2.0)),
        (YARN | {"attention_factor": 1, "truncate": False},
         YarnRope(4.0, 64, attention_factor=1.0, truncate=False)),
        ({"rope_type": "linear", "factor": 2}, LinearRope(2.0)),
    ],
)  # fmt: skip
def test_yarn_and_linear_scaling_are_read_in_either_style(family, stated, rule):
    older = {("type" if key == "rope_type" else key): value for key, value in stated.items()}
    named = hf_config(family, rope_theta=5e5, rope_scaling=stated)
    old = hf_config(family, rope_theta=5e5, rope_scaling=older)
    new = hf_config(family, rope_parameters=stated | {"rope_theta": 5e5})
    del new["rope_theta"]
    config = FROM_HF[family](new)
    assert config == FROM_HF[family](old) == FROM_HF[family](named)
    assert (config.rope_theta, config.rope_scaling) == (5e5, rule)


@pytest.mark.parametrize(
    ("stated", "longest", "expected"),
    [
        # as Qwen's instructions turn it on, and as a config that is scaled already
        (YARN, 64, 256),
        (YARN, 256, 256),
        (YARN, 300, 300),
        ({"type": "yarn", "factor": 2.5}, 128, 320),
        ({"type": "linear", "factor": 2.0}, 128, 128),
        (LLAMA3, 128, 128),
    ],
)
def test_yarn_lengthens_the_longest_text(stated, longest, expected):
    config = hf_config("qwen2", rope_scaling=stated, max_position_embeddings=longest)
    assert FROM_HF["qwen2"](config).max_position_embeddings == expected


def test_yarn_lacks_no_factor_that_its_lengths_imply():
    stated = {"type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    config = FROM_HF["qwen2"](hf_config("qwen2", rope_scaling=stated))
    assert config.rope_scaling == YarnRope(4.0, 32)


@pytest.mark.parametrize(
    "field", [key for key in hf_config("llama") if key.endswith(("_size", "_layers", "_eps"))]
)
def test_a_missing_field_is_named(field):
    config = hf_config("llama")
    del config[field]
    with pytest.raises(ValueError, match=field):
        LLAMA.config_from_hf(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", 3])
def test_other_rope_scaling_is_refused_with_those_known(kind):
    known = r"\['default', 'llama3', 'yarn', 'linear'\]"
    with pytest.raises(ValueError, match=f"rope_type={kind!r} is not supported.*{known}"):
        LLAMA.config_from_hf(hf_config("llama", rope_scaling={"rope_type": kind, "factor": 2.0}))


def gguf_config(**metadata) -> ModelConfig:
    """Returns the config of a Llama's metadata; `__` stands for a dot in a key."""
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


@pytest.mark.parametrize(
    ("metadata", "rule", "longest"),
    [
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
    ],
)
def test_gguf_rope_scaling(metadata, rule, longest):
    expected = replace(gguf_config(), rope_scaling=rule, max_position_embeddings=longest)
    assert gguf_config(**metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope__scaling__type": "longrope"}, "type='longrope'.*'none', 'linear', 'yarn'"),
        ({"rope__scaling__type": "yarn"}, "'rope.scaling.factor' is missing"),
        (GGUF_YARN | {"rope__scaling__factor": -1.0}, "factor=-1.0: must be a number above 0"),
        (GGUF_YARN | {"rope__scaling__attn_factor": 1.2}, "attn_factor=1.2"),
        (GGUF_YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
        (GGUF_YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1"),
    ],
)
def test_gguf_rope_scaling_that_is_refused(metadata, named):
    with pytest.raises(ValueError, match=named):
        gguf_config(**metadata)
