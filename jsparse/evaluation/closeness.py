"""Measures how close a policy is to dense attention: KL divergence, top-1 agreement, likelihood.

Every policy decodes the same tokens after the same dense prefill, so its whole distribution can be
compared with dense attention's at each step.

    result = closeness(force(params, ["streaming(sink=4, recent=512)"], prompts, max_new_tokens=64))
    print(result.policies, result.kl.mean(axis=(1, 2)), perplexity(result.logprob))
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.evaluation.selection_bytes import selection_bytes
from jsparse.evaluation.teacher_forcing import ForcedStep, Forcing
from jsparse.runtime.spread_programs import on_host
from jsparse.shapes import Rows


class Closeness(NamedTuple):
    """Comparison of R policies with dense attention over n steps; dense() comes first.

    Attributes:
        policies: the names of the R policies.
        tokens: the continuation; entry i + 1 is the token that step i had to predict.
        kl: KL(dense ‖ policy) over the vocabulary, in nats; rounding may leave it below 0.
        agreement: whether both have the same most likely token.
        logprob: the policy's log-probability of the next token, in nats.
        attended, read: shares of the positions so far that attention used, and whose K and V it
            read.
        bytes_share: the bytes that the step read, of K and V for attention and of anything to
            select, over those of K and V so far, which dense attention reads. See
            jsparse.evaluation.selection_bytes.
    """

    policies: tuple[str, ...]
    tokens: Int32[np.ndarray, "B n+1"]
    kl: Float32[np.ndarray, "R B n"]
    agreement: Bool[np.ndarray, "R B n"]
    logprob: Float32[np.ndarray, "R B n"]
    attended: Float32[np.ndarray, "R B n"]
    read: Float32[np.ndarray, "R B n"]
    bytes_share: Float32[np.ndarray, "R B n"]


def closeness(forcing: Forcing) -> Closeness:
    """Runs the policies and compares them with dense attention.

    No array of the vocabulary's size is copied to the host. Forcings of several batches with the
    same `max_length` and number of prompts run the same compiled programs.
    """
    names = forcing.shared.names
    tokens = np.asarray(forcing.tokens).T
    steps = (forcing.steps(index) for index in range(len(names)))
    compared = zip(*(compare(forcing.reference, taken) for taken in steps), strict=True)
    *others, read = map(np.stack, compared)
    return Closeness(names, tokens, *others, read=read, bytes_share=read + selecting(forcing))


def lengths(forcing: Forcing) -> Int32[np.ndarray, "B n"]:
    """Returns the number of tokens in the cache at each step, the newest included."""
    shared = forcing.shared
    prompts = on_host(shared.prefilled[0].cache.positions, shared.params.mesh)[:, None]
    return prompts + 1 + np.arange(len(forcing.reference), dtype=np.int32)


def selecting(forcing: Forcing) -> Float32[np.ndarray, "R B n"]:
    """Returns the bytes that selecting reads, over those of K and V so far.

    The arrays that it reads are as large as the final length needs.
    """
    shared, tokens = forcing.shared, lengths(forcing)
    spec = shared.spec._replace(num_pages=-(-int(tokens.max()) // shared.spec.page_size))
    read = [selection_bytes(shared.params, policy, spec) for policy in shared.policies]
    of_row = np.array(read) / (spec.batch * spec.ranks * spec.token_bytes)
    return (of_row[:, None, None] / tokens).astype(np.float32)


def perplexity(logprob: Float32[np.ndarray, "*axes B n"]) -> Float32[np.ndarray, "*axes"]:
    """Returns the exponential of the mean negative log-probability over rows and steps."""
    return np.exp(-np.mean(logprob, axis=(-2, -1)))


def windows(
    tokens: Sequence[int], length: int, scored: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Cuts a text into prompts and continuations for `closeness` to score token by token.

    Each window of `length` tokens becomes a prompt and a continuation of `scored` + 1 tokens; a
    decode step scores each of the last `scored`. A remainder is dropped. Quest (Tang et al.,
    arXiv:2406.10774) scores PG-19 through its decode step; here the earlier tokens are prefilled.

    Raises:
        ValueError: `scored` leaves no prompt, or there is no whole window.
    """
    if not 1 <= scored <= length - 2:
        raise ValueError(f"scored={scored}: must be from 1 to length - 2 = {length - 2}")
    if len(tokens) < length:
        raise ValueError(
            f"tokens: {len(tokens)} of them must fill at least one window of length={length}"
        )
    whole = [list(tokens[at : at + length]) for at in range(0, len(tokens) - length + 1, length)]
    split = length - scored - 1
    return [window[:split] for window in whole], [window[split:] for window in whole]


def compare(reference: Iterable[ForcedStep], steps: Iterable[ForcedStep]) -> list[np.ndarray]:
    """Returns kl, agreement, logprob, attended and read of a policy's steps, [B, n] each.

    The host waits once, at the end.
    """
    pairs = zip(reference, steps, strict=True)
    compared = [
        (*distances(exact.logits, step.logits, step.target), *step.stats) for exact, step in pairs
    ]
    return [np.stack(column, axis=-1) for column in zip(*jax.device_get(compared), strict=True)]


@jax.jit
def distances(
    exact: Float32[Array, "B V"], logits: Float32[Array, "B V"], target: Rows
) -> tuple[Float32[Array, "B"], Bool[Array, "B"], Float32[Array, "B"]]:
    """Returns kl, agreement and logprob, as in `Closeness`, of one step."""
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    agreement = jnp.argmax(exact, -1) == jnp.argmax(logits, -1)
    return kl, agreement, jnp.take_along_axis(q, target[:, None], axis=-1)[:, 0]
