"""CacheSpec, the static sizes of a cache."""

from typing import Any, NamedTuple

import jax.numpy as jnp


class CacheSpec(NamedTuple):
    """The static sizes of a cache and of a policy's state (letters of jsparse.shapes).

    `pool_pages` is None if every head has its own M pages (the identity table). A number gives each
    layer a pool of that many pages shared by all rows and heads, including one scratch page.
    `model` is the name under which the model was loaded, and `types` the types of its weights, or
    "" without a model; `auto` looks them up. If the model is spread over `ranks` (jsparse.ranks),
    the numbers of heads are per rank. `dtype` is the type of activations; K and V have it too if
    `kv_cache_dtype` is "auto", and are Int8Pages if it is "int8".
    """

    num_layers: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: Any
    pool_pages: int | None = None
    model: str = ""
    types: str = ""
    ranks: int = 1
    kv_cache_dtype: str = "auto"

    @property
    def pages(self) -> int:
        """The number of physical pages per layer: the first axis of paged arrays."""
        if self.pool_pages is not None:
            return self.pool_pages
        return self.batch * self.num_kv_heads * self.num_pages

    @property
    def model_kv_heads(self) -> int:
        """The total number of KV heads of all ranks."""
        return self.num_kv_heads * self.ranks

    @property
    def capacity(self) -> int:
        """S, the maximum number of tokens of one head."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        """The bytes of K and V over all layers."""
        return self.num_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """The bytes of K and V of one token of one head."""
        if self.kv_cache_dtype == "int8":
            return 2 * (self.head_dim + 2)
        return 2 * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """The bytes of K and V of one token over all layers and heads of a rank."""
        return self.num_layers * self.num_kv_heads * self.slot_bytes

    @property
    def num_slots(self) -> int:
        """The number of slots of all pages of all layers."""
        return self.num_layers * self.pages * self.page_size
