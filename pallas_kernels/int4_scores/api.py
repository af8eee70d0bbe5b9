"""Estimates logits from a 4-bit copy of K, or of some of its channels.

Twilight and Double Sparsity select by these estimates.
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
    """Estimates every query head's logits for all slots of its KV head, or for listed pages.

    The estimate is sm_scale · q·(scale · code + zero), without the layer's bias. In a frame it is
    sm_scale · ((q · key_scale)·(scale · code + zero) + q·R(span)·mid), with the first product over
    the channels of `keys` and the second over all channels.

    Args:
        q: the queries, after RoPE, in all H channels.
        layer: the cache's layer, for page locations and lengths; its K and V are not read.
        keys: the 4-bit copy of the layer's K.
        selection: the pages to read, at granularity "page"; None: all.
        frame: the frame of the copy; None: K as it is.
        channels: the channels in `keys`, each in [0, H); None: all, in order.
        sm_scale: the factor of the dot product; None: 1/√H.
        implementation: "triton", "reference", or None to choose.

    Returns:
        float32[B, N, S], by slot; with a selection float32[B, N, C·P], with slot t of the page
        `ids[…, i]` at i·P + t. Query heads are not reduced. Scores are -inf at and past the head's
        length, past the list's count, and where a bit is off. Only the list counts: `dense` is
        ignored (a dense head scores its list, usually empty), and the newest token has a score only
        if its page is listed.

    Raises:
        ValueError: shapes, granularity or page size do not match.
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
