"""Says where a session's K and V lie: on the device, or in host memory but for the newest tokens.

A session gets its cache from its store and tells the store what each program did; it does not ask
where K and V are. Where they are in host memory, the cache on the device has the newest tokens of
every head (HostPool). Each prompt chunk is copied once it has been read; when a layer
reads the next chunk, what it held before comes back over the bus. While decoding, the tail is
copied before the ring would overwrite it. Host memory is borrowed by every program and written
between them, by this module alone.
"""

import os
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import psutil

from jsparse import cache as kv_cache
from jsparse.builder import require_offloadable
from jsparse.cache import CacheSpec, HostPages, KVCache, with_host, without_host
from jsparse.hooks import State
from jsparse.host_memory import pool as host_pool
from jsparse.machine import memory
from jsparse.pallas_kernels.dispatch import no_triton
from jsparse.policy import Offload, Policy
from jsparse.shapes import Rows

LIMIT_VARIABLE, DEFAULT_LIMIT_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# room beside what the allocator hands out, for everything else that a process keeps
SPARE_HOST_BYTES = 2**30

HostLayers = tuple[HostPages, ...]


@runtime_checkable
class KVStore(Protocol):
    """Keeps the K and V of one cache.

    Attributes:
        pages: what each layer has in host memory, for programs to read; None if nothing.
        single_steps: whether a program must run one decode step, since XLA takes no array in host
            memory into a loop of steps.
        every: the number of decode steps after which `after_steps` must be called; 0 is never.
    """

    pages: HostLayers | None
    single_steps: bool
    every: int

    def require(self) -> None:
        """Raises ValueError if the policy or the device cannot have K and V here."""
        ...

    def require_fit(self) -> None:
        """Raises ValueError if they do not fit in host memory; nothing is allocated."""
        ...

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of K and V on the device; prompts are read `chunk` tokens at a time."""
        ...

    def host_bytes(self) -> int:
        """Returns the bytes of K and V in host memory."""
        ...

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns an empty cache and the policy's first state.

        Raises:
            ValueError: K and V cannot lie here.
        """
        ...

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Takes over a cache whose K and V lie on the device, which the caller gives up.

        `pages` are its K and V in host memory, if they have been copied there; they are written in
        place from now on, and the cache is not touched.
        """
        ...

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Notes that each row has read `valid[b]` ≤ `size` further tokens of its prompt."""
        ...

    def after_steps(self, cache: KVCache) -> None:
        """Notes that `every` steps have been decoded since the prompt, or since the last call."""
        ...

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache, which is donated, once its rows have been cut back."""
        ...

    def committed[T](self, arrays: T) -> T:
        """Returns arrays bound as those that come from a program are, lest it be traced again."""
        ...


def store_of(policy: Policy, spec: CacheSpec) -> KVStore:
    """Returns the store that a policy asks for."""
    return OnDevice(policy, spec) if policy.offload is None else OnHost(policy, spec)


class OnDevice:
    """Keeps K and V on the device, where each program hands them on to the next."""

    pages: HostLayers | None = None
    single_steps = False
    every = 0

    def __init__(self, policy: Policy, spec: CacheSpec) -> None:
        """Prepares a store; nothing is allocated."""
        self._policy, self._spec = policy, spec

    def require(self) -> None:
        """Does nothing: every policy takes K and V on the device."""

    def require_fit(self) -> None:
        """Does nothing."""

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of the cache."""
        return self._spec.nbytes

    def host_bytes(self) -> int:
        """Returns 0."""
        return 0

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns an empty cache and the policy's first state."""
        return empty_rows(self._spec, self._policy)

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Returns the cache as it is."""
        assert pages is None
        return cache

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Does nothing."""

    def after_steps(self, cache: KVCache) -> None:
        """Does nothing."""

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache as it is."""
        return cache

    def committed[T](self, arrays: T) -> T:
        """Returns the arrays as they are."""
        return arrays


class OnHost:
    """Keeps K and V in host memory, and the newest tokens and resident heads on the device."""

    single_steps = True

    def __init__(self, policy: Policy, spec: CacheSpec) -> None:
        """Prepares a store of a policy with `offload`; nothing is allocated."""
        assert policy.offload is not None
        self._policy, self._spec, self._offload = policy, spec, policy.offload
        self.pages: HostLayers | None = None
        # whole pages, as many as the tail has: the ring has two more, so that each is copied
        # before it is overwritten
        self.every = max(self._offload.tail // spec.page_size, 1) * spec.page_size

    def require(self) -> None:
        """Raises ValueError if this policy or device cannot have K and V in host memory.

        The tail must hold what hooks of the policy look back at.
        """
        policy, spec, tail = self._policy, self._spec, self._offload.tail
        require_offloadable("policy", policy, self._offload)
        for layer in range(spec.num_layers):
            if policy.stats(layer) not in (None, "listed_logits"):
                raise ValueError(
                    f"policy={policy}: must ask for no statistics but listed_logits where K and V "
                    f"lie in host memory, and asks for {policy.stats(layer)}"
                )
        host_pool.host_sharding()  # refuses a device that cannot address host memory
        if jax.default_backend() == "gpu" and (reason := no_triton()):
            raise ValueError(f"policy={policy}: reading host memory {reason}")
        if spec.pool_pages is not None:
            raise ValueError(
                f"pool_pages={spec.pool_pages}: must be None where K and V lie in host memory"
            )
        minimum = max(policy.reads or 0, spec.page_size)
        if tail < minimum:
            raise ValueError(
                f"tail={tail}: must be at least {minimum}, the newest tokens that {policy} and "
                f"pages of {spec.page_size} tokens need on the device"
            )

    def require_fit(self) -> None:
        """Raises ValueError if K and V do not fit in host memory; nothing is allocated."""
        wanted, there = self.host_bytes(), available_host_bytes()
        if wanted > there:
            limited = jax.default_backend() == "gpu"
            raise ValueError(
                f"max_length={self._spec.capacity} for {self._spec.batch} prompt(s) takes "
                f"{memory.size(wanted)} of host memory: must fit in the {memory.size(there)} that "
                + (f"are free and {LIMIT_VARIABLE} allows" if limited else "are free")
            )

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of tails, of resident heads, and of one layer that reads its prompt."""
        spec = self._spec
        heads = spec.batch * spec.num_kv_heads
        page = 2 * spec.page_size * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        tails = spec.num_layers * heads * _ring_pages(spec, self._offload, chunk)
        resident = sum(
            spec.batch * spec.num_pages * len(self._policy.dense_heads(layer, spec.num_kv_heads))
            for layer in range(spec.num_layers)
        )
        return (tails + resident + heads * spec.num_pages) * page

    def host_bytes(self) -> int:
        """Returns the bytes of K and V."""
        return self._spec.nbytes

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns a cache of empty tails, and the policy's first state.

        Raises:
            ValueError: K and V do not fit in host memory, or the policy or the device cannot do it.
        """
        self.require()
        self.require_fit()
        self.pages = host_pool.empty_pages(self._spec)
        return _empty_tails(self._spec, self._policy, chunk)

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Moves K and V of a cache on the device to host memory; returns its tails."""
        self.require()
        if pages is None:
            self.require_fit()
            pages = host_pool.moved(cache)
        self.pages = pages
        return _refilled(_tailed(cache, self._policy, self._spec, chunk), pages)

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Copies what the chunk brought from the device."""
        assert self.pages is not None
        self.pages = host_pool.stored(self.pages, cache, valid, size)

    def after_steps(self, cache: KVCache) -> None:
        """Copies the newest `every` tokens from the device, before the ring overwrites them."""
        self.after_chunk(cache, jnp.full(self._spec.batch, self.every, jnp.int32), self.every)

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache with the newest pages that are left in its tails."""
        assert self.pages is not None
        return _refilled(cache, self.pages)

    def committed[T](self, arrays: T) -> T:
        """Returns arrays bound to the default device.

        Pages in host memory are bound to theirs, and so are results of programs that borrow them:
        what is not bound before the first of these would make the second another program.
        """
        return jax.device_put(arrays, jax.local_devices()[0])


def _ring_pages(spec: CacheSpec, offload: Offload, chunk: int) -> int:
    """Returns R, the pages per head on the device: room for the tail or a prompt chunk."""
    return min(-(-max(offload.tail, chunk) // spec.page_size) + 2, spec.num_pages)


def available_host_bytes() -> int:
    """Returns the bytes that K and V may take in host memory.

    On a GPU, XLA's allocator of pinned memory has a limit, 64 GB unless the environment variable
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
    """
    free = max(psutil.virtual_memory().available - SPARE_HOST_BYTES, 0)
    if jax.default_backend() != "gpu":
        return free
    return min(free, int(float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GB)) * 2**30))


@partial(jax.jit, static_argnames=("spec", "policy"))
def empty_rows(spec: CacheSpec, policy: Policy) -> tuple[KVCache, State]:
    """Returns an empty cache on the device, and the policy's first state."""
    return kv_cache.init(spec, fields=policy.fields), policy.init(spec)


@partial(jax.jit, static_argnames=("spec", "policy", "chunk"))
def _empty_tails(spec: CacheSpec, policy: Policy, chunk: int) -> tuple[KVCache, State]:
    state = policy.init(spec)  # it refuses sizes that do not fit the policy
    return _tailed(kv_cache.init(spec), policy, spec, chunk), state


@partial(jax.jit, static_argnames=("policy", "spec", "chunk"))
def _tailed(cache: KVCache, policy: Policy, spec: CacheSpec, chunk: int) -> KVCache:
    """Returns a cache with empty tails in the place of K and V; resident heads keep theirs."""
    assert policy.offload is not None
    size = _ring_pages(spec, policy.offload, chunk)
    layers = (
        host_pool.in_tail(held, size, policy.dense_heads(layer, spec.num_kv_heads))
        for layer, held in enumerate(cache.layers)
    )
    return cache._replace(layers=tuple(layers))


@partial(jax.jit, donate_argnames=("cache",))
def _refilled(cache: KVCache, pages: HostLayers) -> KVCache:
    layers = map(host_pool.refilled, with_host(cache, pages).layers)
    return without_host(cache._replace(layers=tuple(layers)))
