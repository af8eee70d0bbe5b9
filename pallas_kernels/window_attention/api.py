"""Measures each slot's share of a window's attention, by which evicting methods rank."""

from typing import Literal

from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.window_attention import reference
from jsparse.shapes import Rows

GroupReduction = Literal["mean", "max"]
NormaliseOver = Literal["competing", "held"]


def _load_triton():
    from jsparse.pallas_kernels.window_attention import triton_gpu

    return triton_gpu.window_attention


def _triton_refuses(queries: Array, positions: Array, layer: LayerCache, *_: object, **__: object):
    if queries.dtype != layer.k.dtype:
        return f"takes queries of K's dtype, {layer.k.dtype}, not {queries.dtype}"
    return no_triton()


BACKENDS = (
    Backend("triton", _load_triton, _triton_refuses),
    Backend("reference", lambda: reference.window_attention),
)


@checked(nonempty="W")
def window_attention(
    queries: Float[Array, "B W N H"],
    positions: Rows,
    layer: LayerCache,
    competing: Bool[Array, "B K S"],
    *,
    group: GroupReduction = "mean",
    over: NormaliseOver = "competing",
    implementation: str | None = None,
) -> Float32[Array, "B K S"]:
    """Returns each competing slot's mean share of a window's attention; 0 for all others.

    A query's shares are its softmax over the competing slots, all of which must precede it, or over
    all of its head's slots up to its own token. With group="mean" every query head has its own
    shares, and the mean is over the window and the group. With "max" a group has one set per query,
    from the largest logits of any of its heads.

    Args:
        queries: the window, after RoPE, with that of position p at p % W, or with over="competing"
            in any order; if a row has had fewer than W tokens, only its first entries count.
        positions: the number of tokens so far of each row.
        layer: the layer's K, and the bias of its slots if it has one.
        competing: the slots to rank.
        group: how the heads of a group are combined.
        over: the slots over which a query's shares sum to 1: the "competing" ones, as in R-KV's
            code, or all "held" ones up to its own, as in SnapKV's; these must end with one slot for
            each of the newest W tokens, in order.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: shapes do not match, or `group` or `over` is unknown.
    """
    if competing.shape[2] != layer.capacity:
        raise ValueError(f"competing.shape={competing.shape}: must have {layer.capacity} slots")
    return run(
        "window_attention",
        implementation,
        BACKENDS,
        queries,
        positions,
        layer,
        competing,
        group=group,
        over=over,
    )
