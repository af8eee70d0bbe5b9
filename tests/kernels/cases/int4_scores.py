"""Cases of `int4_scores` and `int4_append`, from the `Case` of block_sparse_decode."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache, physical_pages, read_heads
from jsparse.cache.key_constants import SPAN, KeyFrame, rotated
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise
from tests.kernels.cases.block_sparse_decode import JUNK, Case, frame_around
from tests.kernels.cases.named import put

LARGE = 200.0  # the size of the biases of Qwen2's keys
THETA = 1e6  # RoPE's base
Inputs = namedtuple("Inputs", "q layer keys selection")


@dataclass(frozen=True)
class NarrowCase(Case):
    """A call with queries and 4-bit keys of the first `channels` channels of K."""

    channels: int = 16


@dataclass(frozen=True)
class FrameCase(Case):
    """A call with 4-bit keys in a frame, or with separate channels per head.

    Attributes:
        framed: whether there is a frame.
        chosen: the number of channels that each row and head has chosen; None: all.
    """

    framed: bool = True
    chosen: int | None = None


def options(case: Case, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments `frame` and `channels` of int4_scores and int4_append."""
    kept = case if isinstance(case, FrameCase) else FrameCase("", framed=False)
    return {
        "frame": frame_for(case, seed) if kept.framed else None,
        "channels": None if kept.chosen is None else _channels(kept, seed),
    }


def frame_for(case: Case, seed: int = 0) -> KeyFrame:
    """A frame with three large constant channels per head, as in keys of Qwen2."""
    rng, half = np.random.default_rng(seed), case.head_dim // 2
    mid = rng.normal(size=(case.kv_heads, case.head_dim))
    for at in (3 % half, half - 1, case.head_dim - 2):
        mid[:, at] = LARGE * rng.choice([-1, 1], case.kv_heads)
    return frame_around(case, rng, mid, THETA)


def out_of_frame(
    k: Float[Array, "B K T H"], frame: KeyFrame, slots: Int32[Array, "B K T"]
) -> Float32[Array, "B K T H"]:
    """Returns k · key_scale + R(span)·mid: the keys of these slots that are k in the frame."""
    mid = rotated(frame.mid[:, None], frame.angles[slots // SPAN])
    return k.astype(jnp.float32) * jnp.tile(frame.key_scale, 2)[:, None] + mid


def build(case: Case, seed: int = 0) -> Inputs:
    """Builds the inputs. If all heads are dense, no selection is passed and every token is scored.

    With a frame, K varies around the rotated mean instead of around 0.
    """
    q, layer, selection = case.build(seed)
    given = None if case.dense == "all" else selection
    if not isinstance(case, FrameCase):
        channels = case.channels if isinstance(case, NarrowCase) else case.head_dim
        return Inputs(
            put(np.asarray(q)[..., :channels]), layer, _quantised(layer.k, channels), given
        )
    kept = options(case, seed)
    if case.framed:
        layer = _moved(layer, kept["frame"])
    return Inputs(q, layer, _appended(case, layer, **kept), given)


@partial(jax.jit, static_argnames="channels")
def _quantised(k: Float[Array, "F P H"], channels: int) -> Int4Keys:
    return Int4Keys(*quantise(k[..., :channels]))


def _channels(case: FrameCase, seed: int) -> Int32[Array, "B K r"]:
    """Chooses ascending channels for each row and head."""
    heads = (case.batch, case.kv_heads)
    order = np.broadcast_to(np.arange(case.head_dim), (*heads, case.head_dim))
    order = np.random.default_rng(seed).permuted(order, axis=2)
    return put(np.sort(order[..., : case.chosen]), np.int32)


@jax.jit
def _moved(layer: LayerCache, frame: KeyFrame) -> LayerCache:
    """Returns the layer with K moved out of the frame."""
    k = out_of_frame(read_heads(layer.k, layer), frame, _every(layer, layer.capacity))
    pages = physical_pages(layer, _every(layer, layer.num_pages))
    rows = k.astype(layer.k.dtype).reshape(*pages.shape, layer.page_size, -1)
    return layer._replace(k=layer.arrays[0].at[pages].set(rows))


@partial(jax.jit, static_argnames="case")
def _appended(case: FrameCase, layer: LayerCache, **kept: Any) -> Int4Keys:
    """Returns the 4-bit copy of all slots; pages without an owner hold JUNK."""
    junk = jnp.full((*layer.k.shape[:2], case.chosen or case.head_dim), JUNK)
    return int4_append(
        Int4Keys(*quantise(junk)),
        layer,
        read_heads(layer.k, layer).swapaxes(1, 2),
        jnp.full(case.batch, case.slots, jnp.int32),
        jnp.zeros_like(layer.lengths),
        **kept,
        implementation="reference",
    )


def _every(layer: LayerCache, count: int) -> Int32[Array, "B K n"]:
    """Returns 0 … count - 1 for every head."""
    return jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*layer.lengths.shape, count))


_whole = partial(Case, dense="all", listed="none", capacity=0)
_kept = partial(FrameCase, dense="all", listed="none", capacity=0)

CASES = (
    _whole("whole"),
    _whole("whole_full", lengths="full", num_pages=37),
    _whole("whole_one_token", lengths="one"),
    _whole("whole_scrambled", table="scrambled", num_pages=9),
    _whole("whole_head_dim_96", head_dim=96, group=3, page_size=8),
    _whole("whole_head_dim_256", head_dim=256, group=16, page_size=64, num_pages=2),
    NarrowCase("whole_16_of_64_channels", dense="all", listed="none", capacity=0, sm_scale=0.125),
    NarrowCase(
        "8_of_128_channels",
        head_dim=128,
        channels=8,
        table="scrambled",
        dtype="bfloat16",
        sm_scale=0.09,
    ),
    Case("pages"),
    Case("nothing_listed", listed="none"),
    Case("empty_list", listed="none", capacity=0),
    Case("newest_unlisted", listed="first", lengths="full"),
    Case("head_dim_40", head_dim=40, group=3, page_size=8),
    Case("pages_of_128", head_dim=128, page_size=128, num_pages=3),
    Case("bits_16", bits=True, table="scrambled"),
    Case("bits_32", bits=True, page_size=32, listed="all", num_pages=3),
    Case("dense_and_sparse", dense="mixed"),
    Case("scrambled", table="scrambled", num_pages=19),
    Case("shared_pages", table="shared", batch=3),
    Case("sm_scale", sm_scale=0.3),
    Case("bfloat16", dtype="bfloat16", table="scrambled", bits=True),
    _kept("whole_in_frame", num_pages=21),
    _kept("whole_in_frame_pages_of_64", page_size=64, lengths="full", table="scrambled"),
    _kept("whole_in_frame_bfloat16", head_dim=128, num_pages=21, dtype="bfloat16"),
    _kept("whole_in_frame_16_channels", num_pages=21, chosen=16, table="scrambled"),
    _kept("whole_16_channels_without_frame", num_pages=21, chosen=16, framed=False),
    FrameCase("in_frame", num_pages=21),
    FrameCase("in_frame_head_dim_40", head_dim=40, group=3, page_size=8, num_pages=41),
    FrameCase("in_frame_pages_of_64_listed", page_size=64, listed="all", table="scrambled"),
    FrameCase("in_frame_bits", bits=True, num_pages=23, table="scrambled", dtype="bfloat16"),
    FrameCase(
        "in_frame_32_channels",
        head_dim=128,
        group=7,
        num_pages=41,
        page_size=8,
        chosen=32,
        bits=True,
        table="scrambled",
    ),
    # neighbouring tokens of a row: one page of them, more than a page, other groups
    FrameCase("in_frame_16_channels", chosen=16, page_size=4, num_pages=41, group=5, bits=True),
    _kept("whole_16_channels_pages_of_2", chosen=16, page_size=2, num_pages=41, group=3),
)
