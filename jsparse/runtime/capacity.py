"""Chooses cache capacities and checks that they fit in memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jsparse import memory
from jsparse.cache import CacheSpec
from jsparse.policy import Policy


def bucket(tokens: int, page_size: int) -> int:
    """Rounds `tokens` up to a capacity, so that few sizes are compiled.

    Capacities go in steps of an eighth of their power of two.
    """
    step = max(64, page_size, 2 ** (tokens.bit_length() - 1) // 8)
    return -(-tokens // step) * step


def policy_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Returns the bytes that a policy keeps beside K and V, without allocating them.

    They are its state and the cache's optional fields.
    """
    state = sum(
        _nbytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(lambda: policy.init(spec)))
    )
    return state + len(policy.needs) * 4 * spec.num_slots


def require_fit(spec: CacheSpec, policy: Policy) -> None:
    """Raises ValueError if the cache and the policy's state do not fit in memory.

    Nothing is allocated.
    """
    wanted, there = spec.nbytes + policy_bytes(spec, policy), memory.available_bytes()
    if wanted > there:
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes {memory.size(wanted)} of "
            "cache: "
            f"must fit in the {memory.size(there)} that are free"
        )


@contextmanager
def exhaustion(spec: CacheSpec) -> Iterator[None]:
    """Turns an out-of-memory error of the device into a ValueError with both numbers.

    The activations come on top of the cache.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes "
            f"{memory.size(spec.nbytes)} of cache, and activations "
            "on top: must fit in the device's memory, of which "
            f"{memory.size(memory.available_bytes())} are free now"
        ) from error


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
