"""StepView, a policy hook's view of the cache in a decode step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.cache.int8_pages import KEY_REACH, Int8Pages
from jsparse.cache.layers import HostPages, KVCache, LayerCache, PagePool
from jsparse.ranks import own_part
from jsparse.shapes import Rows


class ReadOnly(NamedTuple):
    """Inputs of programs besides the weights; none of them is donated or returned.

    Attributes:
        constants: the model's arrays that the policy `needs` or the cache does, by name.
        knobs: hyper-parameters that differ by row, by name: one number per row.
        host: the layers' pages in host memory; None if K and V are on the device.
    """

    constants: Mapping[str, Array] | None = None
    knobs: Mapping[str, Array] | None = None
    host: tuple[HostPages, ...] | None = None


NOTHING = ReadOnly()


class StepView(NamedTuple):
    """The view of a step for a policy's hooks.

    Attributes:
        cache: K and V, in any memories.
        constants, knobs: as in ReadOnly.
        valid: the number of new tokens that each row accepts, from the first on; None: all.
    """

    cache: KVCache
    constants: Mapping[str, Array] | None = None
    knobs: Mapping[str, Array] | None = None
    valid: Rows | None = None

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The cache's layers."""
        return self.cache.layers

    @property
    def positions(self) -> Rows:
        """The text position of each row's new token; between steps, of the next one."""
        return self.cache.positions

    @property
    def active(self) -> Bool[Array, "B"] | None:
        """The rows that accept a token; None: all."""
        return None if self.valid is None else self.valid > 0


def step_view(cache: KVCache, read_only: ReadOnly) -> StepView:
    """Returns the view of a cache for hooks; programs return `without_borrowed` of its cache."""
    cache = with_host(cache, read_only.host)
    reach = (read_only.constants or {}).get(KEY_REACH)
    if reach is not None:
        cache = _with_reach(cache, own_part(reach, 1))
    return StepView(cache, read_only.constants, read_only.knobs)


def with_host(cache: KVCache, host: tuple[HostPages, ...] | None) -> KVCache:
    """Returns the cache with these pages in the host memory of its layers."""
    if host is None:
        return cache
    return cache._replace(layers=tuple(map(_with_host, cache.layers, host)))


def without_borrowed(cache: KVCache) -> KVCache:
    """Returns the cache without the arrays of ReadOnly that it borrows for one program.

    They must not be donated.
    """
    layers = tuple(_with_host(layer, None) for layer in cache.layers)
    return _with_reach(cache._replace(layers=layers), None)


def _with_host(layer: LayerCache, pages: HostPages | None) -> LayerCache:
    k, v = layer.k, layer.v
    if not (layer.on_host and isinstance(k, PagePool) and isinstance(v, PagePool)):
        return layer
    return layer._replace(k=k.with_host(pages and pages.k), v=v.with_host(pages and pages.v))


def _with_reach(cache: KVCache, reach: Float32[Array, "L K half"] | None) -> KVCache:
    """Returns the cache with the reach of each channel of K, if K is in 8 bits."""
    layers = list(cache.layers)
    for i, layer in enumerate(layers):
        if isinstance(layer.k, Int8Pages):
            of_channels = None if reach is None else jnp.tile(reach[i], 2)
            layers[i] = layer._replace(k=replace(layer.k, reach=of_channels))
    return cache._replace(layers=tuple(layers))


def taking_part(view: StepView, tokens: int) -> Rows:
    """Returns how many of `tokens` new tokens each row accepts, from the first on."""
    if view.valid is None:
        return jnp.full(view.positions.shape, tokens, jnp.int32)
    return view.valid
