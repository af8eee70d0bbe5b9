"""Saves and loads weights as an orbax checkpoint, the format of saved jsparse models.

orbax is imported only where it is used, since its import takes a second.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jsparse.models.config import ModelConfig
from jsparse.models.families import Names
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import Weights
from jsparse.models.weights import OnProgress, in_blocks, list_weights, require_blocks, tree


def save_weights(weights: Weights, folder: Path) -> None:
    """Writes the tree into `folder`, which must not exist yet."""
    from orbax.checkpoint import StandardCheckpointer

    with StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), weights)


def load_weights(
    folder: Path,
    config: ModelConfig,
    names: Names,
    dtype: Any,
    on_progress: OnProgress | None,
    spreading: Spreading | None = None,
    *,
    quantized: bool = False,
) -> Weights:
    """Reads the tree of `config` from `folder`, cast to `dtype`, onto the default device or spread.

    Spreading needs memory for one layer in addition to the device's part. Matrices saved in 8-bit
    blocks stay in blocks; with `quantized`, others are converted to blocks, one layer at a time.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: it is not an orbax checkpoint, is damaged, or has other arrays.
    """
    from orbax.checkpoint import StandardCheckpointer

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: a saved model has its weights there")
    with StandardCheckpointer() as checkpointer:
        stored = _shapes(checkpointer, folder)
        listed = list_weights(folder, len(stored), config, names)
        saved_in_blocks = "embed/values" in stored
        config_shapes = {
            path: shape
            for weight in listed
            for path, shape in weight.shapes(quantized=saved_in_blocks).items()
        }
        if stored.keys() != config_shapes.keys():
            raise ValueError(
                f"{folder}: {min(stored.keys() ^ config_shapes.keys())} is missing or not in the "
                "config"
            )
        for path, shape in config_shapes.items():
            if stored[path] == shape:
                continue
            if path == "embed/scales" and stored[path] == shape[::-1]:
                raise ValueError(
                    f"{folder} has 8-bit blocks as an earlier version saved them: save it anew"
                )
            raise ValueError(
                f"{folder}: {path} has shape {stored[path]}: the config asks for {shape}"
            )
    sharding = jnp.zeros(()).sharding  # the default device, which may be set
    quantized = quantized or saved_in_blocks
    types = {"values": jnp.int8, "scales": jnp.float16} if saved_in_blocks else {}
    if quantized and not saved_in_blocks:  # blocks are made from the saved numbers
        types = {"kernel": jnp.float32, "lm_head": jnp.float32, "embed": jnp.float32}
    wanted = {
        path: jax.ShapeDtypeStruct(s, types.get(path.split("/")[-1], dtype), sharding=sharding)
        for path, s in config_shapes.items()
    }
    if quantized:
        for weight in listed:
            require_blocks(weight, 1 if spreading is None else spreading.mesh.size)
    if spreading is None and quantized == saved_in_blocks:
        weights = _restored(folder, tree(wanted))
    else:
        weights: Weights = {"params": {}}
        for layer, paths in itertools.groupby(sorted(wanted), lambda path: path.partition("/")[0]):
            part = _restored(folder, tree({path: wanted[path] for path in paths}))
            if quantized and not saved_in_blocks:
                part = in_blocks(part)
            placed = part["params"] if spreading is None else spreading.place_all(part["params"])
            weights["params"][layer] = jax.block_until_ready(placed)[layer]
    if on_progress is not None:
        total = sum(math.prod(x.shape) * x.dtype.itemsize for x in wanted.values())
        on_progress(total, total)
    return weights


def _restored(folder: Path, target: Weights) -> Weights:
    """Reads a part of the tree; raises ValueError if it is damaged."""
    from orbax.checkpoint import PyTreeCheckpointer, args, checkpoint_utils

    asked = args.PyTreeRestore(
        target,
        restore_args=checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    try:
        with PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(folder.absolute(), args=asked)
    except Exception as error:  # orbax also raises bare exceptions
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{folder} is damaged: {reason}") from error


def _shapes(checkpointer: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the stored arrays by path."""
    metadata = checkpointer.metadata(
        folder.absolute()
    ).item_metadata  # None if orbax cannot read the folder
    params = metadata.tree.get("params") if metadata is not None else None
    if params is None:
        raise ValueError(f"{folder} is damaged, or not an orbax checkpoint of a model")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}
