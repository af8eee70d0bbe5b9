"""Adds a sublayer's output to the residual stream and normalises the sum."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.residual_norm import reference

MAX_WIDTH = 2**14  # a program has a row in registers


def _load_triton():
    from jsparse.pallas_kernels.residual_norm import triton_gpu

    return triton_gpu.residual_norm


def _refusal(x: Float[Array, "rows D"], *_, **__) -> str | None:
    if x.shape[-1] > MAX_WIDTH:
        return f"takes rows of at most {MAX_WIDTH}, not {x.shape[-1]}"
    return no_triton()


BACKENDS = (
    Backend("triton", _load_triton, _refusal),
    Backend("reference", lambda: reference.residual_norm),
)


def check_delta(x: Float[Array, "*batch D"], delta: Float[Array, "*parts_and_batch D"]) -> None:
    """Raises ValueError unless x and delta, or delta's parts, can be added."""
    whole = delta.shape == x.shape and delta.dtype == x.dtype
    parts = delta.shape[1:] == x.shape and len(delta) > 0 and delta.dtype == jnp.float32
    if not whole and not parts:
        raise ValueError(
            f"delta={delta.dtype}{list(delta.shape)}: must be as x is, {x.dtype}{list(x.shape)}, "
            f"or one or more parts of that, of float32"
        )


@checked()
def residual_norm(
    x: Float[Array, "rows D"],
    delta: Float[Array, "rows D"] | Float[Array, "parts rows D"],
    scale: Float[Array, "D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Returns x + delta, and scale · (x + delta) / sqrt(mean((x + delta)²) + eps), RMSNorm.

    Both have the type of x; the mean is float32. Each factor of the normalised row is rounded to
    that type first, as in the checkpoints' own code.

    Args:
        x: the residual stream, a row per token.
        delta: added to x, of the same type; or float32 parts, whose sum is first rounded to that
            type (jsparse.parts).
        scale: the norm's weights.
        eps: added to the mean.
        implementation: "triton" (one launch), "reference", or None to choose.

    Raises:
        ValueError: shapes or types differ, or the named implementation cannot run here.
    """
    check_delta(x, delta)
    check_dtypes(x=x, scale=scale)
    return run("residual_norm", implementation, BACKENDS, x, delta, scale, eps=eps)
