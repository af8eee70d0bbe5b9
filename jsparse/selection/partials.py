"""Attention partials (o, lse), their merging, and the statistics of attention."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

MeanStatsKind = Literal["page_mass", "token_logits"]  # the kinds of Stats
StatsKind = Literal[MeanStatsKind, "listed_logits"]


class Stats(NamedTuple):
    """Weights from each group's mean query, rounded to the queries' type, to slots.

    Attributes:
        scores: with "page_mass" float32[B, K, M], the un-normalised logsumexp of each logical
            page's attended slots; with "token_logits" float32[B, K, S], the logit of each slot.
            They are -inf where nothing was read.
        lse: the logsumexp over all attended slots; a page's share of the mass is exp(scores - lse).
    """

    scores: Float32[Array, "B K units"]
    lse: Float32[Array, "B K"]


class Summary(NamedTuple):
    """A substitute for tokens that a selection omits: a partial to merge into attention.

    Attributes:
        o, lse: the partial; lse = -inf if there is nothing to merge.
        attended, read: the tokens per head that it adds to the attended and read counts; one of
            whose K and V only one is read is half a token.
    """

    o: Float32[Array, "B N H"]
    lse: Float32[Array, "B N"]
    attended: Int32[Array, "B K"] | int = 0
    read: Int32[Array, "B K"] | int = 0


class ListedLogits(NamedTuple):
    """The logit of every query head for each token that its list made it attend to.

    There are C + 1 entries per head. Heads that are dense, attend to nothing or list pages report
    no entries.

    Attributes:
        ids: the slots of the attended tokens, ascending and distinct; past `count` they are 0. Ids
            past the head's length are omitted, and the newest token is last, listed or not.
        count: the number of valid entries.
        logits: q·k of each query head of the group, scaled and with bias; -inf past `count`.
        lse: their logsumexp, so that exp(logits - lse) are the weights; -inf if there are none.
    """

    ids: Int32[Array, "B K entries"]
    count: Int32[Array, "B K"]  # pyright: ignore[reportIncompatibleMethodOverride]
    logits: Float32[Array, "B K G entries"]
    lse: Float32[Array, "B K G"]


class AttentionOut(NamedTuple):
    """The whole output of attention, or a partial one with o in float32.

    A head that attended to nothing has o = 0 and lse = -inf.
    """

    o: Float[Array, "B N H"]
    lse: Float32[Array, "B N"]
    stats: Stats | ListedLogits | None = None


def merge(
    o1: Float32[Array, "*rows H"],
    lse1: Float32[Array, "*rows"],
    o2: Float32[Array, "*rows H"],
    lse2: Float32[Array, "*rows"],
) -> tuple[Float32[Array, "*rows H"], Float32[Array, "*rows"]]:
    """Merges attention over two disjoint sets into attention over their union.

    Splits, tiers, shards and summary tokens are all merged this way. An empty partial (lse = -inf)
    changes nothing; two of them give an empty one, never NaN.
    """
    lse = jnp.logaddexp(lse1, lse2)
    top = jnp.where(jnp.isneginf(lse), 0.0, lse)
    w1, w2 = jnp.exp(lse1 - top)[..., None], jnp.exp(lse2 - top)[..., None]
    return jnp.where(w1 > 0, w1 * o1, 0.0) + jnp.where(w2 > 0, w2 * o2, 0.0), lse


def softmax_partial(
    logits: Float32[Array, "*rows S"],
) -> tuple[Float32[Array, "*rows S"], Float32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns exp(logits - max), its sum and the logsumexp.

    -inf marks slots that are not attended to, and a row may be all -inf.
    """
    top = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1)
    return weights, total, jnp.log(total) + top[..., 0]


def group_weights(
    logits: Float32[Array, "*rows G n"],
    lse: Float32[Array, "*rows G"],
    counted: Bool[Array, "*rows n"],
) -> Float32[Array, "*rows n"]:
    """Returns the maximum over the group of the query heads' weights, divided by its sum."""
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]
    best = jnp.where(counted, jnp.max(logits - lse, axis=-2), -jnp.inf)
    # in logarithms: all counted weights may be far below a sink's
    weights, total, _ = softmax_partial(best)
    return weights / jnp.where(total > 0, total, 1.0)[..., None]
