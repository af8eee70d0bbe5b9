"""Converts a Hugging Face transformers model in memory, without writing it to disk.

Neither transformers nor PyTorch is imported: if such a model exists, both are loaded, and a few of
the model's own methods suffice.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jsparse.machine.extras import install
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, parse_dtype
from jsparse.models.config_files import checked_config, family_of
from jsparse.models.families import MEMORY_EXPERTS
from jsparse.models.formats import LoadOptions, read_store, with_own_head
from jsparse.models.generation_config import resolve_settings
from jsparse.models.tokenizer import as_tokenizer
from jsparse.models.weight_plan import parse_weights
from jsparse.models.weights import OnProgress

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@own_settings()
def from_transformers(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: Any = None,
    weights: str | None = None,
    on_progress: OnProgress | None = None,
) -> Params:
    """Builds a model from a transformers model in memory, on the default device.

    The result equals that of `load` on the model's files. It shares no memory with the model, which
    may be trained further or deleted.

    Args:
        model: a LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,
            Qwen2MoeForCausalLM or Qwen3MoeForCausalLM, on any device.
        tokenizer: a fast transformers tokenizer, a jsparse one, or None; inputs must then be token
            ids.
        dtype: "float32", "bfloat16" or "float16"; None: bfloat16 on a GPU and float32 elsewhere.
        weights: "q8_0" stores matrices in 8-bit blocks, as in `load`; others: numbers of `dtype`.
        on_progress: a callable that receives the bytes read so far and in total, as tensors arrive.

    Raises:
        ValueError: `model` is none of these, is quantised, has an adapter or does not fit in
            memory, or the tokenizer is a slow one.
    """
    _check_model(model)
    weights_dtype, fields = parse_dtype(dtype), model.config.to_dict()
    family = family_of(fields.get("model_type"), "model.config.model_type")
    config = checked_config("model.config", lambda: family.config_from_hf(fields))
    defaults = resolve_settings(_generation_settings(model), "model.generation_config")
    if tokenizer is not None:
        ends = (defaults.get("eos_token_id"), fields.get("eos_token_id"))
        tokenizer = as_tokenizer(tokenizer, ends)
    option = parse_weights(weights, weights_dtype)
    options = LoadOptions(weights_dtype, option, on_progress=on_progress)
    store = StateDict(model)
    config = with_own_head(config, family, store)
    joined = any(name.endswith(".mlp.experts.gate_up_proj") for name in store.shapes)
    names = family.hf_names | (MEMORY_EXPERTS if joined else {})
    made = read_store(store, config, names, options)
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return Params(made, config, tokenizer, defaults, name)


class StateDict:
    """The tensors of a PyTorch model by name; `path` is its class, for messages."""

    def __init__(self, model: Any):
        """Raises ValueError if a tensor's dtype is not supported, or its values are elsewhere."""
        self.path = Path(type(model).__name__)
        self._tensors: Mapping[str, Any] = model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            if (dtype := _dtype(tensor)) not in _ITEM_BYTES:
                raise ValueError(
                    f"{self.path}: {name} has dtype {dtype!r}: must be one of {list(_ITEM_BYTES)}"
                )
            if tensor.device.type == "meta":
                raise ValueError(
                    f"{self.path}: {name} is on the device 'meta': must have values, so load the "
                    "model without offloading"
                )

    def nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * _ITEM_BYTES[_dtype(self._tensors[name])]

    def kind(self, name: str) -> str:
        """Returns the tensor's dtype."""
        return _dtype(self._tensors[name])

    def form(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def blocks(self, name: str) -> None:
        """Returns None: no tensor is stored in blocks."""

    def read(self, name: str) -> np.ndarray:
        """Copies the tensor's values to the host; bfloat16, which numpy lacks, is widened."""
        tensor = self._tensors[name].detach().cpu()
        if _dtype(tensor) == "bfloat16":
            return tensor.float().numpy()
        return tensor.numpy().copy()


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_model(model: Any) -> None:
    """Raises ValueError unless `model` looks like a transformers model."""
    config = getattr(model, "config", None)
    if callable(getattr(model, "state_dict", None)) and callable(getattr(config, "to_dict", None)):
        return
    description = repr(model) if isinstance(model, str) else f"of type {type(model).__name__}"
    raise ValueError(
        f"model is {description}: must be a transformers model in memory, such as "
        "AutoModelForCausalLM gives; jsparse.load reads files and Hub ids. transformers and "
        "PyTorch belong to an extra: "
        f"{install('hf')}"
    )


def _generation_settings(model: Any) -> dict[str, Any]:
    """Returns the fields of the generation_config.json that the model would be saved with."""
    settings = getattr(model, "generation_config", None)
    return {} if settings is None else settings.to_diff_dict()
