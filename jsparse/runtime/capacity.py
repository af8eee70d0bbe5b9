"""Cache capacities: which one to ask for, and whether it fits in memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jsparse import memory
from jsparse.cache import CacheSpec
from jsparse.policy import Policy


def bucket(tokens: int, page_size: int) -> int:
    """A capacity of at least `tokens`, in steps of an eighth of its power of two, so that few sizes
    are compiled.
    """
    step = max(64, page_size, 2 ** (tokens.bit_length() - 1) // 8)
    return -(-tokens // step) * step


def policy_bytes(spec: CacheSpec, policy: Policy) -> int:
    """Bytes that a policy keeps beside K and V: its state and the cache's optional fields. Nothing
    is allocated.
    """
    state = sum(
        _nbytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(lambda: policy.init(spec)))
    )
    return state + len(policy.needs) * 4 * spec.num_slots


def require_fit(spec: CacheSpec, policy: Policy) -> None:
    """Raises ValueError before anything is allocated where the cache and the policy's state do not
    fit in memory.
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
    """Turns the device's running out of memory into a ValueError with both numbers: activations
    come on top.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"max_length={spec.capacity} for {spec.batch} prompt(s) takes "
            f"{memory.size(spec.nbytes)} of cache and activations "
            "besides: must fit in the device's memory, of which "
            f"{memory.size(memory.available_bytes())} are free now"
        ) from error


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
