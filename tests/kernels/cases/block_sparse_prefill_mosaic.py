"""Cases of the Mosaic GPU kernel of `block_sparse_prefill`.

Slots past the tokens of a row hold `JUNK`.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jsparse.cache import LayerCache
from tests.kernels.cases.block_sparse_decode import JUNK
from tests.kernels.cases.named import Named, put

Inputs = namedtuple("Inputs", "q kv valid chosen")
BLOCK = 128


@dataclass(frozen=True)
class Case(Named):
    """A call of `block_sparse_prefill`.

    Attributes:
        tokens: T.
        rows: the tokens of each row before the chunk, and its tokens in the chunk.
        density: the share of blocks that are chosen at random, past and future ones alike.
        diagonal: whether each query block's own blocks are chosen also.
        table: the block table; with "short", pages past a row's tokens are outside of the pool.
    """

    rows: tuple[tuple[int, int], ...] = ((128, 128),)
    tokens: int = 128
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 20
    density: float = 0.5
    diagonal: bool = True
    table: Literal["identity", "scrambled", "short"] = "scrambled"
    dtype: str = "bfloat16"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        batch, heads = len(self.rows), self.kv_heads * self.group
        before, valid = np.array(self.rows, np.int32).T
        shape = (batch, self.kv_heads, self.num_pages)
        pages = int(np.prod(shape))
        mapped = self.table != "identity"
        table = (rng.permutation(pages) if mapped else np.arange(pages)).reshape(shape)
        k, v = rng.normal(size=(2, pages, self.page_size, self.head_dim))
        slots = np.arange(self.num_pages * self.page_size).reshape(self.num_pages, -1)
        for own, length in zip(table, before + valid, strict=True):
            for pool, junk in ((k, JUNK), (v, -JUNK)):
                pool[own] = np.where((slots >= length)[..., None], junk, pool[own])
            if self.table == "short":
                own[:, slots[:, 0] >= length] = pages + 7
        shape = (batch, heads, -(-self.tokens // BLOCK), -(-slots.size // BLOCK))
        chosen = rng.random(shape) < self.density
        if self.diagonal:
            for row, _, block in np.ndindex(*shape[:3]):
                first = before[row] + block * BLOCK
                own = [first // BLOCK, (first + BLOCK - 1) // BLOCK]
                chosen[row, :, block, [at for at in own if at < shape[3]]] = True
        lengths = np.broadcast_to((before + valid)[:, None], (batch, self.kv_heads))
        layer = LayerCache(
            put(k, self.dtype),
            put(v, self.dtype),
            put(lengths, np.int32),
            put(table, np.int32) if mapped else None,
        )
        q = 2 * rng.normal(size=(batch, self.tokens, heads, self.head_dim))
        return Inputs(put(q, self.dtype), layer, put(valid), put(chosen))


CASES = (
    Case("aligned", kv_heads=2, head_dim=128, rows=((256, 128),), num_pages=24),
    Case("unaligned", tokens=256, rows=((200, 190), (0, 256), (0, 0)), page_size=64, num_pages=7,
         table="short"),
    Case("identity", tokens=192, rows=((70, 192), (300, 20)), page_size=8, num_pages=42,
         table="identity", density=0.3, diagonal=False),
    Case("sparse", tokens=256, rows=((300, 230),), density=0.1, diagonal=False, num_pages=36),
    Case("nothing", density=0.0, diagonal=False),
    Case("everything", density=1.0, rows=((130, 100),), page_size=128, num_pages=2),
    Case("few", tokens=64, rows=((640, 64),), page_size=32, num_pages=22, group=1),
    Case("pages_of_64", tokens=128, rows=((500, 128),), page_size=64, num_pages=10),
)  # fmt: skip
