"""Reads and writes a model's constants: arrays by name, in one safetensors file."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save


def write_constants(constants: Mapping[str, jax.Array], path: Path) -> None:
    """Writes the constants to `path`, atomically."""
    data = save({name: np.asarray(array) for name, array in constants.items()})
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def read_constants(path: Path) -> dict[str, jax.Array]:
    """Reads the constants in `path`; {} if it does not exist, ValueError if it is damaged."""
    try:
        return {name: jnp.asarray(array) for name, array in load_file(path).items()}
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
