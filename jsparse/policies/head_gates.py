"""Reads and writes gate files, which mark the KV heads that are retrieval heads.

Training writes them; LycheeDecode and DuoAttention read them. A safetensors file has `retrieval`,
bool[L, K], and optionally `scores`, float32[L, K], by which the heads were ranked. Its metadata may
have `record`, a JSON object that describes the training. The shape determines which models it fits.
The files in the folder gates/ next to this module ship with the package and are loaded by name.
"""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from jsparse.cache import CacheSpec
from jsparse.ranks import own_part
from jsparse.shapes import HeadFlags

SUFFIX = ".safetensors"


class HeadGates(NamedTuple):
    """The contents of a gate file.

    Attributes:
        retrieval: the mask of the KV heads that attend to everything.
        scores: the scores that ranked the heads, higher for retrieval heads; None: the heads were
            not ranked.
        record: the description of the training, in JSON values.
    """

    retrieval: Bool[np.ndarray, "L K"]
    scores: Float32[np.ndarray, "L K"] | None = None
    record: Mapping[str, Any] = {}


def save(gates: HeadGates, path: str | os.PathLike[str]) -> None:
    """Writes gates to a file, replacing any that exists."""
    arrays: dict[str, np.ndarray] = {"retrieval": np.ascontiguousarray(gates.retrieval, np.bool_)}
    if gates.scores is not None:
        arrays["scores"] = np.ascontiguousarray(gates.scores, np.float32)
    Path(path).write_bytes(
        to_bytes(arrays, metadata={"record": json.dumps(gates.record, sort_keys=True)})
    )


def load(gates: str) -> HeadGates:
    """Reads gates that `save` wrote.

    Args:
        gates: a name of `shipped()`, or a path.

    Raises:
        ValueError: the file does not exist, cannot be read, or has other content.
    """
    path = (
        str(files("jsparse.policies") / "gates" / (gates + SUFFIX)) if gates in shipped() else gates
    )
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            record = json.loads((file.metadata() or {}).get("record", "{}"))
    # AttributeError: numpy lacks a tensor's type
    except (OSError, SafetensorError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(
            f"gates={gates!r}: must be one of {', '.join(shipped()) or 'none'}, which ship with "
            f"jsparse, or a safetensors file of gates that can be read ({error})"
        ) from None
    retrieval, scores = arrays.get("retrieval"), arrays.get("scores")
    if (
        retrieval is None
        or retrieval.dtype != np.bool_
        or retrieval.ndim != 2
        or not retrieval.size
    ):
        raise ValueError(
            f"gates={gates!r}: must hold 'retrieval', bool [L, K], as `jsparse train-gates` writes "
            "it"
        )
    if scores is not None and (scores.dtype != np.float32 or scores.shape != retrieval.shape):
        raise ValueError(
            f"gates={gates!r}: its 'scores' must be float32 {list(retrieval.shape)}, like "
            "'retrieval'"
        )
    if not isinstance(record, dict):
        raise ValueError(f"gates={gates!r}: its 'record' must be a JSON object")
    return HeadGates(retrieval, scores, record)


def shipped() -> tuple[str, ...]:
    """Returns the names of the gates that ship with the package."""
    folder = files("jsparse.policies") / "gates"
    return tuple(
        sorted(
            file.name.removesuffix(SUFFIX)
            for file in folder.iterdir()
            if file.name.endswith(SUFFIX)
        )
    )


def retrieval_heads(gates: str | Sequence[Sequence[float]]) -> Bool[np.ndarray, "L K"]:
    """Returns the mask for a policy's `gates` argument.

    Args:
        gates: a shipped name, a path, or the mask itself as rows of 0 and 1.

    Raises:
        ValueError: `gates` is none of these.
    """
    if isinstance(gates, str):
        return load(gates).retrieval
    rows = (
        [row if isinstance(row, tuple) else () for row in gates] if isinstance(gates, tuple) else []
    )
    if (
        not rows
        or len({len(row) for row in rows}) > 1
        or not rows[0]
        or {x for row in rows for x in row} - {0, 1}
    ):
        raise ValueError(
            f"gates={gates!r}: must be a name, a path, or 0 and 1 for every layer and KV head, [L, "
            "K]"
        )
    return np.array(rows, np.bool_)


def require_fit(retrieval: Bool[np.ndarray, "L K"], gates: Any, spec: CacheSpec) -> None:
    """Raises ValueError if the mask from `gates` is for a model of other sizes."""
    wanted = spec.num_layers, spec.model_kv_heads
    if retrieval.shape != wanted:
        raise ValueError(
            f"gates={gates!r}: is for {' × '.join(map(str, retrieval.shape))} layers × KV heads, "
            f"must be for the model's {' × '.join(map(str, wanted))}"
        )


def of_rows(heads: Bool[np.ndarray, "K"], batch: int) -> HeadFlags:
    """Repeats the flags for every row, as a constant: XLA would turn a broadcast into a kernel.

    If the model is spread over ranks, returns the flags of this rank's heads.
    """
    return own_part(jnp.asarray(np.tile(heads, (batch, 1))), 1)
