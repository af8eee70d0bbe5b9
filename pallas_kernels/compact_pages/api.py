"""Rewrites the tokens that each KV head keeps into its first slots, in place."""

import jax.numpy as jnp

from jsparse.cache import LayerCache, truncate
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.compact_pages import reference
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.selection import Selection
from jsparse.shapes import HeadFlags


def _load_triton():
    from jsparse.pallas_kernels.compact_pages import triton_gpu

    return triton_gpu.move_rows


BACKENDS = (
    Backend("triton", _load_triton, lambda *_: no_triton()),
    Backend("reference", lambda: reference.move_rows),
)


@checked()
def compact_pages(
    layer: LayerCache,
    keep: Selection,
    *,
    rewrite: HeadFlags | None = None,
    implementation: str | None = None,
) -> LayerCache:
    """Moves row `keep.ids[b, k, j]` of each head to its row j, and forgets the head's other rows.

    K, V, and bias and positions where the layer has them, move together; the order stays. The
    head's length becomes `keep.count`, and pages that become empty go back to the free list. Rows
    at or past the new length keep what they hold. Pools are changed in place where the caller's jit
    donates them, and copied first where it does not.

    No page of a rewritten head may also belong to another head: its rows would be overwritten.

    Args:
        layer: the pages, lengths and block table.
        keep: the rows to keep, at granularity "token", taken literally: the newest token stays only
            if listed. Ids are distinct, ascending and below the head's length. Dense heads keep
            everything.
        rewrite: heads to rewrite; the others stay as they are, whatever `keep` lists for them. None
            is all.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: `keep` is no list of tokens, or shapes do not fit together.
    """
    if keep.granularity != "token":
        raise ValueError(f"keep.granularity={keep.granularity!r}: compact_pages takes 'token'")
    if keep.bits is not None:
        raise ValueError(f"keep.bits.shape={keep.bits.shape}: must be None, tokens carry no bits")
    rewrite = jnp.ones(layer.lengths.shape, jnp.bool_) if rewrite is None else rewrite
    if keep.dense is not None:
        rewrite = rewrite & ~keep.dense
    moved = run(
        "compact_pages",
        implementation,
        BACKENDS,
        layer,
        keep.ids,
        jnp.where(rewrite, keep.count, 0),
    )
    return truncate(moved, jnp.where(rewrite, keep.count, layer.lengths))
