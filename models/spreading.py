"""Spreads weights over devices; each gets some of the heads and a part of the MLP."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jsparse.hyper_parameters import whole_number
from jsparse.machine.processes import link
from jsparse.models.config import ModelConfig
from jsparse.ranks import AXIS


class Spreading:
    """Division of a model's arrays among the first devices, one rank on each.

    Norms and the embedding are the same on all ranks (jsparse.ranks), and so are the columns of a
    vocabulary that is not a multiple of their number. All processes (jax.distributed) have the same
    number of ranks, and each places its own. `config` has the sizes of a rank.
    """

    def __init__(self, config: ModelConfig, ranks: int) -> None:
        """Raises ValueError if the model cannot be divided into these ranks, or devices are too
        few.
        """
        whole_number("tensor_parallel_size", ranks, 1)
        processes, devices = jax.process_count(), jax.devices()
        if ranks > len(devices) or ranks % processes:
            each = f", and a multiple of the {processes} processes" if processes > 1 else ""
            raise ValueError(
                f"tensor_parallel_size={ranks}: must be at most {len(devices)}, the number of "
                f"devices{each}"
            )
        link()  # from here on, each process notices when another ends
        self._whole, self.config = config, config.of_rank(ranks)
        own = [[x for x in devices if x.process_index == nth] for nth in range(processes)]
        first = np.array([some[: ranks // processes] for some in own])
        self.mesh = Mesh(first.reshape(-1), (AXIS,), axis_types=(AxisType.Auto,))

    def own_size(self, path: str, size: int) -> int:
        """Returns how many elements of the array at a path each rank has."""
        return own_size(self._whole, self.mesh.size, path, size)

    def place(self, path: str, whole: Array) -> Array:
        """Returns the array at a path such as layers_0/mlp/down/kernel, with ranks as axis 0."""
        parts = self._parts(path.split("/"), whole)
        pairs = zip(parts, self.mesh.devices.flat, strict=True)
        here = jax.process_index()
        placed = [
            jax.device_put(part[None], device)
            for part, device in pairs
            if device.process_index == here
        ]
        place = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.make_array_from_single_device_arrays(
            (self.mesh.size, *parts[0].shape), place, placed
        )

    def place_all(self, weights: Any) -> Any:
        """Returns the decoder's tree of arrays, placed."""
        return jax.tree.map_with_path(
            lambda path, leaf: self.place("/".join(entry.key for entry in path), leaf), weights
        )

    def _parts(self, names: list[str], whole: Array) -> list[Array]:
        """Returns each rank's part of the array of this name."""
        ranks = self.mesh.size
        ends = _ends(self._whole, ranks, names)
        if ends is None:
            return [whole] * ranks
        if "experts" in names:
            return jnp.split(whole, ranks)
        # codes of blocks are [out, in], all others [in, out]
        summed, out = (1, 0) if names[-1] in ("values", "high") else (0, -1)
        if "o" in names or "down" in names:
            return jnp.split(whole, ranks, axis=summed)
        kinds = [jnp.split(kind, ranks, axis=out) for kind in jnp.split(whole, ends, axis=out)]
        return [jnp.concatenate(of_rank, axis=out) for of_rank in zip(*kinds, strict=True)]


def own_size(config: ModelConfig, ranks: int, path: str, size: int) -> int:
    """Returns how many elements of a model's array each rank has; `config` is the whole model's."""
    return size if _ends(config, ranks, path.split("/")) is None else size // ranks


def _ends(config: ModelConfig, ranks: int, names: list[str]) -> list[int] | None:
    """Returns the ends of an array's kinds of columns, except the last; None: not divided."""
    if "qkv" in names:
        q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        return [q, q + kv]
    if "experts" in names:
        return []
    if "gate_up" in names and config.experts is not None:  # of the shared one
        return [config.experts.shared_size]
    if "gate_up" in names:
        return [config.intermediate_size]
    divided = "lm_head" in names and config.vocab_parts(ranks) > 1
    return [] if divided or "o" in names or "down" in names else None
