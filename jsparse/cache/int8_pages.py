"""Int8Pages, K or V of one layer in 8 bits.

A token of a head is H integers and one scale, 1 + 2/H bytes per number. Channels of K differ in
size, and some hardly vary, so keys are first divided by the reach of their channel, which is a
constant of the model (`jsparse.runtime.constants`): the largest |k| of the pair of channels that
RoPE rotates together. Both channels of a pair have the same reach, so that a rotated key has it
too, and every channel gets as many of the 255 integers at any position.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int8, Int32

from jsparse.cache.layers import LayerCache, PagePool, TieredPool
from jsparse.cache.placing import placed
from jsparse.cache.reading import read_heads, read_pages, read_slots, rounded_to


class PoolArrays(NamedTuple):
    """The arrays of a pool, for kernels: `scales` and `reach` only of Int8Pages."""

    values: Any
    scales: Any = None
    reach: Float32[Array, "K H"] | None = None


KEY_REACH = "key_reach"  # the constant of a model with the reach of its keys
LARGEST = 127  # -128 is not used, so that a number and its negative round alike


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "reach"),
    meta_fields=("of_type", "framed"),
)
@dataclass(frozen=True)
class Int8Pages(PagePool):
    """K or V of one layer: values · scales · reach.

    Attributes:
        values: the integers, int8[pages, P, H]; in host memory, a TieredPool of them.
        scales: the factor of each token, bfloat16[pages, P], likewise. Its rounding is not an
            error: the integers are those for the rounded factor.
        reach: the factor of each channel of a KV head; None: 1. It is not part of the cache:
            programs borrow it (`jsparse.cache.step_view`).
        of_type: the type in which values are read, the model's.
        framed: whether a reach must have been lent to read or write.
    """

    # jax also builds such trees of shapes, which are not arrays
    __no_type_check__: ClassVar[bool] = True

    values: Any
    scales: Any
    reach: Float32[Array, "K H"] | None
    of_type: Any
    framed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """[pages, P, H]."""
        pages, page_size, head_dim = self.values.shape
        return pages, page_size, head_dim

    @property
    def dtype(self) -> Any:
        """The type in which values are read."""
        return self.of_type

    @property
    def slot_bytes(self) -> int:
        """The bytes of one token."""
        return self.values.shape[2] + self.scales.dtype.itemsize

    @property
    def on_host(self) -> bool:
        """Whether the pages are in host memory."""
        return isinstance(self.values, TieredPool)

    def of_head(self, head: Int32[Array, ""]) -> "Int8Pages":
        """Returns the pool for a layer of one KV head, that head."""
        return self if self.reach is None else replace(self, reach=self.reach[head][None])

    def map_pages(self, function: Callable[[Any], Any]) -> "Int8Pages":
        """Returns the pool with both of its arrays, or their pools, replaced by the results."""
        return replace(self, values=function(self.values), scales=function(self.scales))

    def with_host(self, host: "Int8Pages | None") -> "Int8Pages":
        """Returns the pool with these integers and factors in host memory."""
        if not (isinstance(self.values, TieredPool) and isinstance(self.scales, TieredPool)):
            return self
        return replace(
            self,
            values=self.values.with_host(host and host.values),
            scales=self.scales.with_host(host and host.scales),
        )

    def take(self, rows: Int32[Array, "n"], batch: int) -> "Int8Pages":
        """Returns the arrays of some of `batch` rows, as a pool; those of all pages are shared."""
        return self.map_pages(lambda x: x.take(rows, batch) if isinstance(x, PagePool) else x)

    def put(self, part: "Int8Pages", rows: Int32[Array, "n"], batch: int) -> "Int8Pages":
        """Returns the pool with a part from `take` in the place of these rows."""

        def put(x: Any, other: Any) -> Any:
            return x.put(other, rows, batch) if isinstance(x, PagePool) else other

        values, scales = put(self.values, part.values), put(self.scales, part.scales)
        return replace(part, values=values, scales=scales)

    def read_pages(self, layer: LayerCache, logical: Int32[Array, "B K n"]) -> Array:
        """Returns selected pages of each head, [B, K, n, P, H]."""
        return self._read(read_pages, layer, logical)

    def read_slots(self, layer: LayerCache, slots: Int32[Array, "B K n"]) -> Array:
        """Returns selected slots of each head, [B, K, n, H]."""
        return self._read(read_slots, layer, slots)

    def read_heads(self, layer: LayerCache) -> Array:
        """Returns every slot of every head, [B, K, S, H]."""
        return self._read(read_heads, layer)

    def _read(self, read: Any, layer: LayerCache, *what: Array) -> Array:
        return self._widened(read(self.values, layer, *what), read(self.scales, layer, *what))

    def rounded(self, rows: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
        """Returns rows as they will be read; one with a NaN or infinity has no finite number."""
        return self._widened(*self._narrowed(rows))

    def written(
        self,
        layer: LayerCache,
        slots: Int32[Array, "B K T"],
        ok: Bool[Array, "B K T"],
        rows: Float[Array, "B K T H"],
    ) -> "Int8Pages":
        """Returns the pool with rows written to the slots that are `ok`."""
        values, scales = self._narrowed(rows)
        return replace(
            self,
            values=placed(self.values, layer, slots, ok, values),
            scales=placed(self.scales, layer, slots, ok, scales),
        )

    def _narrowed(
        self, rows: Float[Array, "B K T H"]
    ) -> tuple[Int8[Array, "B K T H"], BFloat16[Array, "B K T"]]:
        """Returns the integers and the factors of rows."""
        reach, rows = self.lent_reach, rows.astype(jnp.float32)
        rows = rows if reach is None else rows / reach[:, None]
        scales = rounded_to(jnp.max(jnp.abs(rows), axis=-1) / LARGEST, jnp.bfloat16)
        step = scales.astype(jnp.float32)[..., None]
        nearest = jnp.round(rows / jnp.where(step == 0, 1.0, step))
        return jnp.clip(nearest, -LARGEST, LARGEST).astype(jnp.int8), scales

    @property
    def lent_reach(self) -> Float32[Array, "K H"] | None:
        """The reach, to read or write numbers.

        ValueError: it must have been lent, and was not.
        """
        if self.framed and self.reach is None:
            raise ValueError(
                f"{KEY_REACH}: must be among the constants of ReadOnly, which programs pass to "
                "step_view, to read or write K in 8 bits"
            )
        return self.reach

    def _widened(self, values: Int8[Array, "B K *n H"], scales: BFloat16[Array, "B K *n"]) -> Array:
        reach, rows = self.lent_reach, values.astype(jnp.float32) * scales[..., None]
        if reach is not None:
            between = (1,) * (rows.ndim - 3)
            rows *= reach.reshape(len(reach), *between, -1)
        return rows.astype(self.of_type)


def arrays_of(pool: Any) -> PoolArrays:
    """Returns the arrays, or pools in host memory, of K or V.

    Raises:
        ValueError: a reach must have been lent, and was not.
    """
    if isinstance(pool, Int8Pages):
        return PoolArrays(pool.values, pool.scales, pool.lent_reach)
    return PoolArrays(pool)


def with_arrays(pool: Any, values: Any, scales: Any) -> Any:
    """Returns K or V with other arrays; `scales` is ignored if it has none."""
    return replace(pool, values=values, scales=scales) if isinstance(pool, Int8Pages) else values
