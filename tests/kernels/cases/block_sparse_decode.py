"""Cases of `block_sparse_decode`, and of other ops that read a layer through a selection.

Slots that no head attends to hold `JUNK`, so that reading too much is detected. It is finite, as
cache contents always are: a weight of 0 times NaN would be NaN.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import SPAN, KeyFrame, angles_at
from jsparse.selection import Granularity, Selection
from tests.kernels.cases.named import Named, in_int8, packed, put, ragged

JUNK = 1e30
Inputs = namedtuple("Inputs", "q layer selection")


@dataclass(frozen=True)
class Case(Named):
    """A call of a decode op.

    Attributes:
        lengths: tokens per head: "full", all M·P; "ragged", any number, including a full head, an
            empty one and one of a single token; "one", a single token everywhere.
        listed: ids per head: "some" of those it holds; "none"; "all" ids, also past its length;
            "first", which leaves the newest token to the rule; "newest" only.
        capacity: C; None: the number of ids that a head can list.
        bits: whether pages carry token bits; some carry none.
        dense: heads that attend to everything.
        table: the block table; with "shared", heads have pages in common.
        spread: standard deviation of the logits. From 100 on all numbers are whole, so that logits
            are exact.
        int8: whether K and V are in 8 bits, and K has a reach.
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 6
    lengths: Literal["full", "ragged", "one"] = "ragged"
    listed: Literal["some", "none", "all", "first", "newest"] = "some"
    capacity: int | None = None
    granularity: Granularity = "page"
    bits: bool = False
    dense: Literal["none", "mixed", "all"] = "none"
    table: Literal["identity", "scrambled", "shared"] = "identity"
    bias: bool = False
    sm_scale: float | None = None
    spread: float = 1.0
    dtype: str = "float32"
    int8: bool = False

    @property
    def slots(self) -> int:
        """S, the number of slots per head."""
        return self.num_pages * self.page_size

    @property
    def unit(self) -> int:
        """The number of slots per id."""
        return self.page_size if self.granularity == "page" else 1

    def inputs(self, rng: np.random.Generator) -> Inputs:
        lengths = _lengths(self, rng)
        table, pool_pages = _table(self, rng)
        selection = _selection(self, rng, lengths)
        unread = _unread(self, lengths, table, pool_pages, selection)
        whole = np.rint if self.spread >= 100 else np.asarray
        shape = (pool_pages, self.page_size, self.head_dim)
        k, v = whole(rng.normal(size=shape) * self.spread), rng.normal(size=shape)
        if self.int8:
            half = np.exp(rng.normal(size=(self.kv_heads, self.head_dim // 2)))
            k = in_int8(k, self.dtype, np.tile(half, 2), junk=unread)
            v = in_int8(v, self.dtype, junk=unread)
        else:
            k[unread], v[unread] = JUNK, -JUNK
        bias = rng.normal(size=shape[:2]) if self.bias else None
        q = whole(rng.normal(size=(self.batch, self.kv_heads * self.group, self.head_dim)))
        if not self.int8:
            with np.errstate(over="ignore"):  # JUNK is infinite in float16
                k, v = put(k, self.dtype), put(v, self.dtype)
        table = None if self.table == "identity" else put(table)
        layer = LayerCache(k, v, put(lengths), block_table=table, bias=put(bias, np.float32))
        return Inputs(put(q, self.dtype), layer, selection)


def frame_around(case: Case, rng: np.random.Generator, mid: np.ndarray, theta: float) -> KeyFrame:
    """A frame of these means [K, H], for RoPE of this base."""
    half = case.head_dim // 2
    frequencies = put(theta ** -(np.arange(half) / half), np.float32)
    first = np.arange(0, case.slots, SPAN, dtype=np.int32)
    key_scale = np.exp(rng.normal(size=(case.kv_heads, half)))
    return KeyFrame(
        put(mid, np.float32), put(key_scale, np.float32), jax.jit(angles_at)(first, frequencies)
    )


def _lengths(case: Case, rng: np.random.Generator) -> np.ndarray:
    heads = (case.batch, case.kv_heads)
    if case.lengths == "ragged":
        return ragged(rng, heads, case.slots).astype(np.int32)
    return np.full(heads, 1 if case.lengths == "one" else case.slots, np.int32)


def _table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Returns the physical page of each logical one, and the size of the pool in pages."""
    shape = (case.batch, case.kv_heads, case.num_pages)
    size = int(np.prod(shape))
    if case.table == "identity":
        return np.arange(size, dtype=np.int32).reshape(shape), size
    if case.table == "scrambled":
        return rng.permutation(size + 3)[:size].astype(np.int32).reshape(shape), size + 3
    return rng.integers(0, size // 2, shape).astype(np.int32), size // 2


def _selection(case: Case, rng: np.random.Generator, lengths: np.ndarray) -> Selection:
    units = case.slots // case.unit
    capacity = units if case.capacity is None else case.capacity
    pick: dict[str, Callable[[int], np.ndarray]] = {
        "some": lambda used: rng.choice(
            used, min(used, int(rng.integers(1, capacity + 1))), replace=False
        ),
        "none": lambda used: np.arange(0),
        "all": lambda used: np.arange(units),
        "first": lambda used: np.arange(min(used, 1)),
        "newest": lambda used: np.arange(used)[-1:],
    }
    lists = (np.sort(pick[case.listed](-(-int(held) // case.unit))) for held in lengths.flat)
    ids, count = packed(lists, lengths.shape, capacity)
    bits = None
    if case.bits:
        bits = rng.integers(0, 2**case.page_size, ids.shape).astype(np.uint32)
        bits[rng.random(ids.shape) < 0.1] = 0
    dense = {
        "none": None,
        "all": np.ones(lengths.shape, bool),
        "mixed": np.arange(lengths.size).reshape(lengths.shape) % 2 == 0,
    }[case.dense]
    return Selection(
        put(ids), put(count), bits=put(bits), dense=put(dense), granularity=case.granularity
    )


def _unread(
    case: Case, lengths: np.ndarray, table: np.ndarray, pool_pages: int, selection: Selection
) -> np.ndarray:
    """Marks the slots of the pool that no head attends to."""
    unread = np.ones((pool_pages, case.page_size), bool)
    ids, count = np.asarray(selection.ids), np.asarray(selection.count)
    for head in np.ndindex(*lengths.shape):
        dense = selection.dense is not None and bool(selection.dense[head])
        listed = np.arange(case.slots // case.unit) if dense else ids[head][: count[head]]
        mask = np.zeros((case.slots // case.unit, case.unit), bool)
        mask[listed] = True
        if selection.bits is not None and not dense:
            words = np.asarray(selection.bits)[head][: count[head], None]
            mask[listed] = (words >> np.arange(case.page_size, dtype=np.uint32)) & 1 == 1
        mask = mask.reshape(-1) & (np.arange(case.slots) < lengths[head])
        if listed.size and lengths[head]:
            mask[lengths[head] - 1] = True
        at = np.flatnonzero(mask)
        unread[table[head][at // case.page_size], at % case.page_size] = False
    return unread


CASES = (
    Case("pages"),
    Case("one_row_one_head", batch=1, kv_heads=1, group=1, lengths="full"),
    Case("few_listed", capacity=2, num_pages=9),
    Case("all_listed", listed="all"),
    Case("nothing_listed", listed="none"),
    Case("empty_list", listed="none", capacity=0),
    Case("newest_only", listed="newest"),
    Case("newest_unlisted", listed="first", lengths="full"),
    Case("one_token", lengths="one"),
    Case("head_dim_96", head_dim=96, group=3, page_size=8),
    Case("head_dim_256", head_dim=256, group=16, page_size=64, num_pages=2),
    Case("group_of_7", group=7, kv_heads=4, batch=3),
    Case("bits_16", bits=True, bias=True, table="scrambled"),
    Case("bits_32", bits=True, page_size=32, listed="all", num_pages=3),
    Case("bits_newest_unlisted", bits=True, listed="first", lengths="full"),
    Case("dense_and_sparse", dense="mixed"),
    Case("dense_and_bits", dense="mixed", bits=True, table="scrambled"),
    Case("dense_and_nothing", dense="mixed", listed="none", capacity=0),
    Case("all_dense", dense="all", listed="none", capacity=0, bias=True),
    Case("scrambled", table="scrambled"),
    Case("shared_pages", table="shared", batch=3),
    Case("bias", bias=True),
    Case("sm_scale", sm_scale=0.3),
    Case("huge_logits", spread=1e4),
    Case("bfloat16", dtype="bfloat16", table="scrambled", bits=True),
)
INT8_CASES = (
    Case("int8", int8=True, table="scrambled", bias=True),
    Case("int8_bits", int8=True, bits=True, head_dim=96, group=3, page_size=8),
    Case(
        "int8_dense",
        int8=True,
        dense="mixed",
        dtype="bfloat16",
        head_dim=128,
        num_pages=24,
    ),
)
