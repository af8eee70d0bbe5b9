"""Packs the results of steps into one array per program: each transfer to the host costs time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jsparse.runtime.host_reader import shares
from jsparse.runtime.rows import Step
from jsparse.runtime.sampling import top_logprobs

# The results of n steps for each row: the token; the bits of its log-probability and of the shares
# attended and read; and on request the shares of each layer, and the likeliest tokens and their
# log-probabilities.
Packed = Int32[Array, "n B w"]


class TokenResult(NamedTuple):
    """Holds one token and the numbers of its step.

    Attributes:
        token, logprob: the token and its log-probability under the model's own softmax.
        attended, read: the shares of the positions so far that were attended and read.
        layers: these two shares for each layer, [2, L]; None unless the engine keeps them.
        top: the likeliest tokens and their log-probabilities; None unless requested.
    """

    token: int
    logprob: float
    attended: float
    read: float
    layers: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None


def pack(step: Step, num_layers: int, *, layer_stats: bool, top: bool) -> Int32[Array, "B w"]:
    """Returns one step's results of all rows; the shares of a first token are 0."""
    floats = [step.logprobs]
    if step.stats is None:
        floats += [jnp.zeros_like(step.logprobs)] * (2 + 2 * num_layers * layer_stats)
    else:
        floats += step.stats.over_layers()
        if layer_stats:
            floats += [*step.stats.attended, *step.stats.read]
    columns = [step.tokens[:, None], _bits(jnp.stack(floats, axis=1))]
    if top:
        likeliest = top_logprobs(step.logits)
        columns += [likeliest.ids, _bits(likeliest.logprobs)]
    return jnp.concatenate(columns, axis=1)


def unpack(row: np.ndarray, num_layers: int, layer_stats: bool) -> TokenResult:
    """Returns one step's results of one row of `Packed`."""
    floats = row.view(np.float32)
    at = 4 + (2 * num_layers if layer_stats else 0)
    half = (len(row) - at) // 2
    return TokenResult(
        int(row[0]),
        float(floats[1]),
        *shares(floats[2:4]).tolist(),
        # copied: a view would keep all rows' results as long as this answer
        layers=shares(floats[4:at]).reshape(2, num_layers) if layer_stats else None,
        top=(row[at : at + half], floats[at + half :]) if half else None,
    )


def _bits(x: Float32[Array, "B n"]) -> Int32[Array, "B n"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
