"""Saves and loads weights as an orbax checkpoint, the format of saved jsparse models.

orbax is imported only where it is used, since its import takes a second.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jsparse.models.config import ModelConfig
from jsparse.models.families import Names
from jsparse.models.quantized import name_of
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import Weights
from jsparse.models.weight_plan import Planned, plan_weight
from jsparse.models.weight_reading import converted
from jsparse.models.weights import OnProgress, by_path, list_weights, tree
from jsparse.pallas_kernels.weight_blocks import BLOCK, Form, form_of


def save_weights(weights: Weights, folder: Path) -> None:
    """Writes the tree into `folder`, which must not exist yet."""
    from orbax.checkpoint import StandardCheckpointer

    with StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), weights)


def plan_saved(
    folder: Path, config: ModelConfig, names: Names, option: str, dtype: Any, ranks: int = 1
) -> list[Planned]:
    """Plans the weights in `folder` from the shapes there; see `plan_weight`.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: it is not an orbax checkpoint, is damaged, or has other arrays.
    """
    from orbax.checkpoint import StandardCheckpointer

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: a saved model has its weights there")
    with StandardCheckpointer() as checkpointer:
        stored = _arrays(checkpointer, folder)
    listed = list_weights(folder, len(stored), config, names)
    blocks = {path.rpartition("/")[0] for path in stored if path.endswith("/values")}
    forms = {path: _saved_form(folder, stored, path) for path in blocks}
    expected = {
        path: array
        for weight in listed
        for path, array in weight.arrays(forms.get(weight.path), jnp.float32).items()
    }
    if stored.keys() != expected.keys():
        raise ValueError(
            f"{folder}: {min(stored.keys() ^ expected.keys())} is missing or not in the config"
        )
    for path, array in expected.items():
        if stored[path].shape != array.shape:
            raise ValueError(
                f"{folder}: {path} has shape {stored[path].shape}: the config asks for "
                f"{array.shape}"
            )
    planned = []
    for weight in listed:
        form = forms.get(weight.path)
        kind = str(stored[weight.path].dtype) if form is None else name_of(form)
        planned.append(plan_weight(weight, (kind,), (form,), option, dtype, ranks, saved=True))
    return planned


def load_weights(
    folder: Path,
    planned: Sequence[Planned],
    dtype: Any,
    on_progress: OnProgress | None,
    spreading: Spreading | None = None,
) -> Weights:
    """Reads the tree from `folder`, numbers as `dtype`, onto the default device or spread.

    Spreading, and converting matrices to another format, needs memory for one layer in addition to
    the device's part.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    if spreading is None and all(each.stored == (each.form,) for each in planned):
        weights = _restored(folder, planned, dtype)
    else:
        arrays: dict[str, jax.Array] = {}
        for _, of_layer in itertools.groupby(sorted(planned, key=_layer), _layer):
            part = list(of_layer)
            saved = _restored(folder, part, dtype)["params"]
            for path, array in _in_formats(part, saved, dtype):
                placed = array if spreading is None else spreading.place(path, array)
                arrays[path] = jax.block_until_ready(placed)
        weights = tree(arrays)
    if on_progress is not None:
        total = sum(array.nbytes for array in jax.tree.leaves(weights))
        on_progress(total, total)
    return weights


def _layer(each: Planned) -> str:
    return each.weight.path.partition("/")[0]


def _in_formats(
    planned: Sequence[Planned], saved: Weights, dtype: Any
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the arrays of a part of the saved tree in their planned formats, by path."""
    for each in planned:
        path = each.weight.path
        leaf = functools.reduce(operator.getitem, path.split("/"), saved)
        if each.stored != (each.form,):
            leaf = converted(leaf, each.weight, each.form, dtype)
        yield from by_path(path, leaf)


def _restored(folder: Path, planned: Sequence[Planned], dtype: Any) -> Weights:
    """Reads a part of the tree as saved; raises ValueError if it is damaged."""
    from orbax.checkpoint import PyTreeCheckpointer, args, checkpoint_utils

    sharding, wanted = jnp.zeros(()).sharding, {}  # the default device, which may be set
    for each in planned:
        (form,) = each.stored
        # Q8_0 is made from the saved numbers
        numbers = dtype if each.form == form else jnp.float32
        for path, array in each.weight.arrays(form, numbers).items():
            wanted[path] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    target = tree(wanted)
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


def _saved_form(folder: Path, stored: Mapping[str, jax.ShapeDtypeStruct], path: str) -> Form:
    """Returns the format of a matrix in blocks; raises ValueError if its arrays have none."""
    own: Any = {
        name.removeprefix(f"{path}/"): array
        for name, array in stored.items()
        if name.startswith(f"{path}/")
    }
    try:
        return form_of(own)
    except (ValueError, KeyError) as error:
        out, width = own["values"].shape
        if "scales" in own and own["scales"].shape == (out, width // BLOCK):
            reason = "8-bit blocks as an earlier version saved them: save it anew"
        else:
            reason = f"blocks of no known format in {path}: {error}"
        raise ValueError(f"{folder} has {reason}") from None


def _arrays(checkpointer: Any, folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the stored arrays by path."""
    metadata = checkpointer.metadata(
        folder.absolute()
    ).item_metadata  # None if orbax cannot read the folder
    params = metadata.tree.get("params") if metadata is not None else None
    if params is None:
        raise ValueError(f"{folder} is damaged, or not an orbax checkpoint of a model")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        "/".join(str(key.key) for key in path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in leaves
    }
