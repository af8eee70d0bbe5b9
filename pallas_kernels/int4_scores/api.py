"""Estimates logits from a 4-bit copy of K, or of some of its channels.

Twilight and Double Sparsity choose by these estimates.
"""

from jaxtyping import Array, Float, Float32, Int32

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.attention_arguments import check_list
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.int4_keys import Int4Keys, check_frame
from jsparse.pallas_kernels.int4_scores import reference
from jsparse.selection import Selection

MAX_TRITON_PAGE = 128


def _triton_refuses(
    q: Array, layer: LayerCache, keys: Int4Keys, *_: object, **__: object
) -> str | None:
    size, channels = layer.page_size, 2 * keys.packed.shape[-1]
    if size & (size - 1) or size > MAX_TRITON_PAGE:
        return f"takes pages of a power of two up to {MAX_TRITON_PAGE} tokens, not {size}"
    if channels % 8:
        return f"takes keys of a multiple of 8 channels, not {channels}"
    return no_triton()


def _load_triton():
    from jsparse.pallas_kernels.int4_scores import triton_gpu

    return triton_gpu.int4_scores


BACKENDS = (
    Backend("triton", _load_triton, _triton_refuses),
    Backend("reference", lambda: reference.int4_scores),
)


@checked()
def int4_scores(
    q: Float[Array, "B N width"],
    layer: LayerCache,
    keys: Int4Keys,
    selection: Selection | None,
    *,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
    sm_scale: float | None = None,
    implementation: str | None = None,
) -> Float32[Array, "B N slots"]:
    """Estimates the logits of every query head for all slots of its KV head, or of listed pages.

    The estimate is sm_scale · q·(scale · code + zero), without the layer's bias. In a frame it is
    sm_scale · ((q · key_scale)·(scale · code + zero) + q·R(span)·mid), where the first product is
    over the channels that `keys` has and the second over all.

    Args:
        q: the queries, after RoPE, in all H channels.
        layer: the cache's layer, for where pages lie and how many slots each head holds; its K and
            V are not read.
        keys: the 4-bit copy of the layer's K.
        selection: the pages to read, at granularity "page"; None is all of them.
        frame: the frame that the copy is kept in; None where it is K's own.
        channels: the channels that `keys` has, each in [0, H); None is all, in their order.
        sm_scale: the factor of the dot product; None is 1/√H.
        implementation: "triton", "reference", or None to pick.

    Returns:
        float32[B, N, S], by slot; with a selection float32[B, N, C·P], slot t of the page `ids[…,
        i]` at i·P + t. Query heads are not reduced. Scores are -inf at and behind the head's
        length, behind the list's count and where a bit is off. The list alone counts: `dense` is
        not looked at (a dense head scores what it lists, in general nothing), and the newest token
        has a score only where its page is listed.

    Raises:
        ValueError: shapes, granularity or page size do not fit together.
    """
    if selection is not None:
        check_list("int4_scores", "page", layer, selection)
    width = 2 * keys.packed.shape[-1]
    head_dim = width if channels is None else layer.k.shape[-1]
    if q.shape[-1] != head_dim:
        raise ValueError(
            f"q.shape={q.shape}: the last axis must equal the keys' head dimension, {head_dim}"
        )
    if channels is not None and channels.shape[-1] != width:
        raise ValueError(f"channels.shape={channels.shape}: the keys have {width} channels")
    check_frame(q.shape[-1], layer, frame)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return run(
        "int4_scores",
        implementation,
        BACKENDS,
        q,
        layer,
        keys,
        selection,
        frame=frame,
        channels=channels,
        sm_scale=sm_scale,
    )
