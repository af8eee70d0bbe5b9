"""Measures the errors of a policy's selections by layer and head, on queries of real text.

`measured` wraps a policy: it decodes as before, and its state also accumulates how each selection
compares with dense attention on the same query and cache. The decode step is unchanged.

    forcing = force(params, [measured("streaming(sink=4, recent=512)")], prompts, max_new_tokens=64)
    print(attention_metrics(forcing)[0].heads.recall.mean())
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.builder import builder, require_policy, require_stays
from jsparse.cache import CacheSpec, LayerCache, StepView, read_heads
from jsparse.evaluation.teacher_forcing import Forcing
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.threshold_select.reference import pooled
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.expressions import parse
from jsparse.policies.oracle import attention_logits
from jsparse.policy import Policy, at_layer, selected
from jsparse.runtime.decode_step import dense_rows
from jsparse.runtime.spread_programs import on_host
from jsparse.selection import Selection
from jsparse.selection.attended import count_tokens, token_mask
from jsparse.selection.partials import Summary, merge, softmax_partial
from jsparse.selection.threshold import top_k_mask
from jsparse.shapes import Lengths, Queries, Rows


class HeadMetrics(NamedTuple):
    """A selection compared with dense attention on the same queries and cache, by row and KV head.

    Mass and errors are means over the group of query heads of a KV head. Every policy attends to
    the newest token, which does not count for recall.

    Attributes:
        recall: the share of the k tokens with the largest weights that the selection covers; k is
            `top_k` of `measured`, or the number of attended tokens. A token's weight is the largest
            in the group, as for oracle_top_k; ties go to the oldest.
        mass: the share of the exact softmax's mass that the selection covers; a summary covers
            none.
        output_error: ‖o - ô‖ / ‖o‖, with the summary merged into ô.
        lse_error: |lse - lŝe| in nats, with the summary merged; infinite if nothing was attended.
        attended: the attended tokens over the positions so far.
        pages: the pages with any attended token, over the head's pages.
        bytes_read: the bytes of K and V that are read, as whole pages, without the policy's own
            reads for selection.
    """

    recall: Float32[Array, "B K"]
    mass: Float32[Array, "B K"]
    output_error: Float32[Array, "B K"]
    lse_error: Float32[Array, "B K"]
    attended: Float32[Array, "B K"]
    pages: Float32[Array, "B K"]
    bytes_read: Float32[Array, "B K"]


class AttentionMetrics(NamedTuple):
    """Means over decode steps.

    Attributes:
        heads: HeadMetrics of float32[L, B, K] arrays; NaN for a layer that selected nothing.
        steps: the number of selections of each layer; steps that fell back to dense attention do
            not count.
    """

    heads: HeadMetrics
    steps: Int32[np.ndarray, "L"]


class MetricSums(NamedTuple):
    """One layer's sums over the steps so far, and their number in each row."""

    heads: HeadMetrics
    steps: Int32[Array, "B"]


@builder
def measured(policy: Policy | str, top_k: int = 0) -> Policy:
    """Wraps a policy so that its state accumulates HeadMetrics of every selection.

    `top_k` is k of the recall; 0: the number of tokens that the head attends to, at least 1.
    """
    whole_number("top_k", top_k, 0)
    base = parse(policy) if isinstance(policy, str) else policy
    require_policy("policy", base)
    require_stays("policy", base, "since dense attention over what is left is no yardstick")

    def init(spec: CacheSpec) -> tuple[MetricSums, ...]:
        def zeros() -> Float32[Array, "B K"]:
            return jnp.zeros((spec.batch, spec.num_kv_heads), jnp.float32)

        def layer() -> MetricSums:
            heads = HeadMetrics(*(zeros() for _ in HeadMetrics._fields))
            return MetricSums(heads, jnp.zeros(spec.batch, jnp.int32))

        return tuple(layer() for _ in range(spec.num_layers))

    def select(state: WrappedState, layer: int, q: Queries, view: StepView):
        choice = base.select(state.base, layer, q, view)
        chosen, summary, inner = selected(base, state.base, choice)
        heads, steps = state.own[layer]
        attended = dense_rows(base, layer, chosen, summary, view)
        new = _head_metrics(q, view.layers[layer], view.positions, *attended, top_k)
        added = MetricSums(jax.tree.map(jnp.add, heads, new), steps + 1)
        return chosen, summary, WrappedState(inner, at_layer(state.own, layer, added))

    return with_state(base, init, select=select)._replace(reads=None)


def attention_metrics(forcing: Forcing) -> list[AttentionMetrics]:
    """Compares the selections of `measured` policies with dense attention under teacher forcing.

    The queries are those of the policy's own run, so they include the errors of earlier layers.
    There is an entry per policy of the forcing, in order, without its dense reference.

    Raises:
        ValueError: a policy is not measured.
    """
    return [_metrics_of(forcing, index) for index in range(1, len(forcing.shared.policies))]


def _metrics_of(forcing: Forcing, index: int) -> AttentionMetrics:
    state = forcing.shared.prefilled[index].state
    if not isinstance(state, WrappedState) or not any(isinstance(x, MetricSums) for x in state.own):
        raise ValueError(
            f"policy={forcing.shared.policies[index]}: must be wrapped in measured(...)"
        )
    sums = on_host(forcing.last_state(index).own, forcing.shared.params.mesh)
    steps = np.stack([layer.steps[0] for layer in sums])
    with np.errstate(invalid="ignore"):
        heads = jax.tree.map(
            lambda *layers: np.stack(layers) / np.float32(steps[:, None, None]),
            *(layer.heads for layer in sums),
        )
    return AttentionMetrics(heads, steps)


def _head_metrics(
    q: Queries,
    layer_cache: LayerCache,
    positions: Rows,
    chosen: Selection,
    summary: Summary | None,
    top_k: int,
) -> HeadMetrics:
    """Computes one step's metrics in plain jnp, reading all the head's tokens."""
    logits, values = (
        attention_logits(q, layer_cache),
        read_heads(layer_cache.v, layer_cache).astype(jnp.float32),
    )
    mask = token_mask(
        chosen,
        layer_cache.lengths,
        num_pages=layer_cache.num_pages,
        page_size=layer_cache.page_size,
    )
    exact_o, exact_lse = _attend(logits, values)
    o, kept_lse = _attend(jnp.where(mask[:, :, None], logits, -jnp.inf), values)
    lse = kept_lse
    if summary is not None:
        summary = Summary(*summary)
        parts = (summary.o, summary.lse)
        o, lse = merge(o, lse, *(part.reshape(*lse.shape, *part.shape[2:]) for part in parts))
    error = jnp.linalg.norm(exact_o - o, axis=-1) / jnp.linalg.norm(exact_o, axis=-1)
    attended, read = count_tokens(chosen, layer_cache.lengths, layer_cache.page_size)
    if summary is not None:
        attended, read = attended + summary.attended, read + summary.read
    return HeadMetrics(
        recall=_recall(pooled(logits, softmax=True), mask, layer_cache.lengths, top_k),
        mass=jnp.mean(jnp.exp(kept_lse - exact_lse), axis=-1),
        output_error=jnp.mean(error, axis=-1),
        lse_error=jnp.mean(jnp.abs(exact_lse - lse), axis=-1),
        attended=attended / (positions[:, None] + 1),
        pages=jnp.sum(
            mask.reshape(*layer_cache.lengths.shape, -1, layer_cache.page_size).any(-1), -1
        )
        / jnp.maximum(-(-layer_cache.lengths // layer_cache.page_size), 1),
        bytes_read=float(layer_cache.slot_bytes) * read,
    )


def _attend(
    logits: Float32[Array, "B K G S"], values: Float32[Array, "B K S H"]
) -> tuple[Float32[Array, "B K G H"], Float32[Array, "B K G"]]:
    """Returns (o, lse) in float32."""
    weights, total, lse = softmax_partial(logits)
    o = jnp.einsum("bkgs,bksh->bkgh", weights, values, precision="highest")
    return o / jnp.where(total == 0, 1.0, total)[..., None], lse


def _recall(
    weights: Float32[Array, "B K S"], mask: Bool[Array, "B K S"], lengths: Lengths, top_k: int
) -> Float32[Array, "B K"]:
    newest = jnp.arange(mask.shape[-1], dtype=jnp.int32) == lengths[..., None] - 1
    kept = mask & ~newest
    k = top_k or jnp.maximum(jnp.sum(kept, -1, dtype=jnp.int32), 1)
    top = top_k_mask(jnp.where(newest, -jnp.inf, weights), k)
    return jnp.sum(top & kept, -1) / jnp.maximum(jnp.sum(top, -1), 1)
