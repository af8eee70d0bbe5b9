"""Defines the family of Llama 2 and 3.x and of models built alike (SmolLM2)."""

from collections.abc import Collection, Mapping
from typing import Any

from jsparse.models.config import ModelConfig, refuse
from jsparse.models.families import GGUF_NAMES, HF_NAMES, Family, sizes_from_gguf, sizes_from_hf


def config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a config.json with `model_type: llama`."""
    refuse(config, "attention_bias", (False,))
    refuse(config, "mlp_bias", (False,))
    return ModelConfig(family="llama", **sizes_from_hf(config))


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file with `general.architecture: llama`."""
    return ModelConfig(family="llama", **sizes_from_gguf(metadata, tensor_names))


LLAMA = Family(config_from_hf, config_from_gguf, HF_NAMES, GGUF_NAMES, gguf_interleaved=True)
