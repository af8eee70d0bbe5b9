"""StepView, a policy hook's view of the cache in a decode step."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jsparse.cache.layers import HostPages, KVCache, LayerCache
from jsparse.shapes import Rows


class ReadOnly(NamedTuple):
    """Inputs of programs besides the weights; none of them is donated or returned.

    Attributes:
        constants: the model's arrays that the policy `needs`, by name.
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
    """Returns the view of a cache for hooks; programs return `without_host` of its cache."""
    return StepView(with_host(cache, read_only.host), read_only.constants, read_only.knobs)


def with_host(cache: KVCache, host: tuple[HostPages, ...] | None) -> KVCache:
    """Returns the cache with these pages in the host memory of its layers."""
    if host is None:
        return cache
    return cache._replace(layers=tuple(map(_with_host, cache.layers, host)))


def without_host(cache: KVCache) -> KVCache:
    """Returns the cache without its layers' pages in host memory, which must not be donated."""
    return cache._replace(layers=tuple(_with_host(layer, None) for layer in cache.layers))


def _with_host(layer: LayerCache, pages: HostPages | None) -> LayerCache:
    if layer.page_pools is None:
        return layer
    k, v = layer.page_pools
    k, v = k.with_host(pages and pages.k), v.with_host(pages and pages.v)
    return layer._replace(k=k, v=v)


def taking_part(view: StepView, tokens: int) -> Rows:
    """Returns how many of `tokens` new tokens each row accepts, from the first on."""
    if view.valid is None:
        return jnp.full(view.positions.shape, tokens, jnp.int32)
    return view.valid
