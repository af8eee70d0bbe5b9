"""Attention cases of bench.kernels, in NumPy alone, so that contenders share them.

Unless a case differs, they have the attention of Llama 3.1 8B: 32 query heads, 8 KV heads of 128
channels, bf16, pages of 16 tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

KV_HEADS, HEAD_DIM = 8, 128
ROTATED_BYTES = 256_000_000  # read by consecutive calls: several times an H200's L2 of 60 MB
BATCHES, CONTEXTS = (1, 4, 8, 16), (8192, 16384, 32768, 65536, 131072)
FRACTIONS = (0.5, 0.25, 0.1, 0.05, 0.02)
HYBRID_BATCHES, HYBRID_CONTEXTS = (1, 2, 4, 8), (16384, 32768, 65536, 131072)
SPARSE_HEADS = (4, 6, 7, 8)


@dataclass(frozen=True)
class AttentionCase:
    """One case of attention; letters are those of jsparse.shapes.

    Attributes:
        context: the number of tokens of every head.
        tokens: the number of them that a head lists, chosen at random, always including the newest.
        min_tokens: if heads differ, their counts spread log-uniformly from this number to `tokens`.
        dense: the heads that attend to all tokens instead; an int is their number per row.
        page: P.
        lists: the unit of an id.
        heads: N.
        capacity: C, in ids; None: the length of the longest list.
        flags: whether heads have dense flags, even if none is dense.
        int8: whether K and V are in 8 bits, with a scale of 16 bits per token.
        small: whether the reference is also timed.
    """

    name: str
    batch: int
    context: int
    tokens: int = 0
    min_tokens: int | None = None
    dense: Literal["none", "all", "alternate", "one"] | int = "none"
    page: int = 16
    lists: Literal["page", "token"] = "page"
    bits: bool = False
    bias: bool = False
    stats: Literal["page_mass", "token_logits"] | None = None
    heads: int = 32
    capacity: int | None = None
    flags: bool = False
    int8: bool = False
    small: bool = False

    @property
    def pairs(self) -> int:
        """B·K."""
        return self.batch * KV_HEADS

    @property
    def num_pages(self) -> int:
        """M."""
        return self.context // self.page

    @property
    def unit(self) -> int:
        """The number of tokens per id."""
        return self.page if self.lists == "page" else 1

    @property
    def slot_bytes(self) -> int:
        """The bytes of K and V of a token."""
        return 2 * (HEAD_DIM + 2 if self.int8 else HEAD_DIM * 2)

    @property
    def pool_bytes(self) -> int:
        """The bytes of K and V."""
        return self.pairs * self.context * self.slot_bytes

    def dense_heads(self, seed: int = 0) -> np.ndarray:
        """Returns the dense pairs as a mask.

        A single dense pair changes with the seed, so that it does not stay in the cache.
        """
        if isinstance(self.dense, int):
            return np.arange(self.pairs) % KV_HEADS < self.dense
        nth = (np.arange(self.pairs) + seed) % self.pairs
        return {"none": nth < 0, "all": nth >= 0, "alternate": nth % 2 == 1, "one": nth == 0}[
            self.dense
        ]

    def counts(self, seed: int = 0) -> np.ndarray:
        """Returns the number of ids per pair, 0 for a dense one."""
        tokens = np.full(self.pairs, self.tokens)
        if self.min_tokens is not None:
            tokens = np.exp(
                np.random.default_rng(0).uniform(
                    np.log(self.min_tokens), np.log(self.tokens), self.pairs
                )
            )
        counts = np.maximum(tokens // self.unit, 1 if self.tokens else 0).astype(np.int32)
        return np.where(self.dense_heads(seed), 0, counts)

    def ids(self, seed: int) -> np.ndarray:
        """Returns int32[pairs, C], random ids in ascending order, zeros past the count.

        The last id is that of the newest token.
        """
        rng, counts, units = (
            np.random.default_rng(seed),
            self.counts(seed),
            self.context // self.unit,
        )
        ids = np.zeros(
            (self.pairs, int(counts.max()) if self.capacity is None else self.capacity), np.int32
        )
        for row, count in zip(ids, counts, strict=True):
            if count:
                row[: count - 1] = np.sort(rng.choice(units - 1, count - 1, replace=False))
                row[count - 1] = units - 1
        return ids

    @property
    def bytes(self) -> int:
        """The bytes that a call must read: K and V of whole pages, ids and bits."""
        counts = self.counts()
        slots = int(np.where(self.dense_heads(), self.context, counts * self.unit).sum())
        return slots * self.slot_bytes + int(counts.sum()) * (8 if self.bits else 4)

    @property
    def calls(self) -> int:
        """The calls per program, enough that their data does not stay in a cache."""
        return min(max(-(-ROTATED_BYTES // self.bytes), 4), 32)


def shrunk(case: AttentionCase) -> AttentionCase:
    """Returns the case in a size for a CPU."""
    shrink = max(case.context // 256, 1)
    capacity = None if case.capacity is None else max(case.capacity // shrink, 1)
    return replace(
        case,
        batch=min(case.batch, 2),
        context=256,
        tokens=max(case.tokens // shrink, min(case.tokens, 1)),
        min_tokens=case.min_tokens and 1,
        capacity=capacity,
    )


_TENTH = 131072 // 10
CASES = (
    AttentionCase("dense 128K b1", 1, 131072, dense="all"),
    AttentionCase("dense 128K b8", 8, 131072, dense="all"),
    AttentionCase("10% of 128K b1", 1, 131072, _TENTH, small=True),
    AttentionCase("10% of 128K b8", 8, 131072, _TENTH),
    AttentionCase("10% of 128K b1 P32", 1, 131072, _TENTH, page=32),
    AttentionCase("10% of 128K b8 P32", 8, 131072, _TENTH, page=32),
    AttentionCase("10% of 128K b1 P64", 1, 131072, _TENTH, page=64),
    AttentionCase("10% of 128K b8 P64", 8, 131072, _TENTH, page=64),
    AttentionCase("10% b8, token bits", 8, 131072, _TENTH, bits=True),
    AttentionCase("10% b8, page_mass", 8, 131072, _TENTH, stats="page_mass"),
    AttentionCase("10% b8, token_logits", 8, 131072, _TENTH, stats="token_logits"),
    AttentionCase("10% b8, bias", 8, 131072, _TENTH, bias=True),
    AttentionCase("4096 of 128K b1", 1, 131072, 4096, small=True),
    AttentionCase("4096 of 128K b8", 8, 131072, 4096),
    AttentionCase("hybrid: half dense b8", 8, 131072, _TENTH, dense="alternate"),
    AttentionCase("64..16K of 32K b32", 32, 32768, 16384, min_tokens=64),
    AttentionCase("1 dense 128K, 255 x 64", 32, 131072, 64, dense="one"),
    AttentionCase("2% rows of 30K b64", 64, 30000, 600, lists="token"),
    AttentionCase("1168 rows of 128K b1", 1, 131072, 1168, lists="token"),
    AttentionCase("2621 rows of 128K b1", 1, 131072, 2621, lists="token"),
    AttentionCase("5242 rows of 128K b1", 1, 131072, 5242, lists="token"),
)
# not timed with other libraries, which do not have this format
INT8_CASES = tuple(
    replace(case, name=f"{case.name}, int8", int8=True, small=False)
    for case in CASES
    if case.name.partition(" b")[0] in ("dense 128K", "10% of 128K", "4096 of 128K")
    and case.page == 16
)


def grid(limit: int) -> list[AttentionCase]:
    """Returns dense and each fraction, for shapes with K and V of at most `limit` bytes."""
    shapes = [(32, batch, context) for batch in BATCHES for context in CONTEXTS]
    shapes += [(64, 8, context) for context in CONTEXTS]
    cases = []
    for heads, batch, context in shapes:
        same = _of_shape(f"{heads} heads b{batch}", heads, batch, context)
        cases += [replace(same, dense="all")] + [
            replace(same, tokens=round(context * f)) for f in FRACTIONS
        ]
    return [case for case in cases if case.pool_bytes <= limit]


def hybrid(limit: int) -> list[AttentionCase]:
    """Returns the cases of LycheeDecode's Figure 5: some of a row's KV heads sparse, or none.

    Cases are ordered by shape, as in the grid. A sparse head lists a tenth of the context, as in
    the figure (whose pages have 64 tokens), or 4096 tokens.
    """
    cases = []
    for batch, context in product(HYBRID_BATCHES, HYBRID_CONTEXTS):
        for name, tokens in (("10%", round(context * 0.1)), ("4096", 4096)):
            same = replace(
                _of_shape(f"{name} listed, batch {batch}", 32, batch, context), tokens=tokens
            )
            cases += [replace(same, dense="all")] + [
                replace(same, dense=KV_HEADS - n) for n in SPARSE_HEADS
            ]
    return [case for case in cases if case.pool_bytes <= limit]


GRIDS: Mapping[str, Callable[[int], list[AttentionCase]]] = {"grid": grid, "hybrid": hybrid}


def _of_shape(name: str, heads: int, batch: int, context: int) -> AttentionCase:
    """Returns the base of a shape's cases, which share one program.

    Lists have room for half the pages, and every head has a dense flag.
    """
    return AttentionCase(
        name, batch, context, heads=heads, capacity=context // AttentionCase.page // 2, flags=True
    )


def dense_shapes(cases: Sequence[AttentionCase]) -> list[tuple[int, int, int]]:
    """Returns each (heads, batch, context) once."""
    return list(dict.fromkeys((case.heads, case.batch, case.context) for case in cases))
