"""How much memory there is, and the cache capacities that are asked of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import psutil

from jsparse.cache import CacheSpec
from jsparse.policy import Policy


def available_bytes() -> int:
    """Bytes that can still be allocated on the default device (or of the host's memory, on a CPU)."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available


def bucket(tokens: int, page_size: int) -> int:
    """A capacity of at least `tokens`, in steps of an eighth of its power of two, so that few sizes are compiled."""
    step = max(64, page_size, 2 ** (tokens.bit_length() - 1) // 8)
    return -(-tokens // step) * step


def policy_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Bytes that a policy keeps beside K and V: its state and the cache's optional fields. Nothing is allocated."""
    state = sum(_nbytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(lambda: policy.init(spec))))
    return state + len(policy.needs) * 4 * spec.num_slots


def require_fit(spec: CacheSpec, policy: Policy) -> None:
    """Raises ValueError before anything is allocated where the cache and the policy's state do not fit in memory."""
    wanted, there = spec.nbytes + policy_bytes(spec, policy), available_bytes()
    if wanted > there:
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes {size(wanted)} of cache: "
            f"must fit in the {size(there)} that are free"
        )


@contextmanager
def exhaustion(spec: CacheSpec) -> Iterator[None]:
    """Turns the device's running out of memory into a ValueError with both numbers: activations come on top."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes {size(spec.nbytes)} of cache and activations "
            f"besides: must fit in the device's memory, of which {size(available_bytes())} are free now"
        ) from error


def size(nbytes: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
