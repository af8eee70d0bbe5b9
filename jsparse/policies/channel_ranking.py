"""Reads and writes rankings of K's channels, from which Double Sparsity takes its channels.

Calibration writes them. A ranking is int32[L, K, H]: the channels of every layer and KV head,
heaviest first. It is stored whole, as safetensors, so that one file serves any number of channels;
its shape determines which models it fits.
"""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from jsparse.cache import CacheSpec

Ranking = Int32[np.ndarray, "L K H"]
_NAME = "ranking"


def save(ranking: Ranking, path: str | os.PathLike[str]) -> None:
    """Writes a ranking to a file, replacing any that exists."""
    Path(path).write_bytes(to_bytes({_NAME: np.ascontiguousarray(ranking, np.int32)}))


def load(path: str) -> Ranking:
    """Reads a ranking that `save` wrote.

    Raises:
        ValueError: the file cannot be read or has other content.
    """
    try:
        with safe_open(path, "numpy") as file:
            there = _NAME in file.keys() and file.get_slice(_NAME).get_dtype() == "I32"  # noqa: SIM118
            ranking = file.get_tensor(_NAME) if there else np.zeros(0)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"calibration={path!r}: must be a safetensors file that can be read ({error})"
        ) from None
    if ranking.ndim != 3 or not (np.sort(ranking) == np.arange(ranking.shape[-1])).all():
        raise ValueError(
            f"calibration={path!r}: must hold {_NAME!r}, the order of all channels of each layer "
            "and KV head, as `jsparse calibrate-channels` writes it"
        )
    return ranking


def require_fit(ranking: Ranking, path: str, spec: CacheSpec) -> None:
    """Raises ValueError if the ranking in `path` is for a model of other sizes."""
    layers, heads, channels = ranking.shape
    wanted = spec.num_layers, spec.model_kv_heads, spec.head_dim
    if ranking.shape != wanted:
        raise ValueError(
            f"calibration={path!r}: is for {layers} layers of {heads} KV heads of {channels} "
            f"channels, must be for the model's {' × '.join(map(str, wanted))}"
        )
