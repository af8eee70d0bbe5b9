"""Makes models with random weights, for measuring speed and memory."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.models.families import FAMILIES
from jsparse.models.joined_blocks import common_form
from jsparse.models.quantized import FormAt, all_q8_0, is_matrix, plain
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import random_weights
from jsparse.models.weight_plan import require_fit
from jsparse.models.weights import list_weights
from jsparse.pallas_kernels.weight_blocks import FORMS, Form


def form_at_of(name: str, config: ModelConfig) -> FormAt:
    """Returns the formats of "plain", "q8_0" or "q4_k_m", llama.cpp's mixture Q4_K_M.

    That stores half of the layers' v and down, and the output, in Q6_K, the rest in Q4_K. q, k and
    v are joined in a format with the values of both.
    """
    if name != "q4_k_m":
        return {"plain": plain, "q8_0": all_q8_0}[name]
    layers = config.num_layers

    def form_at(path: str) -> Form | None:
        if not is_matrix(path):
            return None
        layer, _, kind = path.removeprefix("layers_").partition("/")
        if kind:
            more = kind in ("attention/qkv/kernel", "mlp/down/kernel") and _in_more_bits(
                int(layer), layers
            )
        else:
            more = path == "lm_head" or config.tie_word_embeddings
        if more and "qkv" in kind:
            return common_form([FORMS["q4_k"], FORMS["q6_k"]])
        return FORMS["q6_k" if more else "q4_k"]

    return form_at


def _in_more_bits(layer: int, layers: int) -> bool:
    """Returns whether Q4_K_M stores v and down of a layer in Q6_K: llama.cpp's use_more_bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def random_model(
    config: ModelConfig,
    dtype: Any,
    name: str = "random",
    *,
    form_at: FormAt = plain,
    tensor_parallel_size: int = 1,
) -> Params:
    """Returns a model of these sizes; if spread over devices, no device ever holds the whole model.

    `form_at` returns the format of the matrix at a path.

    Raises:
        ValueError: it cannot be divided into `tensor_parallel_size` parts, matrices are not in
            whole blocks of their formats, or there are too few devices.
    """
    whole_number("tensor_parallel_size", tensor_parallel_size, 1)
    if form_at is not plain:
        names = FAMILIES[config.family].hf_names
        weights = list_weights(Path(), config.num_layers, config, names)
        require_fit(weights, form_at, tensor_parallel_size)
    if tensor_parallel_size == 1:
        made = random_weights(config, dtype, form_at=form_at)
        return Params(made, config, None, {}, name)
    spreading = Spreading(config, tensor_parallel_size)

    def place(path: str, whole: jax.Array) -> jax.Array:
        # the next array is made only after this one's memory is free
        return jax.block_until_ready(spreading.place(path, whole))

    made = random_weights(config, dtype, form_at=form_at, place=place)
    spread = Params(made, spreading.config, None, {}, name)
    return dataclasses.replace(spread, mesh=spreading.mesh)
