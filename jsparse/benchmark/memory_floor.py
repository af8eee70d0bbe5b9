"""Measures the memory's bandwidth, and counts the bytes that a decode step must read."""

import time

import jax
import jax.numpy as jnp

from jsparse.machine import memory
from jsparse.models.checkpoint import Params
from jsparse.models.experts import unread_bytes

BYTES_TO_MOVE = 2**30  # of the array that measures bandwidth
MOVES = 8


def memory_bandwidth() -> float:
    """Returns the device's memory bandwidth in bytes/s, from negating an array in place.

    The array has 1 GiB, or a quarter of the free memory. The fastest of 8 passes counts.
    """
    size = min(BYTES_TO_MOVE, memory.available_bytes() // 4) // 4
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    moved = negate(jnp.ones(size, jnp.float32)).block_until_ready()
    seconds = []
    for _ in range(MOVES):
        began = time.perf_counter()
        moved = negate(moved).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * moved.nbytes / min(seconds)


def read_bytes(params: Params, batch: int) -> int:
    """Returns the bytes of weights that a step of `batch` tokens must read on each device.

    An input embedding that the output does not share is not counted, since a step reads only a row
    of it per token. It counts the experts that random choices need on average.
    """
    read = dict(params.weights["params"])
    if not params.config.tie_word_embeddings:
        del read["embed"]
    ranks = 1 if params.mesh is None else params.mesh.size
    unread = unread_bytes(params.config, params.weights, batch)
    return int(sum(leaf.nbytes for leaf in jax.tree.leaves(read)) - unread) // ranks
