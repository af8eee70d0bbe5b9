"""MagicPIG samples tokens by hashing, and weights each by the inverse of its chance to be sampled.

L hash tables of K bits each are built from random hyperplanes (SimHash). A query head samples the
tokens whose codes equal the query's in at least two tables. With θ the angle between q and the
centred key k - k̄, one bit agrees with probability p = 1 - θ/π, a table with p^K, and a token is
sampled with probability

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)

Attention over the samples with logits q·k / √H - log u estimates attention over all tokens, so also
where attention is too flat for the best few tokens to stand for the rest. The first and the newest
tokens are attended to exactly. Centring makes directions differ enough to be told apart, and
changes no softmax.

Paper: "MagicPIG: LSH Sampling for Efficient LLM Generation" (Chen et al.), arXiv:2410.16179. It
leaves layers 0, 16, … dense; `dense_layers(magic_pig(…), n=1)` leaves the first.

Where we differ:
- Codes are compared token by token instead of looked up in tables: a step reads 2 bytes per token
  and table (1 up to 8 bits), by default 300 next to the 512 of a bfloat16 key and value with
  H = 128. So this serves to study the quality, or for K and V in slow memory, as in the paper.
- K and V are gathered for the union of a group's samples. If it exceeds the share `limit` of the
  row's tokens, the KV head attends to everything: no sample is dropped.
- New tokens are hashed as well, with the prompt's mean, and can be sampled once they are older than
  the newest `recent`. The authors' code attends to all of them exactly.
- The mean is that of all prompt keys but the sinks'; the authors' code leaves out the newest too.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, UInt8, UInt16

from jsparse.builder import builder
from jsparse.cache import (
    CacheSpec,
    LayerCache,
    StepView,
    physical_pages,
    read_heads,
    read_pages,
    read_slots,
    rounded,
)
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import fraction, whole_number
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products, weighted_sum
from jsparse.policies.lfps import wanted
from jsparse.policies.sidecars import sidecar
from jsparse.policies.slot_sums import slot_sums
from jsparse.policy import Policy, at_layer
from jsparse.selection import MAX_BITS_PAGE, Selection, compact, pack_bits, window
from jsparse.selection.partials import Summary, softmax_partial
from jsparse.shapes import ChunkKV, Lengths, Queries, Rows

AT_LEAST = 2  # tables in which a sampled token's code equals the query's
FLOOR = 1e-4  # added to u, as in the authors' code: bounds the weight of an unlikely sample
HASHED, COMPARED = 1024, 8192  # tokens per head whose codes are made and compared at a time

Codes = UInt8[Array, "*tokens tables"] | UInt16[Array, "*tokens tables"]


class Settings(NamedTuple):
    """The hyper-parameters of `magic_pig`."""

    bits: int
    tables: int
    sink: int
    recent: int
    limit: float
    seed: int


class Hashes(NamedTuple):
    """One layer's hashed keys.

    Attributes:
        mean: k̄, the mean key of the row's prompt.
        codes: each token's codes, [pages, P, tables], one of `bits` bits per table.
        norms: |k - k̄| of each token.
    """

    mean: Float32[Array, "B K H"]
    codes: Codes
    norms: Float32[Array, "pages P"]


@builder
def magic_pig(
    bits: int = 10,
    tables: int = 150,
    sink: int = 4,
    recent: int = 64,
    limit: float = 0.25,
    seed: int = 0,
) -> Policy:
    """Attends to tokens sampled by hash collisions with the query, and estimates the rest.

    Args:
        bits: K, the bits per table; more sample fewer tokens. At most 16.
        tables: L; more sample more tokens.
        sink: the number of first tokens that are attended to exactly.
        recent: the same for the newest.
        limit: the largest share of a row's tokens that the query heads of a KV head may sample
            together; if they sample more, the KV head attends to everything.
        seed: of the random hyperplanes, which all layers and heads share.
    """
    whole_number("bits", bits, 1)
    if bits > 16:
        raise ValueError(f"bits={bits}: must be at most 16")
    whole_number("tables", tables, AT_LEAST)
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 1)
    fraction("limit", limit)
    whole_number("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed={seed}: must be below 2**63")
    settings = Settings(bits, tables, sink, recent, limit, seed)
    hashes = sidecar(partial(no_hashes, settings), partial(taken_in, settings))
    return Policy(
        partial(select, settings),
        init=hashes.init,
        prefill=partial(prefill, settings),
        append=hashes.append,
        # pages hold codes relative to a row's own mean, which other rows could not use
        shares=None,
        reads=0,
    )


def no_hashes(settings: Settings, spec: CacheSpec) -> Hashes:
    """Returns a layer's empty hashes."""
    codes, slots = jnp.uint8 if settings.bits <= 8 else jnp.uint16, (spec.pages, spec.page_size)
    return Hashes(
        jnp.zeros((spec.batch, spec.num_kv_heads, spec.head_dim), jnp.float32),
        jnp.zeros((*slots, settings.tables), codes),
        jnp.zeros(slots, jnp.float32),
    )


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Hashes the whole prompt at its end, centred by its mean key."""
    if not view.last:
        return state
    kv = view.step.layers[layer]
    k = read_heads(kv.k, kv)
    hashes = state[layer]._replace(mean=mean_key(settings, k, kv))
    hashes = hashed(settings, hashes, kv, k, kv.lengths[:, 0], jnp.zeros_like(kv.lengths))
    return at_layer(state, layer, hashes)


def taken_in(
    settings: Settings, hashes: Hashes, kv: LayerCache, k: ChunkKV, valid: Rows, first: Lengths
) -> Hashes:
    """Hashes new tokens, centred by the prompt's mean key."""
    return hashed(settings, hashes, kv, rounded(kv.k, k.swapaxes(1, 2)), valid, first)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the sinks and the newest tokens; the summary estimates attention to the others."""
    kv = view.layers[layer]
    size = {"num_pages": kv.num_pages, "page_size": kv.page_size}
    unit = "page" if kv.page_size <= MAX_BITS_PAGE else "token"
    exact = window(kv.lengths, sink=settings.sink, recent=settings.recent, **size, granularity=unit)
    return *estimated(settings, exact, q, kv, state[layer]), state


def estimated(
    settings: Settings, exact: Selection, q: Queries, kv: LayerCache, hashes: Hashes
) -> tuple[Selection, Summary]:
    """Returns the selection with a summary of the sampled tokens that it does not list."""
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1])
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    others = (slots >= settings.sink) & (slots < kv.lengths[..., None] - settings.recent)
    sampled = collisions(settings, grouped, kv, hashes) & others[:, :, None]
    either = jnp.any(sampled, axis=2)
    number = jnp.sum(either, axis=-1, dtype=jnp.int32)
    capacity = math.ceil(settings.limit * kv.capacity)
    ids, count = compact(either, capacity)
    dense = number > jnp.minimum(wanted(settings.limit, kv.lengths), capacity)

    valid = (jnp.arange(capacity) < count[..., None]) & ~dense[..., None]
    own = valid[:, :, None] & jnp.take_along_axis(sampled, ids[:, :, None], axis=3)
    dots = products(grouped, kv.k, kv, ids)
    cosines = centred_cosines(grouped, dots, hashes.mean, read_slots(hashes.norms, kv, ids))
    u = sampling_probability(cosines, settings.bits, settings.tables)
    logits = dots * q.shape[-1] ** -0.5 - jnp.log(u + FLOOR)
    weights, total, lse = softmax_partial(jnp.where(own, logits, -jnp.inf))
    o = weighted_sum(weights.astype(kv.v.dtype), kv.v, kv, ids)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]

    of_heads = jnp.where(dense, 0, number)
    summary = Summary(o.reshape(q.shape), lse.reshape(q.shape[:2]), of_heads, of_heads)
    return replace(exact, dense=dense), summary


def mean_key(
    settings: Settings, k: Float[Array, "B K S H"], kv: LayerCache
) -> Float32[Array, "B K H"]:
    """Returns the mean key after the sinks; 0 without any."""
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    counted = (slots >= settings.sink) & (slots < kv.lengths[..., None])
    sums = slot_sums(jnp.where(counted[..., None], k.astype(jnp.float32), 0.0))
    return sums / jnp.maximum(kv.lengths - settings.sink, 1)[..., None]


def hashed(
    settings: Settings,
    hashes: Hashes,
    kv: LayerCache,
    k: Float[Array, "B K T H"],
    valid: Rows,
    first: Lengths,
) -> Hashes:
    """Stores codes and norms of the first `valid` keys, which are in slots first, first + 1, …"""
    nth = jnp.arange(k.shape[2], dtype=jnp.int32)
    slots = first[..., None] + nth
    ok = (nth < valid[:, None])[:, None] & (slots >= 0) & (slots < kv.capacity)
    pages = physical_pages(kv, jnp.where(ok, slots // kv.page_size, 0))
    # out of range: dropped
    at = jnp.where(ok, pages, hashes.norms.shape[0]), slots % kv.page_size

    def of_block(k: Array) -> tuple[Codes, Array]:
        return simhash(settings, k.astype(jnp.float32) - hashes.mean[:, :, None])

    codes, norms = in_blocks(of_block, k, HASHED)
    return hashes._replace(
        codes=hashes.codes.at[at].set(codes, mode="drop"),
        norms=hashes.norms.at[at].set(norms, mode="drop"),
    )


def simhash(
    settings: Settings, x: Float32[Array, "B K n H"]
) -> tuple[Codes, Float32[Array, "B K n"]]:
    """Returns the codes of vectors, bit i from the side of a table's hyperplane i; and norms."""
    shape = x.shape[-1], settings.tables, settings.bits
    normals = jax.random.normal(jax.random.key(settings.seed), shape, jnp.float32)
    sides = jnp.einsum("bknh,hli->bknli", x, normals) > 0
    codes = pack_bits(sides).astype(jnp.uint8 if settings.bits <= 8 else jnp.uint16)
    return codes, jnp.linalg.norm(x, axis=-1)


def collisions(
    settings: Settings, q: Float[Array, "B K G H"], kv: LayerCache, hashes: Hashes
) -> Bool[Array, "B K G S"]:
    """Marks the slots whose codes equal those of a query head in at least two tables."""
    of_queries, _ = simhash(settings, q.astype(jnp.float32))

    def of_pages(pages: Array) -> Bool[Array, "B K n G P"]:
        codes = read_pages(hashes.codes, kv, pages)[:, :, :, None]
        equal = codes == of_queries[:, :, None, :, None]
        return jnp.sum(equal, axis=-1, dtype=jnp.int32) >= AT_LEAST

    every = jnp.arange(kv.num_pages, dtype=jnp.int32)
    every = jnp.broadcast_to(every, (*kv.lengths.shape, kv.num_pages))
    found = in_blocks(of_pages, every, max(COMPARED // kv.page_size, 1))
    return jnp.moveaxis(found, 2, 3).reshape(*q.shape[:3], kv.capacity)


def centred_cosines(
    q: Float[Array, "B K G H"],
    dots: Float32[Array, "B K G C"],
    mean: Float32[Array, "B K H"],
    norms: Float32[Array, "B K C"],
) -> Float32[Array, "B K G C"]:
    """Returns the cosines of queries and centred keys, given q·k and |k - k̄|; 0 of zero vectors."""
    q = q.astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    dots = dots - jnp.einsum("bkgh,bkh->bkg", q, mean, precision=exact)[..., None]
    size = jnp.linalg.norm(q, axis=-1)[..., None] * norms[:, :, None]
    return jnp.where(size > 0, jnp.clip(dots / jnp.where(size > 0, size, 1.0), -1, 1), 0.0)


def sampling_probability(
    cosines: Float32[Array, "..."], bits: int, tables: int
) -> Float32[Array, "..."]:
    """Returns u, the probability of equal codes in at least two tables, to within 1e-6."""
    p = 1 - jnp.arccos(cosines) / jnp.pi
    in_one = p**bits
    # (1 - x)^L + L x (1 - x)^(L-1) = (1 - x)^(L-1) (1 + (L-1) x)
    fewer = jnp.exp((tables - 1) * jnp.log1p(-in_one)) * (1 + (tables - 1) * in_one)
    return jnp.clip(1 - fewer, 0, 1)


def in_blocks(function, x: Array, size: int):
    """Applies a function of [B, K, n, …] to blocks along n, one after the other."""
    number = x.shape[2]
    if number <= size:
        return function(x)
    x = jnp.pad(x, [(0, -number % size if axis == 2 else 0) for axis in range(x.ndim)])
    blocks = jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    def whole(made: Array) -> Array:
        made = jnp.moveaxis(made, 0, 2)
        return made.reshape(*made.shape[:2], -1, *made.shape[4:])[:, :, :number]

    return jax.tree.map(whole, jax.lax.map(function, blocks))
