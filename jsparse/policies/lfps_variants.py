"""Variants of LFPS from its paper, which are options of `lfps`: exact weights, and the bypass.

With exact weights the tables list more candidates than a head attends to, the best of max(Φ, Ψ) or
those above the paper's threshold, and the step's own weights choose among them. A head that
bypasses attends almost only to the sinks, so a mean replaces the rest of the prompt. Both read
keys, which the default does not; `jsparse.policies.lfps` describes the differences.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.cache import CacheSpec, LayerCache, read_heads, read_slots
from jsparse.pallas_kernels.table_candidates import Best, Kurtosis, table_candidates
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.selection import Selection
from jsparse.selection.partials import Summary, group_weights, merge, softmax_partial
from jsparse.shapes import HeadFlags, Lengths, Queries

Candidates = Literal["top", "threshold"]
Bypass = bool | Literal["mean"]
SINKS = 4
BYPASS_ABOVE, LOCAL = 0.85, 6  # ε, and the number of newest tokens that ρ counts
MAX_CANDIDATES = 2**31 - 1  # per head


class ExactSettings(NamedTuple):
    """The hyper-parameters of `lfps` for candidates among which exact weights choose."""

    candidates: Candidates
    a: float
    floor: bool
    wider: int


class PromptSummary(NamedTuple):
    """A summary of the prompt without the sinks, for a layer's bypass.

    Attributes:
        number: n, the number of tokens.
        key, value: their means K̄ and V̄.
        spread: σ̂², the variance of the last query's logits over its squared norm.
    """

    number: Lengths
    key: Float32[Array, "B K H"]
    value: Float32[Array, "B K H"]
    spread: Float32[Array, "B N"]


def chosen_exactly(
    exact: ExactSettings,
    q: Queries,
    kv: LayerCache,
    tables: tuple[Array, Array],
    number: Lengths,
    max_count: int,
) -> Selection:
    """Lists the `number` ≤ `max_count` heaviest candidates among at most wider · number."""
    # more candidates than slots mean no limit, and products must fit in 32 bits
    times = min(exact.wider, MAX_CANDIDATES // max_count)
    if exact.candidates == "threshold":
        min_count = number if exact.floor else jnp.zeros_like(number)
        rule = Kurtosis(exact.a, min_count, times * number)
    else:
        rule = Best(times * number)
    listed = min(max_count * times, kv.capacity)
    chosen = table_candidates(*tables, kv.lengths, rule, capacity=listed, sink=SINKS)
    return heaviest(q, kv, chosen, number, max_count)


def heaviest(
    q: Queries, kv: LayerCache, chosen: Selection, number: Lengths, capacity: int
) -> Selection:
    """Lists the `number` candidates with the largest weights, including sinks and the newest.

    The selection has their logits, so attention reads only their values.
    """
    nth = jnp.arange(chosen.ids.shape[-1], dtype=jnp.int32)
    valid = nth < chosen.count[..., None]
    always = (chosen.ids < SINKS) | (chosen.ids == kv.lengths[..., None] - 1)
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1])
    logits = products(grouped, kv.k, kv, chosen.ids) * q.shape[-1] ** -0.5
    lse = softmax_partial(jnp.where(valid[:, :, None], logits, -jnp.inf))[2]
    weights = group_weights(logits, lse, valid & ~always)
    weights = jnp.where(always, 2.0, weights)  # above any weight
    best = threshold_select(
        jnp.where(valid, weights, -jnp.inf)[:, :, None],
        TopK(number),
        capacity=capacity,
        weights="raw",
    )
    inside = jnp.arange(capacity, dtype=jnp.int32) < best.count[..., None]
    ids = jnp.where(inside, jnp.take_along_axis(chosen.ids, best.ids, axis=2), 0)
    return replace(best, ids=ids, logits=jnp.take_along_axis(logits, best.ids[:, :, None], axis=3))


def no_prompt(spec: CacheSpec) -> PromptSummary:
    """Returns the initial summary, before prefill."""
    heads = spec.batch, spec.num_kv_heads
    return PromptSummary(
        jnp.zeros(heads, jnp.int32),
        jnp.zeros((*heads, spec.head_dim), jnp.float32),
        jnp.zeros((*heads, spec.head_dim), jnp.float32),
        jnp.zeros((spec.batch, spec.num_heads), jnp.float32),
    )


def described(kv: LayerCache, last: Queries) -> PromptSummary:
    """Returns the summary of a prompt whose last query is `last`."""
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    counted = (slots >= SINKS) & (slots < kv.lengths[..., None])
    number = jnp.sum(counted, -1, dtype=jnp.int32)
    some = jnp.maximum(number, 1)[..., None]

    def mean(rows: Float[Array, "B K S H"]) -> Float32[Array, "B K H"]:
        rows = jnp.where(counted[..., None], rows.astype(jnp.float32), 0.0)
        return jnp.sum(rows, axis=2) / some

    keys, values = read_heads(kv.k, kv), read_heads(kv.v, kv)
    grouped = last.reshape(*kv.lengths.shape, -1, last.shape[-1])
    logits = scaled_products("bkgh,bksh->bkgs", grouped, keys)
    inside = counted[:, :, None]
    centre = jnp.sum(jnp.where(inside, logits, 0.0), -1, keepdims=True) / some[..., None]
    variance = jnp.sum(jnp.where(inside, (logits - centre) ** 2, 0.0), -1) / some
    norm = jnp.sum(jnp.square(last.astype(jnp.float32)), -1)
    spread = variance.reshape(norm.shape) / jnp.where(norm > 0, norm, 1.0)
    return PromptSummary(number, mean(keys), mean(values), spread)


class SinkAttention(NamedTuple):
    """The attention of a step's query heads to the sinks.

    Attributes:
        log_rho: log ρ, the estimated share of a head's attention that goes to the sinks.
        o, lse: the attention to the sinks only.
        rest: the estimated logsumexp of the rest of the prompt.
    """

    log_rho: Float32[Array, "B K G"]
    o: Float32[Array, "B K G H"]
    lse: Float32[Array, "B K G"]
    rest: Float32[Array, "B K G"]


def sink_attention(q: Queries, kv: LayerCache, prompt: PromptSummary) -> SinkAttention:
    """Returns the query heads' attention to the sinks (equations 5 and 6, in logarithms)."""
    lengths = kv.lengths[..., None]
    nth = jnp.arange(SINKS, dtype=jnp.int32) + 0 * lengths
    near = lengths - 1 - LOCAL + jnp.arange(LOCAL, dtype=jnp.int32)  # excludes the newest
    grouped = q.reshape(*kv.lengths.shape, -1, q.shape[-1])

    def logits_at(slots: Array, ok: Bool[Array, "B K n"]) -> Float32[Array, "B K G n"]:
        keys = read_slots(kv.k, kv, jnp.where(ok, slots, 0))
        logits = scaled_products("bkgh,bknh->bkgn", grouped, keys)
        return jnp.where(ok[:, :, None], logits, -jnp.inf)

    weights, total, sinks = softmax_partial(logits_at(nth, nth < lengths))
    local = softmax_partial(logits_at(near, near >= SINKS))[2]
    norm = jnp.sum(jnp.square(grouped.astype(jnp.float32)), -1)
    spread = prompt.spread.reshape(norm.shape)
    rest = jnp.log(prompt.number.astype(jnp.float32))[..., None] + norm * spread / 2
    rest += scaled_products("bkgh,bkh->bkg", grouped, prompt.key)
    log_rho = sinks - jnp.logaddexp(jnp.logaddexp(sinks, rest), local)
    values = read_slots(kv.v, kv, jnp.where(nth < lengths, nth, 0)).astype(jnp.float32)
    o = jnp.einsum("bkgn,bknh->bkgh", weights / total[..., None], values)
    return SinkAttention(log_rho, o, sinks, rest)


def bypassed(
    q: Queries, kv: LayerCache, prompt: PromptSummary, *, alone: bool
) -> tuple[HeadFlags, Summary]:
    """Returns the KV heads that bypass, and their output.

    It is the mean of the prompt's values if `alone`, else the sinks merged with it.
    """
    sinks = sink_attention(q, kv, prompt)
    passed = jnp.all(sinks.log_rho > math.log(BYPASS_ABOVE), axis=-1)
    mean = jnp.broadcast_to(prompt.value[:, :, None], sinks.o.shape)
    if alone:
        o, lse = mean, jnp.zeros_like(sinks.rest)
    else:
        o, lse = merge(sinks.o, sinks.lse, mean, sinks.rest)
    lse = jnp.where(passed[..., None], lse, -jnp.inf).reshape(q.shape[:2])
    attended = jnp.where(passed & (not alone), jnp.minimum(kv.lengths, SINKS), 0)
    read = jnp.where(passed, jnp.minimum(kv.lengths, SINKS + LOCAL), 0)
    return passed, Summary(o.reshape(q.shape), lse, attended, read)


def bypassing(
    chosen: Selection, q: Queries, kv: LayerCache, prompt: PromptSummary, *, alone: bool
) -> tuple[Selection, Summary]:
    """Empties the selections of heads that bypass; `alone` is as in `bypassed`."""
    passed, summary = bypassed(q, kv, prompt, alone=alone)
    count = jnp.where(passed, 0, chosen.count)
    ids = jnp.where(passed[..., None], 0, chosen.ids)
    return replace(chosen, ids=ids, count=count), summary


def scaled_products(letters: str, q: Array, keys: Array) -> Array:
    """Returns float32 logits of rows of q and keys, summed over the last axis of both."""
    products = jnp.einsum(letters, q, keys, preferred_element_type=jnp.float32)
    return products * q.shape[-1] ** -0.5
