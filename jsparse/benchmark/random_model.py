"""Makes models with random weights, for measuring speed and memory."""

import dataclasses
from typing import Any

import jax

from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params, require_blocks_of
from jsparse.models.config import ModelConfig
from jsparse.models.quantized import all_q8_0, plain
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import random_weights


def random_model(
    config: ModelConfig,
    dtype: Any,
    name: str = "random",
    *,
    quantized: bool = False,
    tensor_parallel_size: int = 1,
) -> Params:
    """Returns a model of these sizes; if spread over devices, no device ever holds the whole model.

    Raises:
        ValueError: it cannot be divided into `tensor_parallel_size` parts, or there are too few
            devices.
    """
    whole_number("tensor_parallel_size", tensor_parallel_size, 1)
    if quantized:
        require_blocks_of(config, tensor_parallel_size)
    form_at = all_q8_0 if quantized else plain
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
