"""Rotates the heads of new tokens and writes their K and V to the cache."""

from jaxtyping import Array, Int32

from jsparse.cache import LayerCache
from jsparse.heads import Heads
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import MAX_HEADS, Backend, no_triton, run, wide_rows
from jsparse.pallas_kernels.rope_append import reference
from jsparse.parts import check_parts
from jsparse.shapes import ChunkKV, ChunkQueries, Rows


def _load_triton():
    from jsparse.pallas_kernels.rope_append import triton_gpu

    return triton_gpu.rope_append


def _refusal(heads: Heads, layer: LayerCache, *_) -> str | None:
    if layer.on_host:
        return "takes K and V on the device"
    batch, tokens = heads.qkv.shape[-4:-2]
    if batch * tokens > MAX_HEADS:
        return f"takes at most {MAX_HEADS} tokens of all rows, not {batch * tokens}"
    return wide_rows(heads.qkv.shape[-1]) or no_triton()


BACKENDS = (
    Backend("triton", _load_triton, _refusal),
    Backend("reference", lambda: reference.rope_append),
)


@checked()
def rope_append(
    heads: Heads,
    layer: LayerCache,
    positions: Int32[Array, "B T"],
    valid: Rows,
    *,
    implementation: str | None = None,
) -> tuple[ChunkQueries, ChunkKV, ChunkKV, LayerCache]:
    """Splits, normalises and rotates q, k and v of T tokens per row, and stores K and V.

    Args:
        heads: the product with the weights of q, k and v, [B, T, N + 2K, H], or its parts, [parts,
            B, T, N + 2K, H].
        layer: the cache's layer, with room for the tokens: its lengths already include them.
        positions: the tokens' positions in the text.
        valid: the number of tokens of each row, the first of the T; K and V of others are not
            stored.
        implementation: "triton" (one launch, in place), "reference", or None to choose.

    Returns:
        q and k after their norms and rotation, v, and the layer with K and V. k and v are as the
        layer holds them; NaN and infinities become 0, as `jsparse.cache.finite` explains.

    Raises:
        ValueError: heads do not match the layer or the table, or the named implementation cannot
            run here.
    """
    check_parts("qkv", heads.qkv, 4)
    batch, tokens, count, width = heads.qkv.shape[-4:]
    half = (batch, tokens, width // 2)
    if count != heads.num_heads + 2 * layer.lengths.shape[1]:
        raise ValueError(
            f"qkv.shape={heads.qkv.shape} of {heads.num_heads} query heads: must fit lengths of "
            f"shape {layer.lengths.shape}"
        )
    for name, part in zip(("cos", "sin"), heads.table, strict=True):
        if part.shape != half:
            raise ValueError(f"table: {name}.shape={part.shape}: must be [B, T, H / 2] = {half}")
    if any(scale.shape != (width,) for scale in heads.scales or ()):
        raise ValueError(f"scales: must be of the heads' width, {width}")
    return run("rope_append", implementation, BACKENDS, heads, layer, positions, valid)
