"""Compacts each KV head's kept tokens into its first slots, in place."""

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
    """Moves row `keep.ids[b, k, j]` of each head to its row j, and drops the head's other rows.

    K and V move together, with bias and positions if the layer has them; order is preserved. The
    head's length becomes `keep.count`, and emptied pages return to the free list. Rows at or past
    the new length are unchanged. Pools are updated in place if the caller's jit donates them, and
    copied first otherwise.

    A rewritten head must not share a page with another head, whose rows would be overwritten.

    Args:
        layer: the pages, lengths and block table.
        keep: the rows to keep, at granularity "token", taken literally: the newest token stays only
            if listed. Ids are distinct, ascending and below the head's length. Dense heads keep
            everything.
        rewrite: the heads to rewrite; for others `keep` is ignored. None: all.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: `keep` is not a list of tokens, or shapes do not match.
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
