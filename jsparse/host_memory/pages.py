"""Allocates, writes and copies the pages of K and V in host memory."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, HostPages, KVCache, LayerCache
from jsparse.host_memory.tails import newest_pages
from jsparse.machine import memory
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.shapes import Rows

HostLayers = tuple[HostPages, ...]
# pages of a layer that leave the device: their ids in host memory, and their K and V
Leaving = tuple[Int32[Array, "B K n"], tuple[Any, Any]]


def host_sharding() -> SingleDeviceSharding:
    """Returns the sharding of pages in host memory; a CPU has one memory for everything.

    Raises:
        ValueError: the default device can address no pinned host memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return SingleDeviceSharding(device)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"device {device.device_kind}: must address pinned_host memory for K and V on the "
            f"host, but addresses {kinds}"
        )
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def device_sharding() -> SingleDeviceSharding:
    """Returns the sharding of arrays that come back from host memory."""
    device = jax.local_devices()[0]
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


@functools.cache
def _programs() -> tuple[Any, Any]:
    """Returns the jitted functions that allocate pages in host memory and write into them."""
    place = host_sharding()

    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.zeros(shape, dtype)

    return (
        jax.jit(zeros, static_argnums=(0, 1), out_shardings=place),
        jax.jit(row_scatter, donate_argnums=0, out_shardings=place),
    )


def empty_pages(spec: CacheSpec) -> HostLayers:
    """Returns all layers' pages in host memory, filled with zeros."""
    make, shape = _programs()[0], _pages_of_a_layer(spec)

    def zeros(x: Any) -> Array:
        # they are created on the device, so only one array at a time
        return make(x.shape, x.dtype).block_until_ready()

    try:
        return tuple(jax.tree.map(zeros, shape) for _ in range(spec.num_layers))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"K and V of {spec.pages // spec.num_kv_heads * spec.page_size} tokens take "
            f"{memory.size(spec.nbytes)} of pinned host memory, allocated by layer: must fit in "
            "the memory that the device's allocator has left"
        ) from error


@functools.partial(jax.jit, static_argnames="max_new")
def _leaving(layer: LayerCache, count: Rows, max_new: int) -> Leaving:
    return newest_pages(layer, jnp.maximum(layer.lengths - count[:, None], 0), max_new)


def stored(host: Sequence[HostPages], cache: KVCache, count: Rows, max_new: int) -> HostLayers:
    """Writes the pages of each row's newest `count[b]` ≤ `max_new` tokens into host memory.

    `host` is donated and written in place.
    """
    return tuple(
        _put(pages, _leaving(layer, count, max_new=max_new))
        for pages, layer in zip(host, cache.layers, strict=True)
    )


def put(host: Sequence[HostPages], leaving: Sequence[Leaving]) -> HostLayers:
    """Writes pages of each layer into host memory; `host` is donated and written in place."""
    return tuple(map(_put, host, leaving))


def _put(pages: HostPages, leaving: Leaving) -> HostPages:
    (ids, newest), write = leaving, _programs()[1]
    return jax.tree.map(lambda held, new: write(held, ids, new), pages, HostPages(*newest))


def shapes(spec: CacheSpec) -> tuple[HostPages, ...]:
    """Returns the shapes of all layers' pages in host memory."""
    place = host_sharding()

    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return (jax.tree.map(placed, _pages_of_a_layer(spec)),) * spec.num_layers


def _pages_of_a_layer(spec: CacheSpec) -> HostPages:
    """Returns the shapes of the pages of one layer."""
    one = spec._replace(num_layers=1)
    (layer,) = jax.eval_shape(lambda: kv_cache.init(one)).layers
    return HostPages(layer.k, layer.v)


def moved(cache: KVCache) -> HostLayers:
    """Returns the pages of a cache on the device, copied to host memory."""
    place = host_sharding()
    return tuple(
        jax.device_put(HostPages(layer.k, layer.v), place, may_alias=False)
        for layer in cache.layers
    )
