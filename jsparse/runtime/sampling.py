"""Samples the next token from logits, with options named as Hugging Face names them.

Decoding is greedy, or uses temperature, top-k, top-p and min-p; a repetition penalty applies to
both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.threshold import top_k_mask, top_p_mask


class Sampling(NamedTuple):
    """Holds the static sampling options.

    They apply in this order: repetition_penalty, temperature, top_k, top_p, min_p. At temperature 0
    the choice is greedy and only the repetition penalty matters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def validate(self) -> "Sampling":
        """Returns self; raises ValueError for a value outside its range."""
        rules = {
            "temperature": (self.temperature >= 0, "a number of at least 0 (0 is greedy)"),
            "top_k": (
                self.top_k >= 0 and self.top_k % 1 == 0,
                "an integer of at least 0 (0 is off)",
            ),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1 (1 is off)"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1 (0 is off)"),
            "repetition_penalty": (self.repetition_penalty > 0, "a number above 0 (1 is off)"),
        }
        for name, (ok, rule) in rules.items():
            value = getattr(self, name)
            if not ok or value != value or value in (float("inf"), float("-inf")):
                raise ValueError(f"{name}={value!r}: must be {rule}")
        return self


def sample(
    sampling: Sampling,
    logits: Float32[Array, "B V"],
    key: Array,
    step: Int32[Array, ""],
    seen: Bool[Array, "B V"] | None,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Samples the next token of each row and returns it with its log-probability.

    The log-probability is under the model's own softmax, before any of the options. Row b draws
    from the key folded with (step, b), so its choice does not depend on the rest of the batch.

    Args:
        sampling: the options.
        logits: the model's logits.
        key: a random key.
        step: the number of this new token.
        seen: the tokens in the text so far; only read if repetition_penalty is not 1.
    """
    log_probs = jax.nn.log_softmax(logits)
    if sampling.repetition_penalty != 1.0 and seen is not None:
        penalised = jnp.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
        logits = jnp.where(seen, penalised, logits)
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    else:
        rows = jnp.arange(logits.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, step), row))(rows)
        tokens = jax.vmap(jax.random.categorical)(keys, truncated(sampling, logits)).astype(
            jnp.int32
        )
    return tokens, jnp.take_along_axis(log_probs, tokens[:, None], -1)[:, 0]


def truncated(sampling: Sampling, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Scales the logits by the temperature and sets those that the options rule out to -inf.

    top_k and top_p keep exactly the set they name; equal logits at the edge go to the lowest token
    id.
    """
    logits = (
        logits - logits.max(-1, keepdims=True)
    ) / sampling.temperature  # no overflow, however cold
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = jnp.where(top_k_mask(logits, sampling.top_k), logits, -jnp.inf)
    if sampling.top_p < 1:
        logits = jnp.where(top_p_mask(jax.nn.softmax(logits), sampling.top_p), logits, -jnp.inf)
    if sampling.min_p > 0:
        probs = jax.nn.softmax(logits)
        logits = jnp.where(probs >= sampling.min_p * probs.max(-1, keepdims=True), logits, -jnp.inf)
    return logits


def mark_seen(
    seen: Bool[Array, "B V"] | None, tokens: Int32[Array, "B"]
) -> Bool[Array, "B V"] | None:
    """Returns `seen` with each row's new token marked."""
    return None if seen is None else seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
