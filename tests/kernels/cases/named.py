"""Named cases of an op's inputs, each built from a seed: the base of all ops' cases.

Tests, benchmarks and compute-sanitizer use the same cases.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import Int8Pages


@dataclass(frozen=True)
class Named(ABC):
    """The shapes and contents of one call, with the letters of jsparse.shapes."""

    name: str

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> Any:
        """Returns the op's inputs; equal seeds give equal ones."""
        return self.inputs(np.random.default_rng(seed))

    @abstractmethod
    def inputs(self, rng: np.random.Generator) -> Any:
        """Draws the op's inputs."""


def put(x: Any, dtype: Any = None) -> Any:
    """Returns a numpy array on the device, without compiling a program; None stays None."""
    return None if x is None else jax.device_put(np.asarray(x, dtype))


def in_int8(
    x: np.ndarray, dtype: str, reach: np.ndarray | None = None, junk: np.ndarray | None = None
) -> Int8Pages:
    """Returns random numbers [pages, P, H] in 8 bits, of different sizes by token.

    Tokens that are `junk` are huge, though finite.
    """
    values = np.clip(np.rint(40 * x), -127, 127)
    scales = (1 + np.arange(values[..., 0].size) % 5).reshape(x.shape[:2]) / 100
    scales = scales if junk is None else np.where(junk, 1e25, scales)
    return Int8Pages(
        put(values, np.int8), put(scales, jnp.bfloat16), put(reach, np.float32), jnp.dtype(dtype)
    )


def as_type(pool: Any, dtype: Any, largest: float) -> Any:
    """Returns a pool in another type, with JUNK cut off; in 8 bits, one that is read in it."""
    if isinstance(pool, Int8Pages):
        return replace(pool, of_type=jnp.dtype(dtype))
    return jnp.clip(pool, -largest, largest).astype(dtype)


def ragged(
    rng: np.random.Generator, shape: tuple[int, ...], most: int, *edges: int, least: int = 1
) -> np.ndarray:
    """Draws lengths up to `most`; all but one may be edges: `most`, 0, 1 and the given ones."""
    lengths = rng.integers(least, most + 1, shape)
    edges = (most, 0, 1, *edges)[: lengths.size - 1]
    lengths.flat[: len(edges)] = edges
    return lengths


def packed(
    lists: Iterable[np.ndarray], shape: tuple[int, ...], capacity: int, *, past: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 ids [*shape, capacity], `past` after each list's end, and counts [*shape]."""
    ids, count = np.full((*shape, capacity), past, np.int32), np.zeros(shape, np.int32)
    for head, listed in zip(np.ndindex(*shape), lists, strict=True):
        ids[head][: listed.size], count[head] = listed, listed.size
    return ids, count
