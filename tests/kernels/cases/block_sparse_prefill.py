"""Cases of `block_sparse_prefill`."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np

from jsparse.cache import LayerCache
from tests.kernels.cases.named import Named, put

Inputs = namedtuple("Inputs", "q kv valid chosen")
BLOCK = 128


@dataclass(frozen=True)
class Case(Named):
    """A call of `block_sparse_prefill`; unused slots hold 1e30.

    Attributes:
        lengths: each row's tokens, the chunk included.
        valid: those of the chunk.
        tokens: T, to which chunks are padded.
        pages: M, the pages per head.
        density: the share of blocks that are chosen; 1: all.
        scrambled: whether a block table permutes the pages.
    """

    lengths: tuple[int, ...] = (333, 129, 40, 7)
    valid: tuple[int, ...] = (172, 129, 0, 7)
    tokens: int = 180
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    page_size: int = 16
    pages: int = 22
    density: float = 0.5
    scrambled: bool = True
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        """Draws queries, K and V in pages, and chosen blocks."""
        batch, heads = len(self.lengths), self.kv_heads * self.group
        slots = self.pages * self.page_size
        lengths = np.array(self.lengths)
        used = np.arange(slots) < lengths[:, None, None]
        by_head = (batch, self.kv_heads, slots, self.head_dim)
        k, v = (np.where(used[..., None], rng.normal(size=by_head), 1e30) for _ in range(2))
        number = batch * self.kv_heads * self.pages
        table = rng.permutation(number) if self.scrambled else np.arange(number)
        pools = []
        for values in (k, v):
            pool = np.empty((number, self.page_size, self.head_dim))
            pool[table] = values.reshape(pool.shape)
            pools.append(put(pool, self.dtype))
        kv = LayerCache(
            *pools,
            put(np.repeat(lengths[:, None], self.kv_heads, 1), np.int32),
            put(table.reshape(batch, self.kv_heads, -1), np.int32) if self.scrambled else None,
        )
        blocks = -(-self.tokens // BLOCK), -(-slots // BLOCK)
        chosen = rng.random((batch, heads, *blocks)) < self.density
        q = 2 * rng.normal(size=(batch, self.tokens, heads, self.head_dim))
        return Inputs(put(q, self.dtype), kv, put(self.valid, np.int32), put(chosen))


CASES = (
    Case("ragged"),
    Case("everything", density=1.0, scrambled=False),
    Case("nothing", lengths=(90,), valid=(70,), tokens=70, density=0.0, pages=6),
    Case(
        "long",
        lengths=(1500, 1300),
        valid=(256, 130),
        tokens=256,
        group=1,
        page_size=64,
        pages=24,
        density=0.3,
        dtype="bfloat16",
    ),
)
