"""Merges a head's split attention results."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.merge_splits import reference


def _triton():
    from jsparse.pallas_kernels.merge_splits import triton_gpu

    return triton_gpu.merge_splits


BACKENDS = (
    Backend("triton", _triton, lambda *_, **__: no_triton()),
    Backend("reference", lambda: reference.merge_splits),
)


@checked()
def merge_splits(
    o: Float32[Array, "pairs splits R H"],
    lse: Float32[Array, "pairs splits R"],
    used: Int32[Array, "at_least_pairs"],
    rows: int,
    *,
    lse_only: int = 0,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> tuple[Float[Array, "pairs {rows-lse_only} H"], Float32[Array, "pairs {rows}"]]:
    """Merges the first `used` splits of each pair (row, KV head); the others are not read.

    Args:
        o: the partial results.
        lse: the logsumexp of each partial result; an empty one has o = 0 and lse = -inf.
        used: the number of splits of each pair, 0 ≤ used ≤ splits; 0 gives o = 0 and lse = -inf.
            Entries past the pairs are not read.
        rows: the number of rows to merge, the first of R.
        lse_only: the number of these rows, from the first on, for which only lse is returned.
        dtype: the dtype of the merged o.
        implementation: "triton", "reference", or None to choose.

    Returns:
        o of the merged rows without the first `lse_only`, and lse of all merged rows.

    Raises:
        ValueError: the shapes do not match.
    """
    if len(used) < len(o):
        raise ValueError(f"used.shape={used.shape}: must have an entry for each of {len(o)} pairs")
    if not 0 <= lse_only < rows <= o.shape[2]:
        raise ValueError(
            f"lse_only={lse_only}, rows={rows}: must be 0 <= lse_only < rows <= R = {o.shape[2]}"
        )
    return run(
        "merge_splits", implementation, BACKENDS, o, lse, used, rows, lse_only=lse_only, dtype=dtype
    )
