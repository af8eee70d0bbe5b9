"""Holds what lives on the device: the pool of pages, and the rows of the requests that decode.

Every layer's K and V lie in a pool of pages; group g holds pages g·K to g·K + K - 1, one per KV
head. The rows' groups and lengths are the same in all layers, so one table serves them all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, LayerCache
from jsparse.models.transformer import Decoder
from jsparse.policy import Policy, State
from jsparse.runtime import prefill
from jsparse.runtime.owners import row_arrays
from jsparse.runtime.sampling import RowSampling
from jsparse.shapes import Pages, Rows


class Pool(NamedTuple):
    """Holds one layer's pages, [G·K, P, H] each."""

    k: Pages
    v: Pages


class Slots(NamedTuple):
    """Holds B slots and the memory that their requests share; every program donates and returns it.

    Attributes:
        pools: K and V, per layer.
        state: the policy's state for B rows and all pages.
        groups: the groups of each row.
        lengths: the number of tokens that each row holds in the cache.
        tokens: each row's newest token, whose K and V the cache does not hold yet.
        recent: the tokens before it, as many as a correction recomputes.
        made: the number of tokens chosen so far.
        sampling: each row's options.
        knobs: the hyper-parameters that requests may set, each a number per row.
    """

    pools: tuple[Pool, ...]
    state: State
    groups: Int32[Array, "B M"]
    lengths: Rows
    tokens: Rows
    recent: Int32[Array, "B n"]
    made: Rows
    sampling: RowSampling
    knobs: dict[str, Array]


class Reading(NamedTuple):
    """Holds what belongs to a prompt that is being read, beside its pages.

    Attributes:
        rows: the arrays of the policy's state that rows own, for one row.
        last_hidden, windows: as in PrefillCarry.
    """

    rows: list[Array]
    last_hidden: Float[Array, "1 D"]
    windows: tuple[Float[Array, "1 W N H"], ...]


def start_slots(
    policy: Policy, spec: CacheSpec, sampling: RowSampling, names: Sequence[str]
) -> Slots:
    """Returns empty slots; `sampling` gives the shapes of the options of one row."""
    layers = kv_cache.init(spec).layers
    batch = spec.batch
    zeros = jnp.zeros(batch, jnp.int32)
    scratch = spec.pages // spec.num_kv_heads - 1
    return Slots(
        pools=tuple(Pool(*layer.arrays) for layer in layers),
        state=policy.init(spec),
        groups=jnp.full((batch, spec.num_pages), scratch, jnp.int32),
        lengths=zeros,
        tokens=zeros,
        recent=jnp.zeros((batch, policy.services.correct_every), jnp.int32),
        made=zeros,
        sampling=jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), sampling),
        knobs={name: no_knob(name, batch) for name in names},
    )


def no_knob(name: str, rows: int) -> Array:
    """Returns a hyper-parameter that no row sets."""
    if name == "dense":
        return jnp.zeros(rows, jnp.bool_)
    return jnp.full(rows, jnp.nan, jnp.float32)


def start_reading(decoder: Decoder, policy: Policy, spec: CacheSpec) -> Reading:
    """Returns what belongs to a prompt of which nothing has been read."""
    no_pages = spec._replace(batch=1, pool_pages=spec.num_kv_heads)
    nothing = KVCache((), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.bool_))
    carry = prefill.start(decoder, policy, nothing, policy.init(no_pages))
    return Reading(row_arrays(policy, spec, carry.state), carry.last_hidden, carry.windows)


def view(
    pools: tuple[Pool, ...], groups: Int32[Array, "B M"], lengths: Rows, num_kv_heads: int
) -> KVCache:
    """Returns pools, groups and lengths of some rows as the cache that policies know."""
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    table = groups[:, None] * num_kv_heads + head
    by_head = jnp.broadcast_to(lengths[:, None], table.shape[:2])
    layers = tuple(LayerCache(pool.k, pool.v, by_head, table) for pool in pools)
    return KVCache(layers, lengths, jnp.zeros(lengths.shape, jnp.bool_))


def pools_of(cache: KVCache) -> tuple[Pool, ...]:
    """Returns the pools of a cache that `view` made."""
    return tuple(Pool(*layer.arrays) for layer in cache.layers)
