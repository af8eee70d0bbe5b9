"""Implements `api.skinny_product` with XLA, in parts that are still to be added up."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

# chosen by trials on an H200, with the products of models of 135M to 8B
MAX_ROWS = 32  # of x
COLUMNS = 14 * 2**10  # times parts, at least: as many keep a GPU busy
MAX_PARTS = 8  # one row returns twice as many, of which half are zeros
MIN_WIDTH, UNIT, SHORT = 128, 64, 512  # rows of a part: at least, and whole units where not short


def skinny_product(
    x: Float[Array, "*batch in"], matrix: Float[Array, "in out"], bias: None = None
) -> Float32[Array, "parts *batch out"]:
    """Implements `api.skinny_product` with XLA, in parts that are still to be added up.

    XLA cuts such products itself, and then adds the parts up in a launch. One row it would multiply
    without tensor cores; so it gets one of zeros beside it, whose products are parts, too.
    """
    (width, out), rows = matrix.shape, x.reshape(-1, x.shape[-1])
    parts = best_parts(width, out)
    if len(rows) == 1:
        rows = jnp.where(jnp.arange(2)[:, None] == 0, rows, 0)
    sums = jnp.einsum(
        "rpi,pio->pro",
        rows.reshape(len(rows), parts, -1),
        matrix.reshape(parts, -1, out),
        preferred_element_type=jnp.float32,
    )
    return sums.reshape(-1, *x.shape[:-1], out)


def best_parts(width: int, out: int) -> int:
    """Returns the number of parts into which the rows of a matrix [in, out] are cut."""

    def fit(parts: int) -> bool:
        rows, left = divmod(width, parts)
        return not left and rows >= MIN_WIDTH and (rows < SHORT or rows % UNIT == 0)

    parts = 1
    while parts * out < COLUMNS and parts < MAX_PARTS and fit(2 * parts):
        parts *= 2
    return parts
