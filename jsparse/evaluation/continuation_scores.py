"""Scores continuations of texts by one dense pass, for jsparse.evaluation.lm_eval."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.models.checkpoint import Params
from jsparse.runtime import capacity, scoring


def score_continuations(
    params: Params, rows: list[list[int]], counts: list[int], *, page_size: int
) -> list[tuple[float, bool]]:
    """Scores each row's last `counts` tokens: log-likelihood, and whether all are greedy."""
    longest = max(map(len, rows)) - 1
    width = min(capacity.bucket(longest, page_size), params.config.max_position_embeddings)
    tokens = np.zeros((len(rows), width + 1), np.int32)
    scored = np.zeros((len(rows), width), np.bool_)
    for b, (ids, count) in enumerate(zip(rows, counts, strict=True)):
        tokens[b, : len(ids)] = ids
        scored[b, len(ids) - 1 - count : len(ids) - 1] = True
    logits = scoring.logits(params, tokens[:, :-1])
    values, greedy = jax.device_get(_log_likelihoods(logits, tokens[:, 1:], scored))
    return list(zip(values.tolist(), greedy.tolist(), strict=True))


@jax.jit
def _log_likelihoods(
    logits: Float32[Array, "B T V"], targets: Int32[Array, "B T"], scored: Bool[Array, "B T"]
) -> tuple[Float32[Array, "B"], Bool[Array, "B"]]:
    """Returns the summed log-probabilities of each row's scored targets, and if all are greedy."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_probs = picked - jax.nn.logsumexp(logits, axis=-1)
    greedy = jnp.argmax(logits, axis=-1) == targets
    return jnp.sum(log_probs, axis=-1, where=scored), jnp.all(greedy, axis=-1, where=scored)
