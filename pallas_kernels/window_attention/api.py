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

    A query's shares are its softmax over the competing slots, all of which it must come after, or
    over everything that its head holds up to its own token. With group="mean" every query head has
    its own, and the mean is over the window and the group; with "max" the group has one per query,
    of the largest logits that any of its heads gives.

    Args:
        queries: the window, after RoPE, that of position p at p % W, or with over="competing" in
            any order; where rows have had fewer than W tokens, only the first of it count.
        positions: the number of tokens so far of each row.
        layer: the layer's K, and the bias of its slots where it has one.
        competing: the slots that count.
        group: the way in which the heads of a group are made one.
        over: the slots that a query's shares add up to 1 over: those that are "competing", as in
            R-KV's code, or all "held" ones up to its own, as in SnapKV's; these must end with one
            slot for each of the newest W tokens, in their order.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: shapes do not fit together, or `group` or `over` is neither.
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
