"""Cases of `window_attention`."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jsparse.cache import LayerCache
from tests.kernels.cases.named import Named, in_int8, put

Inputs = namedtuple("Inputs", "queries positions layer competing")


@dataclass(frozen=True)
class Case(Named):
    """A call of `window_attention`.

    Attributes:
        window: W.
        lengths: slots per head: "full", "ragged", or "short", fewer than queries.
        table: the block table, "identity" or "scrambled".
        bias: whether slots have one.
        int8: whether K is in 8 bits, with a reach.
        first: the number of slots at the front that do not compete.
        newest: the number of newest slots that do not compete; None: W.
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    window: int = 8
    page_size: int = 16
    num_pages: int = 9
    lengths: Literal["full", "ragged", "short"] = "ragged"
    table: Literal["identity", "scrambled"] = "identity"
    bias: bool = False
    first: int = 5
    newest: int | None = None
    int8: bool = False
    dtype: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads, slots = (self.batch, self.kv_heads), self.num_pages * self.page_size
        pages = self.batch * self.kv_heads * self.num_pages
        held = {
            "full": np.full(heads, slots),
            "ragged": rng.integers(self.window, slots + 1, heads),
            "short": rng.integers(0, self.window, heads),
        }[self.lengths]
        if self.lengths == "ragged":
            held.flat[0] = 0
        k = rng.normal(size=(pages, self.page_size, self.head_dim))
        table = rng.permutation(pages).reshape(*heads, self.num_pages)
        bias = rng.normal(size=k.shape[:2]) * 2
        reach = np.exp(rng.normal(size=(self.kv_heads, self.head_dim)) / 2) if self.int8 else None
        keys = in_int8(k, self.dtype, reach) if self.int8 else put(k, self.dtype)
        queries = 2 * rng.normal(
            size=(self.batch, self.window, self.kv_heads * self.group, self.head_dim)
        )
        at, newest = np.arange(slots), self.window if self.newest is None else self.newest
        return Inputs(
            put(queries, self.dtype),
            put(held.max(1) + (self.lengths != "short"), np.int32),
            LayerCache(
                keys,
                put(np.zeros(k.shape), self.dtype),
                put(held, np.int32),
                block_table=put(table, np.int32) if self.table == "scrambled" else None,
                bias=put(bias, np.float32) if self.bias else None,
            ),
            put((at >= self.first) & (at < held[..., None] - newest)),
        )


CASES = (
    Case("ragged"),
    Case("full", lengths="full"),
    Case("short", lengths="short"),
    Case("inside", newest=2),
    Case("scrambled", table="scrambled", bias=True),
    Case("bias", bias=True, dtype="bfloat16"),
    Case("one_head", kv_heads=1, group=1, window=1, first=0),
    Case("group_of_16", group=16, window=32, num_pages=20, dtype="bfloat16"),
    Case("group_of_7", group=7, window=20, page_size=24, num_pages=30, head_dim=40),
    Case("llama", kv_heads=8, group=4, head_dim=128, window=32, num_pages=40, dtype="bfloat16"),
    Case("head_dim_96", head_dim=96, dtype="float16"),
    Case("int8", int8=True, table="scrambled", group=7, num_pages=12),
)
