"""Attends from one new query per head to the single tokens that a Selection lists."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.attention_arguments import check_shapes, check_stats
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.token_sparse_decode import reference
from jsparse.partials import AttentionOut, StatsKind
from jsparse.selection import Selection

_MAX_GROUP, _MAX_HEAD_DIM = 16, 256
_TYPES = ("bfloat16", "float16", "float32")


def _triton():
    from jsparse.pallas_kernels.token_sparse_decode import triton_gpu

    return triton_gpu.token_sparse_decode


def _refusal(q: Float[Array, "B N H"], layer: LayerCache, *_, **__) -> str | None:
    types = {array.dtype.name for array in (q, layer.k, layer.v)}
    if len(types) > 1 or types.isdisjoint(_TYPES):
        return (
            f"takes q, K and V of one type of {', '.join(_TYPES)}, not {', '.join(sorted(types))}"
        )
    group, head_dim = q.shape[1] // layer.lengths.shape[1], q.shape[2]
    if group > _MAX_GROUP:
        return f"takes at most {_MAX_GROUP} query heads per KV head, not {group}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return (
            f"takes head dimensions up to {_MAX_HEAD_DIM} that are multiples of 8, not {head_dim}"
        )
    return no_triton()


BACKENDS = (
    Backend("triton", _triton, _refusal),
    Backend("reference", lambda: reference.token_sparse_decode),
)


def token_sparse_decode(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    selection: Selection,
    *,
    sm_scale: float | None = None,
    stats: StatsKind | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> AttentionOut:
    """Computes attention of one query per head over the listed slots of its KV head.

    Rows are gathered one by one. Arguments, results and errors are those of `block_sparse_decode`,
    except that `selection` lists tokens, that `stats="listed_logits"` therefore reports on them,
    and that `implementation` is "triton", "reference", or None to pick.
    """
    check_shapes("token_sparse_decode", "token", q, layer, selection)
    check_stats(stats)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    options = {"sm_scale": sm_scale, "stats": stats, "dtype": dtype}
    return run("token_sparse_decode", implementation, BACKENDS, q, layer, selection, **options)
