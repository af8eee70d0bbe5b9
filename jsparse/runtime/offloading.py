"""Keeps K and V in host memory while prompts are read and while a policy decodes.

The cache on the device has the newest tokens of every head (jsparse.host_pool). Each prompt chunk
is copied to host memory once it has been read; when a layer reads the next chunk, what it held
before comes back over the bus. While decoding, the tail is copied before the ring would overwrite
it. Host memory is borrowed by every program and written between them, by this module alone.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import psutil

from jsparse import cache as kv_cache
from jsparse import host_pool, memory
from jsparse.cache import CacheSpec, HostPages, KVCache, Lent, lend
from jsparse.pallas_kernels.dispatch import no_triton
from jsparse.policy import Offload, Policy, State, require_offloadable
from jsparse.shapes import Rows

LIMIT_VARIABLE, DEFAULT_LIMIT_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# room beside what the allocator hands out, for everything else that a process keeps
SPARE_HOST_BYTES = 2**30


class HostMemory:
    """Owns what a cache has in host memory.

    Attributes:
        pages: the pages of each layer, to be lent to programs.
    """

    def __init__(self, pages: tuple[HostPages, ...]) -> None:
        """Takes over pages, which are written in place from now on."""
        self.pages = pages

    def store(self, cache: KVCache, count: Rows, most: int) -> None:
        """Copies the pages of each row's newest `count[b]` ≤ `most` tokens from the device."""
        self.pages = host_pool.stored(self.pages, cache, count, most)

    def refill(self, cache: KVCache) -> KVCache:
        """Returns the cache, which is donated, with the newest pages in its tail."""
        return _refilled(cache, self.pages)


def flush_every(offload: Offload, page_size: int) -> int:
    """Returns the number of steps after which the tail is copied to host memory.

    The ring has a page more than the tail and one more that is being filled.
    """
    return max(offload.tail // page_size * page_size, page_size)


def ring_pages(spec: CacheSpec, offload: Offload, chunk: int) -> int:
    """Returns R, the pages per head on the device: room for the tail or a prompt chunk."""
    return min(-(-max(offload.tail, chunk) // spec.page_size) + 2, spec.num_pages)


def device_bytes(spec: CacheSpec, policy: Policy, chunk: int) -> int:
    """Returns the bytes of K and V on the device, over all layers.

    With `policy.offload` these are the tail, resident heads, and the layer whose prompt is being
    read.
    """
    if policy.offload is None:
        return spec.nbytes
    heads = spec.batch * spec.num_kv_heads
    page = 2 * spec.page_size * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    tails = spec.num_layers * heads * ring_pages(spec, policy.offload, chunk)
    resident = sum(
        spec.batch * spec.num_pages * len(policy.dense_heads(layer, spec.num_kv_heads))
        for layer in range(spec.num_layers)
    )
    return (tails + resident + heads * spec.num_pages) * page


def available_host_bytes() -> int:
    """Returns the bytes that K and V may take in host memory.

    On a GPU, XLA's allocator of pinned memory has a limit, 64 GB unless the environment variable
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
    """
    free = max(psutil.virtual_memory().available - SPARE_HOST_BYTES, 0)
    if jax.default_backend() != "gpu":
        return free
    return min(free, int(float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GB)) * 2**30))


def require_host_fit(spec: CacheSpec) -> None:
    """Raises ValueError if K and V do not fit in host memory; nothing is allocated."""
    there = available_host_bytes()
    if spec.nbytes > there:
        limited = jax.default_backend() == "gpu"
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes "
            f"{memory.size(spec.nbytes)} of host memory: must fit in the {memory.size(there)} that "
            + (f"are free and {LIMIT_VARIABLE} allows" if limited else "are free")
        )


def require_possible(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if these sizes cannot be offloaded here.

    The tail must hold what hooks of the policy look back at.
    """
    assert policy.offload is not None
    require_offloadable("policy", policy, policy.offload)
    for layer in range(spec.num_layers):
        if policy.stats(layer) not in (None, "listed_logits"):
            raise ValueError(
                f"policy={policy}: must ask for no statistics but listed_logits where K and V lie "
                f"in host memory, and asks for {policy.stats(layer)}"
            )
    host_pool.host_sharding()
    if jax.default_backend() == "gpu" and (reason := no_triton()):
        raise ValueError(f"policy={policy}: reading host memory {reason}")
    if spec.pool_pages is not None:
        raise ValueError(
            f"pool_pages={spec.pool_pages}: must be None where K and V lie in host memory"
        )
    least = max(policy.reads or 0, spec.page_size)
    if policy.offload.tail < least:
        raise ValueError(
            f"tail={policy.offload.tail}: must be at least {least}, the newest tokens that "
            f"{policy} and pages of {spec.page_size} tokens need on the device"
        )
    require_host_fit(spec)


def begin(spec: CacheSpec, policy: Policy, chunk: int) -> tuple[KVCache, State, HostMemory]:
    """Returns an empty cache with its K and V in host memory, and the policy's first state.

    Raises:
        ValueError: they do not fit in host memory, or the policy or the device cannot do it.
    """
    require_possible(policy, spec)
    host = HostMemory(host_pool.empty_pages(spec))
    return *_empty(spec, policy, chunk), host


def move(cache: KVCache, policy: Policy, spec: CacheSpec, chunk: int) -> tuple[KVCache, HostMemory]:
    """Returns a cache on the device, which the caller gives up, with K and V in host memory."""
    require_possible(policy, spec)
    host = HostMemory(host_pool.moved(cache))
    return host.refill(tailed(cache, policy, spec, chunk)), host


def committed[T](arrays: T) -> T:
    """Returns arrays bound to the default device, as all are that come from a program with them.

    Pages in host memory are bound to theirs, and so are results of programs that borrow them: what
    is not bound before the first of these would make the second another program.
    """
    return jax.device_put(arrays, jax.local_devices()[0])


@partial(jax.jit, static_argnames=("spec", "policy", "chunk"))
def _empty(spec: CacheSpec, policy: Policy, chunk: int) -> tuple[KVCache, State]:
    state = policy.init(spec)  # it refuses sizes that do not fit the policy
    return tailed(kv_cache.init(spec), policy, spec, chunk), state


@partial(jax.jit, static_argnames=("policy", "spec", "chunk"))
def tailed(cache: KVCache, policy: Policy, spec: CacheSpec, chunk: int) -> KVCache:
    """Returns a cache with empty tails in the place of K and V; resident heads keep theirs."""
    assert policy.offload is not None
    size = ring_pages(spec, policy.offload, chunk)
    layers = (
        host_pool.in_tail(held, size, policy.dense_heads(layer, spec.num_kv_heads))
        for layer, held in enumerate(cache.layers)
    )
    return cache._replace(layers=tuple(layers))


@partial(jax.jit, donate_argnames=("cache",))
def _refilled(cache: KVCache, pages: tuple[HostPages, ...]) -> KVCache:
    cache = lend(cache, Lent(host=pages))
    cache = cache._replace(layers=tuple(map(host_pool.refilled, cache.layers)))
    return lend(cache, kv_cache.NOTHING)
