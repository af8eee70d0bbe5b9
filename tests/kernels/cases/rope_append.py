"""Cases of `rope_append`."""

from collections import namedtuple
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jsparse.cache import LayerCache
from jsparse.heads import Heads
from tests.kernels.cases.named import Named, in_int8, put

Inputs = namedtuple("Inputs", "heads layer positions valid")


@dataclass(frozen=True)
class Case(Named):
    """A call of `rope_append`.

    Attributes:
        rows, tokens, heads, kv_heads, head_dim: B, T, N, K and H.
        page_size, pages: P, and M, those of a head.
        paged: whether a block table lists pages in any order.
        normed: whether heads of q and k are normalised.
        beside: whether the cache also keeps biases and positions of slots.
        parts: number of parts of the input; None: it is whole.
        broken: whether heads of K and V contain a NaN and infinities.
        dtype: dtype of the heads; that of the cache is `kept`, which may be "int8".
    """

    rows: int = 3
    tokens: int = 1
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    pages: int = 4
    paged: bool = False
    normed: bool = False
    beside: bool = False
    parts: int | None = None
    broken: bool = False
    dtype: str = "float32"
    kept: str = "float32"

    def inputs(self, rng: np.random.Generator) -> Inputs:
        """Draws the inputs: one row is inactive, and one head's slots are past its last.

        With several tokens, the first row lacks the last one.
        """
        pairs, capacity = self.rows * self.kv_heads, self.pages * self.page_size
        count = self.heads + 2 * self.kv_heads
        parts = () if self.parts is None else (self.parts,)
        qkv = rng.normal(size=(*parts, self.rows, self.tokens, count, self.head_dim))
        if self.broken:
            for head, value in ((self.heads, np.nan), (self.heads + 1, np.inf), (-1, -np.inf)):
                qkv[0, 0, head, head] = value
        positions = rng.integers(0, 5000, (self.rows, 1)) + np.arange(self.tokens)
        frequencies = 1e4 ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions.astype(np.float32)[..., None] * frequencies.astype(np.float32)
        table = put(1.1 * np.cos(angles)), put(1.1 * np.sin(angles))
        scales = 1 + 0.3 * rng.normal(size=(2, self.head_dim))
        q_scale, k_scale = (put(scale, self.dtype) for scale in scales)
        heads = Heads(
            put(qkv, "float32" if parts else self.dtype),
            jnp.dtype(self.dtype),
            self.heads,
            table,
            (q_scale, k_scale) if self.normed else None,
            1e-5,
        )
        spare = 3 if self.paged else 0
        pool = rng.normal(size=(2, pairs * self.pages + spare, self.page_size, self.head_dim))
        if self.kept == "int8":
            reach = np.tile(np.exp(rng.normal(size=(self.kv_heads, self.head_dim // 2))), 2)
            k, v = in_int8(pool[0], self.dtype, reach), in_int8(pool[1], self.dtype)
        else:
            k, v = (put(part, self.kept) for part in pool)
        table = rng.permutation(pool.shape[1])[: pairs * self.pages]
        lengths = rng.integers(self.tokens, capacity + 1, (self.rows, self.kv_heads))
        lengths[0, 0], lengths[-1, 0], lengths[-1, -1] = self.tokens, capacity, capacity + 5
        slots = pool.shape[1:3]
        layer = LayerCache(
            k,
            v,
            put(lengths, np.int32),
            put(table.reshape(*lengths.shape, -1), np.int32) if self.paged else None,
            bias=put(np.ones(slots), np.float32) if self.beside else None,
            slot_positions=put(np.full(slots, -1), np.int32) if self.beside else None,
        )
        valid = np.full(self.rows, self.tokens, np.int32)
        valid[0] = max(self.tokens - 1, 1)
        valid[self.rows // 2] = 0
        return Inputs(heads, layer, put(positions, np.int32), put(valid))


CASES = (
    Case("plain"),
    Case("paged", paged=True, beside=True),
    Case("normed", normed=True, head_dim=64, dtype="bfloat16", kept="bfloat16"),
    Case("odd_width", head_dim=48, paged=True, normed=True),
    Case("as_llama", heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", kept="bfloat16"),
    Case("narrower_cache", dtype="float32", kept="bfloat16"),
    Case("broken", broken=True),
    Case("int8", paged=True, normed=True, beside=True, kept="int8"),
    Case("int8_as_llama", heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", kept="int8"),
    Case("int8_broken", broken=True, kept="int8"),
    Case("several", tokens=5, paged=True, normed=True, beside=True),
    Case("parts", parts=3, normed=True, beside=True, dtype="bfloat16", kept="bfloat16"),
)
