"""Implements `api.skinny_product` with XLA, in parts for the caller to add."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

# chosen by trials on an H200, with the products of models of 135M to 8B
MAX_ROWS = 32  # rows of x
COLUMNS = 14 * 2**10  # minimum of columns times parts, which keeps a GPU busy
MAX_PARTS = 8  # a single row returns twice the number of parts, half of them zeros
# rows per part: the minimum, the multiple for long parts, and the minimum of a long part
MIN_WIDTH, UNIT, SHORT = 128, 64, 512


def skinny_product(
    x: Float[Array, "*batch in"], matrix: Float[Array, "in out"], bias: None = None
) -> Float32[Array, "parts *batch out"]:
    """Implements `api.skinny_product` with XLA, in parts for the caller to add.

    XLA splits such products itself, and then adds the parts in another launch. It would multiply a
    single row without tensor cores, so a row of zeros is added, and its products are returned as
    parts.
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
    """Returns the number of parts that the rows of a matrix [in, out] are cut into."""

    def fit(parts: int) -> bool:
        rows, left = divmod(width, parts)
        return not left and rows >= MIN_WIDTH and (rows < SHORT or rows % UNIT == 0)

    parts = 1
    while parts * out < COLUMNS and parts < MAX_PARTS and fit(2 * parts):
        parts *= 2
    return parts
