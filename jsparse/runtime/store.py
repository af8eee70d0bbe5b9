"""KVStore, the interface to a session's K and V, and its implementation on the device.

A session gets its cache from its store and notifies the store after each program. It does not
depend on where K and V are.
"""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache
from jsparse.hooks import State
from jsparse.host_memory.pages import HostLayers
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime.host_store import OnHost
from jsparse.runtime.spread_programs import by_rank
from jsparse.shapes import Rows


@runtime_checkable
class KVStore(Protocol):
    """The K and V of one cache.

    Attributes:
        pages: each layer's pages in host memory, for programs to read; None if there are none.
        single_steps: whether a program must run one decode step, because XLA cannot pass an array
            in host memory into a loop of steps.
        every: the number of decode steps between calls of `after_steps`; 0: never.
    """

    pages: HostLayers | None
    single_steps: bool
    every: int

    def require(self) -> None:
        """Raises ValueError if the policy or the device does not support this store."""
        ...

    def require_fit(self) -> None:
        """Raises ValueError if they do not fit in host memory; nothing is allocated."""
        ...

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of K and V on the device, for prefill chunks of `chunk` tokens."""
        ...

    def host_bytes(self) -> int:
        """Returns the bytes of K and V in host memory."""
        ...

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns an empty cache and the policy's initial state.

        Raises:
            ValueError: the store cannot hold K and V.
        """
        ...

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Takes over a cache whose K and V are on the device; the caller must not use it again.

        `pages` are its K and V in host memory, if they have been copied there. From now on they are
        written in place, and the cache is not touched.
        """
        ...

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Records that each row has prefilled `valid[b]` ≤ `size` further tokens."""
        ...

    def after_steps(self, cache: KVCache) -> None:
        """Records that `every` steps have been decoded since the prompt, or since the last call."""
        ...

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache, which is donated, after its rows have been truncated."""
        ...

    def committed[T](self, arrays: T) -> T:
        """Returns arrays placed like a program's results, so that no program is traced again."""
        ...


def store_of(policy: Policy, spec: CacheSpec, mesh: Mesh | None = None) -> KVStore:
    """Returns the store that a policy needs, on these devices if the model is spread."""
    return OnHost(policy, spec, mesh) if on_host(policy) else OnDevice(policy, spec, mesh)


def on_host(policy: AnyPolicy) -> bool:
    """Returns whether a policy keeps K and V in host memory."""
    return isinstance(policy, Policy) and policy.offload is not None


class OnDevice:
    """K and V on the device; each program passes them to the next."""

    pages: HostLayers | None = None
    single_steps = False
    every = 0

    def __init__(self, policy: Policy, spec: CacheSpec, mesh: Mesh | None = None) -> None:
        """Sets up a store; nothing is allocated."""
        self._policy, self._spec, self._mesh = policy, spec, mesh

    def require(self) -> None:
        """Does nothing: every policy supports K and V on the device."""

    def require_fit(self) -> None:
        """Does nothing."""

    def device_bytes(self, chunk: int) -> int:
        """Returns the bytes of the cache."""
        return self._spec.nbytes

    def host_bytes(self) -> int:
        """Returns 0."""
        return 0

    def begin(self, chunk: int) -> tuple[KVCache, State]:
        """Returns an empty cache and the policy's initial state."""
        return empty_rows_on(self._mesh)(self._spec, self._policy)

    def adopt(self, cache: KVCache, chunk: int, pages: HostLayers | None = None) -> KVCache:
        """Returns the cache unchanged."""
        assert pages is None
        return cache

    def after_chunk(self, cache: KVCache, valid: Rows, size: int) -> None:
        """Does nothing."""

    def after_steps(self, cache: KVCache) -> None:
        """Does nothing."""

    def after_cut(self, cache: KVCache) -> KVCache:
        """Returns the cache unchanged."""
        return cache

    def committed[T](self, arrays: T) -> T:
        """Returns the arrays unchanged."""
        return arrays


@partial(jax.jit, static_argnames=("spec", "policy"))
def empty_rows(spec: CacheSpec, policy: Policy) -> tuple[KVCache, State]:
    """Returns an empty cache on the device, and the policy's initial state."""
    return kv_cache.init(spec, fields=policy.fields), policy.init(spec)


def empty_rows_on(mesh: Mesh | None) -> Any:
    """Returns `empty_rows` for a model that is spread over these devices."""
    return by_rank(empty_rows, mesh, static=("spec", "policy"))
