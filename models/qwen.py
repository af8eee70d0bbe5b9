"""Defines Qwen2, Qwen2.5 (biases on q, k and v) and Qwen3 (queries and keys normed per head)."""

from collections.abc import Collection, Mapping
from typing import Any

from jsparse.models.config import ModelConfig, refuse, require
from jsparse.models.families import GGUF_NAMES, HF_NAMES, Family, sizes_from_gguf, sizes_from_hf


def qwen2_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a config.json with `model_type: qwen2`, which implies biases."""
    return ModelConfig(family="qwen2", qkv_bias=True, **sizes_from_hf(config))


def qwen2_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file with `general.architecture: qwen2`."""
    return ModelConfig(family="qwen2", qkv_bias=True, **sizes_from_gguf(metadata, tensor_names))


def qwen3_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a config.json with `model_type: qwen3`.

    Its head_dim does not follow from hidden_size.
    """
    refuse(config, "attention_bias", (False,))
    require(config, "head_dim")
    return ModelConfig(family="qwen3", qk_norm=True, **sizes_from_hf(config))


def qwen3_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file with `general.architecture: qwen3`."""
    return ModelConfig(family="qwen3", qk_norm=True, **sizes_from_gguf(metadata, tensor_names))


_BIAS = "layers_{i}/attention/qkv/bias"
QWEN2 = Family(
    qwen2_from_hf,
    qwen2_from_gguf,
    HF_NAMES | {_BIAS: tuple(f"model.layers.{{i}}.self_attn.{p}_proj.bias" for p in "qkv")},
    GGUF_NAMES | {_BIAS: tuple(f"blk.{{i}}.attn_{p}.bias" for p in "qkv")},
)

_Q_NORM, _K_NORM = "layers_{i}/attention/q_norm/scale", "layers_{i}/attention/k_norm/scale"
QWEN3 = Family(
    qwen3_from_hf,
    qwen3_from_gguf,
    HF_NAMES
    | {
        _Q_NORM: ("model.layers.{i}.self_attn.q_norm.weight",),
        _K_NORM: ("model.layers.{i}.self_attn.k_norm.weight",),
    },
    GGUF_NAMES
    | {_Q_NORM: ("blk.{i}.attn_q_norm.weight",), _K_NORM: ("blk.{i}.attn_k_norm.weight",)},
)
