"""Attends from one new query per head to the pages of a Selection."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache, PagePool
from jsparse.pallas_kernels.attention_arguments import check_list, no_rows
from jsparse.pallas_kernels.block_sparse_decode import reference
from jsparse.pallas_kernels.block_sparse_decode.cascade import cascade, lists_nothing
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_mosaic, run
from jsparse.selection import Selection
from jsparse.selection.partials import AttentionOut, ListedLogits, StatsKind

MAX_QUERIES = 64  # queries of a KV head, including the mean query of a report
# With more bytes of queries, K and V do not fit beside them in the Triton kernel on some GPUs. More
# float32 queries, which tensor cores do not multiply, do not fit in registers.
QUERY_BYTES, MAX_FLOAT32 = 16_384, 16


def _mosaic():
    from jsparse.pallas_kernels.block_sparse_decode import mosaic

    return mosaic.block_sparse_decode


def _not_mosaic(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    stats: StatsKind | None,
    **_: Any,
) -> str | None:
    reason = no_mosaic()
    if isinstance(layer.k, PagePool):
        reason = "takes K and V of the model's type on the device"
    head_dim, size = layer.k.shape[-1], layer.page_size
    # a report adds one query, the mean
    queries = q.shape[1] // layer.lengths.shape[1] + (stats is not None)
    if reason is None and not (
        q.dtype == layer.k.dtype == layer.v.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
    ):
        reason = f"takes bfloat16 or float16, not {q.dtype} with {layer.k.dtype}"
    elif reason is None and (head_dim % 64 or not 64 <= head_dim <= 256):
        reason = f"takes head dimensions of 64, 128, 192 and 256, not {head_dim}"
    elif reason is None and size not in (8, 16, 32, 64):
        reason = f"takes pages of 8, 16, 32 or 64 tokens, not {size}"
    elif reason is None and queries > MAX_QUERIES:
        reason = f"takes at most {MAX_QUERIES} queries per KV head, not {queries}"
    return reason


def _triton():
    from jsparse.pallas_kernels.token_sparse_decode import triton_gpu

    return triton_gpu.sparse_decode


def _not_triton(
    q: Float[Array, "B N H"], layer: LayerCache, *_: Any, stats: StatsKind | None, **__: Any
) -> str | None:
    if layer.on_host:
        return "takes K and V on the device"
    width = 1 << (q.shape[2] - 1).bit_length()  # the kernel pads to this
    most = MAX_FLOAT32 if q.dtype == jnp.float32 else MAX_QUERIES
    most = min(most, QUERY_BYTES // (width * q.dtype.itemsize))
    return no_rows(q, layer, max_group=most - (stats is not None))


BACKENDS = (
    Backend("mosaic", _mosaic, _not_mosaic),
    Backend("triton", _triton, _not_triton),
    Backend("reference", lambda: reference.block_sparse_decode),
)


@checked()
def block_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float | None = None,
    stats: StatsKind | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> AttentionOut:
    """Computes attention of one query per head over the selected pages of its KV head.

    Args:
        q: the queries, after RoPE.
        layer: the K and V pages, lengths, block table and bias. Pages of its shared `prefixes` are
            read once for all their rows (`cascade`) if every head is dense or empty and no report
            is requested.
        selection: the pages, at granularity "page"; `Selection` documents its fields.
        sm_scale: the factor of q·k; None: 1/√H.
        stats: the report: "page_mass" or "token_logits" of each group's mean query, "listed_logits"
            (empty for lists of pages), or None.
        dtype: the dtype of o; float32 if o will be merged with another partial.
        implementation: "mosaic" (Hopper; bfloat16 or float16, head dimensions divisible by 64),
            "triton" (compute capability 8 or more), "reference", or None for the first that can
            run.

    Returns:
        o, float32 lse, and stats if requested.

    Raises:
        ValueError: shapes, granularity or page size do not match.
    """
    check_list("block_sparse_decode", "page", layer, selection)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    if layer.prefixes is not None and stats is None and lists_nothing(selection):
        attend = partial(block_sparse_decode, sm_scale=sm_scale, implementation=implementation)
        return cascade(attend, q, layer, layer.prefixes, selection, dtype)
    of_mean = None if stats == "listed_logits" else stats
    options = {"sm_scale": sm_scale, "stats": of_mean, "dtype": dtype}
    out = run("block_sparse_decode", implementation, BACKENDS, q, layer, selection, **options)
    return out._replace(stats=_no_tokens(q, selection)) if stats == "listed_logits" else out


def _no_tokens(q: Float[Array, "B N H"], selection: Selection) -> ListedLogits:
    """Returns an empty report, with room for all tokens that such a token list could name."""
    batch, heads, capacity = selection.ids.shape
    entries = (batch, heads, q.shape[1] // heads, capacity + 1)
    return ListedLogits(
        jnp.zeros((batch, heads, capacity + 1), jnp.int32),
        jnp.zeros((batch, heads), jnp.int32),
        jnp.full(entries, -jnp.inf, jnp.float32),
        jnp.full(entries[:3], -jnp.inf, jnp.float32),
    )
