"""Expected Attention drops the prompt tokens that future queries are expected to attend to least.

Paper: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (Devoto et al.), arXiv:2510.00636.

Queries before RoPE count as Gaussian. The expected weight of a key for a later query is then known
without the query: with mean μ and covariance Σ of a head's queries, R̄ the mean of the rotations of
the next positions, and u = R̄ᵀk,

    E[exp(q·k / √H)] = exp(μ·u / √H + uᵀΣu / 2H)

A slot's score is its share of these weights, averaged over the group's heads, plus ε, times ‖v‖.

Where we differ: μ and Σ are those of the prompt's last `window` queries, not of all; the newest
`recent` slots are kept, and have no part in the shares; heads compete for the slots of their layer
as in `ada_kv` (the paper's head-adaptive compression), with a limit, `cap`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import read_heads
from jsparse.cache.key_constants import angles_at, rotated
from jsparse.hyper_parameters import number_in, whole_number
from jsparse.policies.eviction.budgets import layer_budget
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, ScoreFn, Settings
from jsparse.policy import Policy
from jsparse.shapes import Rows

FUTURE = 512  # the positions over which rotations are averaged, as in the authors' code
EPSILON = 0.02


@builder
def expected_attention(
    budget: int = 1024,
    sink: int = 4,
    recent: int = 32,
    window: int = 512,
    epsilon: float = EPSILON,
    floor: float = 0.2,
    cap: float = 4,
) -> Policy:
    """Keeps the slots with the most expected attention, the sinks, and all new tokens.

    Args:
        budget: the average number of prompt slots kept per KV head, including sinks and `recent`.
        sink: the number of first slots that are kept, and whose queries do not count.
        recent: the number of newest prompt slots that are kept.
        window: the number of last queries whose mean and covariance count.
        epsilon: the term added to each share, so that values of large norm are kept.
        floor: as in `ada_kv`; 1: all heads keep the same number.
        cap: as in `ada_kv`.
    """
    for name, value, least in (("sink", sink, 0), ("recent", recent, 0), ("window", window, 1)):
        whole_number(name, value, least)
    number_in("epsilon", epsilon, "[0, inf)")
    settings = Settings(
        expected_share(sink, epsilon),
        **layer_budget(budget, sink + recent, floor, cap)._asdict(),
        window=window,
        sink=sink,
        recent=recent,
        needs=("rope_frequencies",),
    )
    return evicting(settings)


def expected_share(sink: int, epsilon: float) -> ScoreFn:
    """Scores slots by their expected share of attention and the norm of their values."""

    def score(view: LayerView) -> Float32[Array, "B K S"]:
        frequencies = (view.constants or {})["rope_frequencies"]
        at = positions_of(view.ring.shape[1], view.positions)
        queries = rotated(view.ring, angles_at(-at, frequencies)[:, :, None])
        mean, covariance = statistics(queries, at >= sink)
        future = view.positions[:, None] + jnp.arange(FUTURE, dtype=jnp.int32)
        turn = jnp.mean(angles_at(future, frequencies), axis=1)
        cos, sin = jnp.split(turn[:, None, None], 2, axis=-1)
        k, v = (read_heads(pool, view.kv).astype(jnp.float32) for pool in (view.kv.k, view.kv.v))
        u = rotated(k, jnp.concatenate([cos, -sin], axis=-1))
        share = mean_share(u, mean, covariance, view.competing)
        return (share + epsilon) * jnp.linalg.norm(v, axis=-1)

    return score


def positions_of(window: int, positions: Rows) -> Int32[Array, "B W"]:
    """Returns the positions of a ring's queries; negative ones are empty."""
    newest = positions[:, None] - 1
    return newest - (newest - jnp.arange(window, dtype=jnp.int32)) % window


def statistics(
    queries: Float32[Array, "B W N H"], counted: Bool[Array, "B W"]
) -> tuple[Float32[Array, "B N H"], Float32[Array, "B N H H"]]:
    """Returns the mean and the covariance of each head's queries; 0 without any."""
    weight = counted / jnp.maximum(jnp.sum(counted, axis=1, keepdims=True), 1)
    exact = jax.lax.Precision.HIGHEST
    mean = jnp.einsum("bw,bwnh->bnh", weight, queries, precision=exact)
    centred = queries - mean[:, None]
    return mean, jnp.einsum("bw,bwnh,bwng->bnhg", weight, centred, centred, precision=exact)


def mean_share(
    u: Float[Array, "B K S H"],
    mean: Float32[Array, "B N H"],
    covariance: Float32[Array, "B N H H"],
    competing: Bool[Array, "B K S"],
) -> Float32[Array, "B K S"]:
    """Returns the slots' shares of the expected weights, averaged over the heads of a group."""
    batch, kv_heads, _, head_dim = u.shape
    by_group = (x.reshape(batch, kv_heads, -1, *x.shape[2:]) for x in (mean, covariance))
    exact = jax.lax.Precision.HIGHEST

    def of_head(head: tuple[Array, Array]) -> Float32[Array, "B K S"]:
        mean, covariance = head
        logits = jnp.einsum("bksh,bkh->bks", u, mean, precision=exact) / head_dim**0.5
        spread = jnp.einsum("bksh,bkhg->bksg", u, covariance, precision=exact)
        logits += jnp.sum(spread * u, axis=-1) / (2 * head_dim)
        logits = jnp.where(competing, logits, -jnp.inf)
        # a head without competing slots has no shares
        return jnp.where(competing, jax.nn.softmax(logits, axis=-1), 0.0)

    # one head of each group at a time: each takes as much memory as the keys
    return jnp.mean(jax.lax.map(of_head, tuple(jnp.moveaxis(x, 2, 0) for x in by_group)), axis=0)
