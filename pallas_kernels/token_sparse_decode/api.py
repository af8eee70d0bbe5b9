"""Attends from one new query per head to the tokens that a Selection lists."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.attention_arguments import check_list, no_rows
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, run
from jsparse.pallas_kernels.token_sparse_decode import reference
from jsparse.selection import Selection
from jsparse.selection.partials import AttentionOut, StatsKind

_MAX_GROUP = 16


def _triton():
    from jsparse.pallas_kernels.token_sparse_decode import triton_gpu

    return triton_gpu.sparse_decode


def _not_triton(q: Float[Array, "B N H"], layer: LayerCache, *_, **__) -> str | None:
    return no_rows(q, layer, max_group=_MAX_GROUP)


BACKENDS = (
    Backend("triton", _triton, _not_triton),
    Backend("reference", lambda: reference.token_sparse_decode),
)


@checked()
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
    and that `implementation` is "triton", "reference", or None to choose.
    """
    check_list("token_sparse_decode", "token", layer, selection)
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    options = {"sm_scale": sm_scale, "stats": stats, "dtype": dtype}
    return run("token_sparse_decode", implementation, BACKENDS, q, layer, selection, **options)
