"""K in 4 bits a channel, paged like K: how it is built and kept up to date.

Asymmetric, per token and KV head over its channels, as in Twilight (Lin et al., arXiv:2502.02770):
channel ≈ scale · code + zero, with code in 0 … 15.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Float32, UInt8

from jsparse.cache import CacheSpec, LayerCache, physical_pages
from jsparse.pallas_kernels.dispatch import Backend, choose, no_triton
from jsparse.shapes import ChunkKV, Lengths, Rows

LEVELS = 15
FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)


class Int4Keys(NamedTuple):
    """One layer's keys, indexed by physical page.

    Attributes:
        packed: two codes a byte, channel 2i in the low half of byte i and channel 2i + 1 in the high half: a 16-bit
            word then holds four neighbours, and one mask takes the same one of the four out of two words at once.
        scale: the step of each token's codes; 1 where all channels are equal.
        zero: the least channel of each token.
    """

    packed: UInt8[Array, "pages P half"]
    scale: Float16[Array, "pages P"]
    zero: Float16[Array, "pages P"]


def init(spec: CacheSpec, *, pool_pages: int | None = None) -> Int4Keys:
    """The keys of one layer that holds nothing; `pool_pages` as for the cache's own init."""
    pages = spec.batch * spec.num_kv_heads * spec.num_pages if pool_pages is None else pool_pages
    rows = (pages, spec.page_size)
    packed = jnp.zeros((*rows, spec.head_dim // 2), jnp.uint8)
    return Int4Keys(packed, jnp.ones(rows, jnp.float16), jnp.zeros(rows, jnp.float16))  # as quantise has it of zeros


def quantise(
    k: Float[Array, "*rows H"],
) -> tuple[UInt8[Array, "*rows H//2"], Float16[Array, "*rows"], Float16[Array, "*rows"]]:
    """packed, scale and zero of the last axis.

    A channel is off by at most half a step, plus what scale and zero lose as float16; channels beyond float16's range
    are clipped to it, so that all that is stored is finite.

    Products with reciprocals are what XLA makes of these divisions where it jits. Its own reciprocal is an ulp off on
    GPUs: there a channel halfway between two codes may get either.
    """
    if k.shape[-1] % 2:
        raise ValueError(f"k.shape={k.shape}: the last axis must be even, two codes share a byte")
    k = jnp.clip(k.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX)
    # behind the barrier XLA may not take the unrounded minimum for what is stored
    zero = jax.lax.optimization_barrier(jnp.min(k, -1).astype(jnp.float16))
    scale = ((jnp.max(k, -1) - jnp.min(k, -1)) * (1 / LEVELS)).astype(jnp.float16)
    scale = jnp.where(scale == 0, jnp.float16(1), scale)
    steps = (k - zero[..., None].astype(jnp.float32)) * (1 / scale.astype(jnp.float32))[..., None]
    codes = jnp.clip(jnp.round(steps), 0, LEVELS).astype(jnp.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, zero


def dequantise(
    packed: UInt8[Array, "*rows half"], scale: Float16[Array, "*rows"], zero: Float16[Array, "*rows"]
) -> Float32[Array, "*rows 2*half"]:
    """The channels that `quantise` kept."""
    codes = jnp.stack([packed & LEVELS, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    return codes.astype(jnp.float32) * scale[..., None].astype(jnp.float32) + zero[..., None].astype(jnp.float32)


def _append(keys: Int4Keys, layer: LayerCache, k: ChunkKV, valid: Rows, first: Lengths) -> Int4Keys:
    """See append."""
    steps = jnp.arange(k.shape[1], dtype=jnp.int32)
    slots = first[:, :, None] + steps
    ok = (steps < valid[:, None])[:, None] & (slots >= 0) & (slots < layer.capacity)
    pages = physical_pages(layer, jnp.where(ok, slots // layer.page_size, 0))
    at = (jnp.where(ok, pages, keys.scale.shape[0]), slots % layer.page_size)  # out of range: dropped
    rows = quantise(k.astype(layer.k.dtype).swapaxes(1, 2))
    return Int4Keys(*(pool.at[at].set(new, mode="drop") for pool, new in zip(keys, rows, strict=True)))


def _load_triton():
    from jsparse.pallas_kernels.int4_scores import append_triton

    return append_triton.append


BACKENDS = (Backend("triton", _load_triton, lambda *_: no_triton()), Backend("reference", lambda: _append))


def append(
    keys: Int4Keys, layer: LayerCache, k: ChunkKV, valid: Rows, first: Lengths, *, implementation: str | None = None
) -> Int4Keys:
    """Takes in the first `valid[b]` of T tokens, which lie at the slots first, first + 1, … of each head of row b.

    Arguments are those of `cache.write`, which must have stored the same tokens: only the rows it wrote are written,
    and a slot written again holds its newest token. `layer` is the cache's layer, pages allocated. Pools are changed in
    place where the caller's jit donates them, and copied first where it does not.

    Args:
        keys: as they stood.
        layer: says where pages lie, and of which dtype K is; its K and V are not read.
        k: the tokens, in the channels that `keys` has.
        valid: how many tokens of each row count.
        first: the slot of each head's first one.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: shapes do not fit together.
    """
    wanted = (*first.shape, 2 * keys.packed.shape[-1])
    if (k.shape[0], *k.shape[2:]) != wanted:
        raise ValueError(f"k.shape={k.shape}: [B, K, H] must be {wanted}, to fit `first` and the keys")
    return choose("int4_append", implementation, BACKENDS, keys, layer, k, valid, first)
