"""Defines CacheSpec, the static sizes of a cache."""

from typing import Any, NamedTuple

import jax.numpy as jnp


class CacheSpec(NamedTuple):
    """Holds the static sizes of a cache and of a policy's state (letters of jsparse.shapes).

    `pool_pages` is None where every head has M pages of its own (the identity table). A number
    gives each layer a pool of that many pages that all rows and heads share, one of them scratch.
    `model` is the name by which the model was loaded, and `types` the types of its weights, ""
    where none was; `auto` looks them up. Where the model is spread over `ranks` (jsparse.ranks),
    the numbers of heads are those of one of them.
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

    @property
    def pages(self) -> int:
        """Returns the number of physical pages per layer: the first axis of paged arrays."""
        if self.pool_pages is not None:
            return self.pool_pages
        return self.batch * self.num_kv_heads * self.num_pages

    @property
    def model_kv_heads(self) -> int:
        """Returns the number of KV heads that all ranks have together."""
        return self.num_kv_heads * self.ranks

    @property
    def capacity(self) -> int:
        """Returns S, the number of tokens that one head can hold."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        """Returns the bytes of K and V over all layers."""
        return 2 * self.num_slots * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def num_slots(self) -> int:
        """Returns the number of slots of all pages of all layers."""
        return self.num_layers * self.pages * self.page_size
