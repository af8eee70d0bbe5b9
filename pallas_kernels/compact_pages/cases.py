"""Builds the inputs that tests and benchmarks share: named cases, each from a seed.

No two numbers of K and V are equal, so that a row that goes astray shows; slots that no head holds
have numbers too.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import FreeList, LayerCache
from jsparse.selection import Selection


class Inputs(NamedTuple):
    """Holds the op's arguments."""

    layer: LayerCache
    keep: Selection
    rewrite: jnp.ndarray | None


@dataclass(frozen=True)
class Case:
    """Describes the shapes and contents of one call, with the letters of jsparse.shapes.

    Attributes:
        lengths: tokens that heads hold: "full", all M·P; "ragged", any number, an empty head and a
            full one among them.
        kept: tokens that each head keeps: "some", any number of them; "none"; "all"; "first", the
            older half; "last", the newer half; "one", the newest; "but_first", all except the
            oldest, so that every row moves by one.
        capacity: C; None is all M·P.
        rewrite: heads to rewrite: "all", by passing None; "mixed", every other one; "none".
        dense: whether every other head is marked dense.
        table: "identity", or "scrambled" with a free list.
        fields: whether the layer has bias and slot_positions.
    """

    name: str
    batch: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 6
    lengths: Literal["full", "ragged"] = "ragged"
    kept: Literal["some", "none", "all", "first", "last", "one", "but_first"] = "some"
    capacity: int | None = None
    rewrite: Literal["all", "mixed", "none"] = "all"
    dense: bool = False
    table: Literal["identity", "scrambled"] = "identity"
    fields: bool = False
    dtype: str = "float32"

    @property
    def slots(self) -> int:
        """Returns S, the number of slots per head."""
        return self.num_pages * self.page_size

    def build(self, seed: int = 0) -> Inputs:
        """Builds the inputs; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        heads = (self.batch, self.kv_heads)
        lengths = np.full(heads, self.slots, np.int32)
        if self.lengths == "ragged":
            lengths.flat[1:] = rng.integers(0, self.slots + 1, lengths.size - 1)
            lengths.flat[1:2] = 0
        table, free, pool_pages = _pages(self, rng, lengths)
        shape = (pool_pages, self.page_size)
        every_other = np.arange(lengths.size).reshape(heads) % 2 == 0
        layer = LayerCache(
            k=_numbers(rng, (*shape, self.head_dim), self.dtype),
            v=_numbers(rng, (*shape, self.head_dim), self.dtype),
            lengths=jax.device_put(lengths),
            block_table=table,
            free=free,
            bias=_numbers(rng, shape, "float32") if self.fields else None,
            slot_positions=_numbers(rng, shape, "int32") if self.fields else None,
        )
        rewrite = {"all": None, "mixed": every_other, "none": np.zeros(heads, bool)}[self.rewrite]
        ids, count = _keep(self, rng, lengths)
        keep = Selection(
            jax.device_put(ids),
            jax.device_put(count),
            dense=jax.device_put(~every_other) if self.dense else None,
            granularity="token",
        )
        return Inputs(layer, keep, None if rewrite is None else jax.device_put(rewrite))


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jnp.ndarray:
    """Draws numbers, distinct where the type has enough values."""
    if dtype in ("float32", "int32"):
        return jax.device_put(
            np.asarray(rng.permutation(int(np.prod(shape))).reshape(shape), dtype)
        )
    return jax.device_put(np.asarray(rng.normal(size=shape), dtype))


def _pages(
    case: Case, rng: np.random.Generator, lengths: np.ndarray
) -> tuple[jnp.ndarray | None, FreeList | None, int]:
    """Builds the block table, the free list and the pool's size; its last page is scratch."""
    size = lengths.size * case.num_pages
    if case.table == "identity":
        return None, None, size
    order = rng.permutation(size + 3).astype(np.int32)
    table = np.full((*lengths.shape, case.num_pages), size + 3, np.int32)
    used = np.arange(case.num_pages) < -(-lengths // case.page_size)[..., None]
    taken = int(used.sum())
    table[used] = order[:taken]
    free = np.zeros(size + 4, np.int32)
    free[: order.size - taken] = order[taken:]
    return (
        jax.device_put(table),
        FreeList(jax.device_put(free), jax.device_put(np.int32(order.size - taken))),
        size + 4,
    )


def _keep(
    case: Case, rng: np.random.Generator, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    capacity = case.slots if case.capacity is None else case.capacity
    ids, count = np.zeros((*lengths.shape, capacity), np.int32), np.zeros(lengths.shape, np.int32)
    for head in np.ndindex(*lengths.shape):
        held = np.arange(int(lengths[head]))
        half = held.size // 2
        chosen = {
            "some": rng.choice(held, rng.integers(0, held.size + 1), replace=False)
            if held.size
            else held,
            "none": held[:0],
            "all": held,
            "first": held[:half],
            "last": held[half:],
            "one": held[-1:],
            "but_first": held[1:],
        }[case.kept]
        chosen = np.sort(chosen[:capacity])
        ids[head][: chosen.size], count[head] = chosen, chosen.size
    return ids, count


CASES = (
    Case("some"),
    Case("scrambled", table="scrambled", fields=True),
    Case("one_row_one_head", batch=1, kv_heads=1, table="scrambled"),
    Case("few", capacity=5, lengths="full", fields=True),
    Case("none_kept", kept="none", table="scrambled"),
    Case("empty_list", kept="none", capacity=0, table="scrambled", fields=True),
    Case("all_kept", kept="all", table="scrambled", fields=True),
    Case("older_half", kept="first", fields=True),
    Case("newer_half", kept="last", lengths="full", table="scrambled", fields=True),
    Case("newest_only", kept="one", table="scrambled"),
    Case(
        "by_one_row", kept="but_first", lengths="full", num_pages=80, table="scrambled", fields=True
    ),
    Case("every_other_head", rewrite="mixed", table="scrambled", fields=True),
    Case("dense_heads_stay", dense=True, rewrite="mixed", batch=3, kv_heads=3),
    Case("no_head", rewrite="none", table="scrambled"),
    Case("pages_of_8", page_size=8, num_pages=17, head_dim=128, table="scrambled"),
    Case("pages_of_64", page_size=64, num_pages=3, head_dim=256, table="scrambled", fields=True),
    Case("head_dim_80", head_dim=80, table="scrambled"),
    Case("head_dim_96", head_dim=96, dtype="bfloat16", batch=3, table="scrambled", fields=True),
    Case("bfloat16", dtype="bfloat16", head_dim=128, kept="last", table="scrambled", fields=True),
    Case("float16", dtype="float16", head_dim=64),
    Case(
        "many_chunks",
        batch=1,
        kv_heads=3,
        num_pages=130,
        lengths="full",
        table="scrambled",
        fields=True,
    ),
    Case(
        "many_chunks_by_one_page",
        num_pages=100,
        kept="last",
        capacity=700,
        lengths="full",
        dtype="bfloat16",
    ),
)
