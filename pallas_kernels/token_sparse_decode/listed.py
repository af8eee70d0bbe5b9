"""The tokens of a "listed_logits" report."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.selection import Selection
from jsparse.shapes import Lengths


def listed_tokens(
    selection: Selection, lengths: Lengths
) -> tuple[Int32[Array, "B K entries"], Lengths]:
    """Returns the slots that each list of tokens makes its head attend to, and their number.

    They are `ids` and `count` of `ListedLogits`.
    """
    newest = lengths - 1
    nth = jnp.arange(selection.ids.shape[-1] + 1, dtype=jnp.int32)
    older = (nth[:-1] < selection.count[..., None]) & (selection.ids < newest[..., None])
    attends = (selection.count > 0) & (lengths > 0)
    if selection.dense is not None:
        attends &= ~selection.dense
    count = jnp.where(attends, jnp.sum(older, -1, dtype=jnp.int32) + 1, 0)
    # ids ascend: the older tokens come first, and the newest follows them
    last = count[..., None] - 1
    ids = jnp.pad(selection.ids, ((0, 0), (0, 0), (0, 1)))
    return jnp.where(nth < last, ids, jnp.where(nth == last, newest[..., None], 0)), count
