"""Puts layers of the kernels' cases into host memory."""

import jax

from jsparse.cache import HostPages, LayerCache
from jsparse.host_memory.pages import host_sharding
from jsparse.host_memory.tails import in_tail, refilled


def on_host(x: jax.Array) -> jax.Array:
    """A copy in host memory; on a CPU the same array."""
    return jax.device_put(x, host_sharding())


def in_host_memory(
    layer: LayerCache, ring: int, heads: tuple[int, ...] = ()
) -> tuple[LayerCache, HostPages]:
    """The layer with K and V in host memory, which `lent` attaches, and rings of `ring` pages."""
    pages = HostPages(on_host(layer.k), on_host(layer.v))
    held = jax.jit(refill, static_argnums=(2, 3))(layer, pages, ring, heads)
    return held, pages


def refill(layer, pages, ring, heads):
    return lent(refilled(lent(in_tail(layer, ring, heads), pages)), HostPages(None, None))


def lent(layer: LayerCache, pages: HostPages) -> LayerCache:
    return layer._replace(k=layer.k.with_host(pages.k), v=layer.v.with_host(pages.v))
