"""Runs a program on all ranks of a model that is spread over devices.

Its arrays are then either sharded, with the ranks as first axis, or replicated.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsparse.ranks import AXIS

# sharded arrays have the ranks as first axis; replicated ones are the same on all ranks
SHARDED, REPLICATED = PartitionSpec(AXIS), PartitionSpec()


def on_ranks(
    body: Callable[..., Any],
    mesh: Mesh,
    sharded: Collection[str],
    static: Collection[str],
    out: Any,
) -> Callable[..., Any]:
    """Returns a function that calls `body` on every rank, with that rank's arguments.

    Args:
        body: the function, for one rank.
        mesh: the ranks.
        sharded: the names of the sharded arguments.
        static: the names of arguments that are not arrays.
        out: SHARDED or REPLICATED, for each of the results.
    """

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(body).bind(*args, **kwargs).arguments
        fixed = {name: value for name, value in given.items() if name in static}
        arrays = {name: value for name, value in given.items() if name not in static}
        specs = {name: SHARDED if name in sharded else REPLICATED for name in arrays}

        def of_rank(arrays: dict[str, Any]) -> Any:
            mine = {
                name: jax.tree.map(lambda x: x[0], value) if name in sharded else value
                for name, value in arrays.items()
            }
            made = body(**mine, **fixed)
            return jax.tree.map(
                _with_rank_axis, out, made, is_leaf=lambda x: x is SHARDED or x is REPLICATED
            )

        mapped = jax.shard_map(
            of_rank, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False
        )
        return mapped(arrays)

    return run


@functools.cache
def by_rank(
    body: Callable[..., Any],
    mesh: Mesh | None,
    *,
    sharded: tuple[str, ...] = (),
    static: tuple[str, ...] = (),
    donated: tuple[str, ...] = (),
    out: Any = SHARDED,
) -> Callable[..., Any]:
    """Returns a function that runs `body` on each rank; `body` itself without a mesh."""
    if mesh is None:
        return body
    run = on_ranks(body, mesh, sharded, static, out)
    return jax.jit(run, static_argnames=static, donate_argnames=donated)


def _with_rank_axis(spec: PartitionSpec, result: Any) -> Any:
    return jax.tree.map(lambda x: x[None], result) if spec is SHARDED else result


def on_host(arrays: Any, mesh: Mesh | None) -> Any:
    """Returns arrays [B] and [B, K, …] of all ranks on the host, with the heads of all ranks."""
    host = jax.device_get(arrays)
    if mesh is None:
        return host
    # arrays by row are the same on all ranks
    return jax.tree.map(lambda x: x[0] if x.ndim == 2 else np.concatenate(x, axis=1), host)


def same_on_all(values: Any, mesh: Mesh) -> Any:
    """Returns arrays replicated on all ranks."""
    place = NamedSharding(mesh, REPLICATED)

    def placed(value: Any) -> jax.Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    return jax.tree.map(placed, values)


def placed(shapes: Any, mesh: Mesh) -> Any:
    """Returns the shapes of sharded arrays, with their sharding."""
    place = NamedSharding(mesh, SHARDED)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
