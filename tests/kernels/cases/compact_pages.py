"""Cases of `compact_pages`.

All numbers of K and V are distinct, also in slots that no head holds, so that a misplaced row is
detected.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jsparse.cache import FreeList, LayerCache
from jsparse.selection import Selection
from tests.kernels.cases.named import Named, in_int8, packed, put

Inputs = namedtuple("Inputs", "layer keep rewrite")


@dataclass(frozen=True)
class Case(Named):
    """A call of `compact_pages`.

    Attributes:
        lengths: tokens per head: "full", all M·P; "ragged", any number, including an empty head and
            a full one.
        kept: tokens that each head keeps: "some", any number of them; "none"; "all"; "first", the
            older half; "last", the newer half; "one", the newest; "but_first", all but the oldest,
            so that every row moves by one.
        capacity: C; None: all M·P.
        rewrite: heads to rewrite: "all" (None is passed); "mixed", every other one; "none".
        dense: whether every other head is marked dense.
        table: "identity", or "scrambled" with a free list.
        fields: whether the layer has bias and slot_positions.
        int8: whether K and V are in 8 bits.
    """

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
    int8: bool = False
    dtype: str = "float32"

    @property
    def slots(self) -> int:
        """S, the number of slots per head."""
        return self.num_pages * self.page_size

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = (self.batch, self.kv_heads)
        lengths = np.full(heads, self.slots, np.int32)
        if self.lengths == "ragged":
            lengths.flat[1:] = rng.integers(0, self.slots + 1, lengths.size - 1)
            lengths.flat[1:2] = 0
        table, free, pool_pages = _pages(self, rng, lengths)
        shape = (pool_pages, self.page_size)
        every_other = np.arange(lengths.size).reshape(heads) % 2 == 0
        whole = (*shape, self.head_dim)
        pools = (
            [in_int8(rng.normal(size=whole), self.dtype) for _ in range(2)]
            if self.int8
            else [_numbers(rng, whole, self.dtype) for _ in range(2)]
        )
        layer = LayerCache(
            *pools,
            lengths=put(lengths),
            block_table=table,
            free=free,
            bias=_numbers(rng, shape, "float32") if self.fields else None,
            slot_positions=_numbers(rng, shape, "int32") if self.fields else None,
        )
        rewrite = {"all": None, "mixed": every_other, "none": np.zeros(heads, bool)}[self.rewrite]
        ids, count = _keep(self, rng, lengths)
        keep = Selection(
            put(ids),
            put(count),
            dense=put(~every_other) if self.dense else None,
            granularity="token",
        )
        return Inputs(layer, keep, put(rewrite))


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jnp.ndarray:
    """Draws numbers, distinct if the dtype has enough values."""
    if dtype in ("float32", "int32"):
        return put(rng.permutation(int(np.prod(shape))).reshape(shape), dtype)
    return put(rng.normal(size=shape), dtype)


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
    return put(table), FreeList(put(free), put(order.size - taken, np.int32)), size + 4


def _keep(
    case: Case, rng: np.random.Generator, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    capacity = case.slots if case.capacity is None else case.capacity

    def kept(length: int) -> np.ndarray:
        held, half = np.arange(length), length // 2
        some = rng.choice(held, rng.integers(0, length + 1), replace=False) if length else held
        chosen = {
            "some": some,
            "none": held[:0],
            "all": held,
            "first": held[:half],
            "last": held[half:],
            "one": held[-1:],
            "but_first": held[1:],
        }[case.kept]
        return np.sort(chosen[:capacity])

    return packed(map(kept, lengths.flat), lengths.shape, capacity)


CASES = (
    Case("some"),
    Case("scrambled", table="scrambled", fields=True),
    Case("few", capacity=5, lengths="full", fields=True),
    Case("none_kept", kept="none", table="scrambled"),
    Case("empty_list", kept="none", capacity=0, table="scrambled", fields=True),
    Case("all_kept", kept="all", table="scrambled", fields=True),
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
    Case("head_dim_96", head_dim=96, dtype="bfloat16", batch=3, table="scrambled", fields=True),
    Case("int8", int8=True, head_dim=96, table="scrambled", fields=True),
    Case("bfloat16", dtype="bfloat16", head_dim=128, kept="last", table="scrambled", fields=True),
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
