"""OnHost, the store that keeps K and V in host memory, except for the newest tokens.

The cache on the device has the newest tokens of every head (HostPool). Each prompt chunk is copied
to the host after its prefill; when a layer processes the next chunk, its earlier tokens come back
over the bus. While decoding, the tail is copied before the ring would overwrite it. Programs borrow
host memory; only this store writes to it, between programs.
"""

import os
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from jsparse import cache as kv_cache
from jsparse.builder import require_offloadable
from jsparse.cache import CacheSpec, KVCache, with_host, without_borrowed
from jsparse.hooks import State
from jsparse.host_memory.pages import HostLayers, empty_pages, host_sharding, moved, stored
from jsparse.host_memory.tails import in_tail, refilled
from jsparse.machine import memory
from jsparse.pallas_kernels.dispatch import no_triton
from jsparse.policy import Offload, Policy
from jsparse.shapes import Rows

LIMIT_VARIABLE, DEFAULT_LIMIT_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# reserve next to the allocator's memory, for everything else in the process
SPARE_HOST_BYTES = 2**30


class OnHost:
    """K and V in host memory, with the newest tokens and resident heads on the device."""

    single_steps = True

    def __init__(self, policy: Policy, spec: CacheSpec, mesh: Mesh | None = None) -> None:
        """Sets up a store for a policy with `offload`; nothing is allocated."""
        self._policy, self._spec, self._mesh = policy, spec, mesh
        self._offload = cast(Offload, policy.offload)
        self.pages: HostLayers | None = None
        # the tail in whole pages: the ring has two more, so that each page is copied before it is
        # overwritten
        self.every = max(self._offload.tail // spec.page_size, 1) * spec.page_size

    def require(self) -> None:
        """Raises ValueError if this policy or device does not support K and V in host memory.

        The tail must hold the earlier tokens that the policy's hooks read.
        """
        policy, spec, tail = self._policy, self._spec, self._offload.tail
        if self._mesh is not None:
            raise ValueError(
                f"tensor_parallel_size={self._mesh.size}: must be 1 with K and V in host memory"
            )
        require_offloadable("policy", policy)
        for layer in range(spec.num_layers):
            if policy.stats(layer) not in (None, "listed_logits"):
                raise ValueError(
                    f"policy={policy}: must request no statistics but listed_logits with K and V "
                    f"in host memory, not {policy.stats(layer)}"
                )
        host_sharding()  # raises for a device that cannot address host memory
        if jax.default_backend() == "gpu" and (reason := no_triton()):
            raise ValueError(f"policy={policy}: reading host memory {reason}")
        if spec.pool_pages is not None:
            raise ValueError(
                f"pool_pages={spec.pool_pages}: must be None with K and V in host memory"
            )
        minimum = max(policy.reads or 0, spec.page_size)
        if tail < minimum:
            raise ValueError(
                f"tail={tail}: must be at least {minimum}, the newest tokens that {policy} and "
                f"pages of {spec.page_size} tokens need on the device"
            )

    def require_fit(self) -> None:
        """Raises ValueError if K and V do not fit in host memory; nothing is allocated."""
        size, limit = self.host_bytes(), available_host_bytes()
        if size > limit:
            limited = jax.default_backend() == "gpu"
            raise ValueError(
                f"max_length={self._spec.capacity} for {self._spec.batch} prompt(s) takes "
                f"{memory.size(size)} of host memory: must fit in the {memory.size(limit)} that "
                + (f"are free and {LIMIT_VARIABLE} allows" if limited else "are free")
            )

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of tails, of resident heads, and of one layer during prefill."""
        spec = self._spec
        layer = spec.batch * spec.num_kv_heads * spec.num_pages * page_bytes(spec)
        return self.row_bytes(chunk) + layer

    def row_bytes(self, chunk: int = 0) -> int:
        """Returns the bytes on the device of the tails and of the resident heads of all rows."""
        spec, heads = self._spec, self._spec.num_kv_heads
        tails = spec.num_layers * heads * self._ring_pages(chunk)
        resident = sum(
            spec.num_pages * len(self._policy.dense_heads(layer, heads))
            for layer in range(spec.num_layers)
        )
        return spec.batch * (tails + resident) * page_bytes(spec)

    def _ring_pages(self, chunk: int) -> int:
        """Returns R, the pages per head on the device: room for the tail or a prompt chunk."""
        size = max(self._offload.tail, chunk)
        return min(-(-size // self._spec.page_size) + 2, self._spec.num_pages)

    def in_tails(self, cache: KVCache, chunk: int = 0) -> KVCache:
        """Returns a cache with empty tails in place of K and V; resident heads keep theirs."""
        layers = (
            in_tail(
                kv,
                self._ring_pages(chunk),
                self._policy.dense_heads(layer, kv.lengths.shape[1]),
            )
            for layer, kv in enumerate(cache.layers)
        )
        return cache._replace(layers=tuple(layers))

    def host_bytes(self) -> int:
        """Returns the bytes of K and V."""
        return self._spec.nbytes

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns a cache of empty tails, and the policy's initial state.

        Raises:
            ValueError: K and V do not fit in host memory, or the policy or the device does not
                support it.
        """
        self.require()
        self.require_fit()
        self.pages = empty_pages(self._spec)
        return _empty_tails(self._spec, self._policy, chunk)

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Moves K and V of a cache on the device to host memory; returns its tails."""
        self.require()
        if pages is None:
            self.require_fit()
            pages = moved(cache)
        self.pages = pages
        return _refilled(_tailed(self._spec, self._policy, chunk, cache), pages)

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Copies the chunk's K and V from the device."""
        assert self.pages is not None
        self.pages = stored(self.pages, cache, valid, size)

    def after_steps(self, cache: KVCache) -> None:
        """Copies the newest `every` tokens from the device, before the ring overwrites them."""
        self.after_chunk(cache, jnp.full(self._spec.batch, self.every, jnp.int32), self.every)

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache with the newest remaining pages in its tails."""
        assert self.pages is not None
        return _refilled(cache, self.pages)

    def committed[T](self, arrays: T) -> T:
        """Returns arrays committed to the default device.

        Pages in host memory are committed to it, and so are results of programs that borrow them:
        with an array that is uncommitted before the first of these programs, the second would be a
        different program.
        """
        return jax.device_put(arrays, jax.local_devices()[0])


def page_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of K and V of one page of one head."""
    return spec.page_size * spec.slot_bytes


def available_host_bytes() -> int:
    """Returns the maximum bytes of K and V in host memory.

    On a GPU, XLA's allocator of pinned memory has a limit, 64 GB unless the environment variable
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB sets another.
    """
    free = max(psutil.virtual_memory().available - SPARE_HOST_BYTES, 0)
    if jax.default_backend() != "gpu":
        return free
    return min(free, int(float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GB)) * 2**30))


@partial(jax.jit, static_argnames=("spec", "policy", "chunk"))
def _empty_tails(spec: CacheSpec, policy: Policy, chunk: int) -> tuple[KVCache, State]:
    state = policy.init(spec)  # it raises for sizes that do not fit the policy
    return OnHost(policy, spec).in_tails(kv_cache.init(spec), chunk), state


@partial(jax.jit, static_argnames=("spec", "policy", "chunk"))
def _tailed(spec: CacheSpec, policy: Policy, chunk: int, cache: KVCache) -> KVCache:
    return OnHost(policy, spec).in_tails(cache, chunk)


def with_newest(cache: KVCache, pages: HostLayers | None, *, resident: bool = False) -> KVCache:
    """Returns rows with the newest tokens from these pages in host memory in their tails.

    With `resident`, resident heads get all their tokens.
    """
    kv = with_host(cache, pages)
    layers = tuple(refilled(layer, resident=resident) for layer in kv.layers)
    return without_borrowed(kv._replace(layers=layers))


_refilled = jax.jit(with_newest, static_argnames="resident", donate_argnames="cache")
