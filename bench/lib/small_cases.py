"""Calls every op with a kernel on small cases that cover its branches.

bench.sanitize runs them on a GPU, bench.compile_kernels compiles their kernels, and
bench.interpret_kernels runs these on a CPU.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jsparse.cache import HostPages
from jsparse.models.quantized import to_blocks
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.centroid_update import centroid_update
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.expert_choice import expert_choice
from jsparse.pallas_kernels.expert_product import expert_product
from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.group_means import group_means
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.merge_splits import merge_splits
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.new_token_attention import new_token_attention
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.pallas_kernels.place_logits import place_logits
from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.pallas_kernels.rope_append import rope_append
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.table_candidates import table_candidates
from jsparse.pallas_kernels.table_update import table_update
from jsparse.pallas_kernels.threshold_select import threshold_select
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.pallas_kernels.window_attention import window_attention
from tests.kernels.cases import block_sparse_decode as block_sparse_cases
from tests.kernels.cases import block_sparse_prefill_mosaic as block_sparse_prefill_cases
from tests.kernels.cases import centroid_scores as centroid_cases
from tests.kernels.cases import centroid_update as update_cases
from tests.kernels.cases import compact_pages as compact_cases
from tests.kernels.cases import expert_choice as expert_choice_cases
from tests.kernels.cases import expert_product as expert_product_cases
from tests.kernels.cases import gated_product as gated_cases
from tests.kernels.cases import group_means as means_cases
from tests.kernels.cases import int4_scores as int4_cases
from tests.kernels.cases import nearest_centroid as nearest_cases
from tests.kernels.cases import new_token_attention as new_token_cases
from tests.kernels.cases import norm_product as norm_product_cases
from tests.kernels.cases import page_bounds as bounds_cases
from tests.kernels.cases import place_logits as place_cases
from tests.kernels.cases import quantized_product as quantized_cases
from tests.kernels.cases import residual_norm as norm_cases
from tests.kernels.cases import rope_append as rope_cases
from tests.kernels.cases import row_gather as gather_cases
from tests.kernels.cases import row_scatter as scatter_cases
from tests.kernels.cases import runs_to_tokens as runs_cases
from tests.kernels.cases import shared_counts as shared_cases
from tests.kernels.cases import skinny_product as skinny_cases
from tests.kernels.cases import table_candidates as candidate_cases
from tests.kernels.cases import table_update as table_cases
from tests.kernels.cases import threshold_select as select_cases
from tests.kernels.cases import token_sparse_decode as token_sparse_cases
from tests.kernels.cases import window_attention as window_cases
from tests.support.host_layers import lent, refill


class Op(NamedTuple):
    """An op under test.

    Attributes:
        call: calls the op, given a case and its inputs.
        cases: cases that cover its branches.
        build: makes the inputs of a case.
    """

    call: Callable[[Any, Any], Any]
    cases: Mapping[str, Any]
    build: Callable[[Any], Any] = lambda case: case.build()


def named(cases: Iterable[Any], names: str) -> dict[str, Any]:
    there = {case.name: case for case in cases}
    return {name: there[name] for name in names.split()}


def attention(op: Callable[..., Any], implementation: str, case: Any, inputs: Any) -> Any:
    return [
        jax.jit(partial(op, sm_scale=case.sm_scale, stats=stats, implementation=implementation))(
            *inputs
        )
        for stats in (None, "token_logits", "listed_logits")
    ]


def attention_in_few_units(case: Any, inputs: Any) -> Any:
    """Attends with up to two units per head, so that those of long lists are longer."""
    from jsparse.pallas_kernels.token_sparse_decode import triton_gpu

    tiling = triton_gpu.TokenTiling(32, unit_blocks=1, max_units=2)
    with patch.multiple(
        triton_gpu, default_tiling=lambda *_, **__: tiling, int8_tiling=lambda *_, **__: tiling
    ):
        return attention(token_sparse_decode, "triton", case, inputs)


def scores(op: Callable[..., Any], case: Any, inputs: Any) -> Any:
    return jax.jit(partial(op, sm_scale=case.sm_scale, implementation="triton"))(*inputs)


def int4_scored(case: Any, inputs: Any) -> Any:
    given, kept = inputs
    score = partial(int4_scores, sm_scale=case.sm_scale, implementation="triton")
    return jax.jit(score)(*given, **kept)


def framed_bounds(case: Any) -> Any:
    """Returns page bounds' inputs in a frame, and the frame."""
    frame = bounds_cases.frame_for(case)
    return (*bounds_cases.build(case, frame=frame), frame)


def framed_scores(case: Any, inputs: Any) -> Any:
    """Recomputes the bounds of all slots, and scores them."""
    q, layer, bounds, frame = inputs
    append = partial(bounds_append, frame=frame, max_new=layer.capacity, implementation="triton")
    valid, first = layer.lengths[:, 0], jnp.zeros_like(layer.lengths)
    bounds = jax.jit(append)(bounds, layer, valid, first)
    group = "max" if case.table == "scrambled" else "mean"
    score = partial(page_bounds, frame=frame, slack=0.5, group=group, implementation="triton")
    return jax.jit(score)(q, layer, bounds)


def placed(case: Any, inputs: Any) -> Any:
    return [
        jax.jit(partial(place_logits, stats=stats, **case.options, implementation="triton"))(
            *inputs
        )
        for stats in ("token_logits", "page_mass")
    ]


def gathered(_: Any, inputs: Any) -> Any:
    """Gathers from a pool in device memory and from one in host memory."""
    pool, ids, count = inputs
    on_host = jax.device_put(
        pool, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    return [
        jax.jit(partial(row_gather, implementation="triton"))(rows, ids, count)
        for rows in (pool, on_host)
    ]


def scattered(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(row_scatter, implementation="triton"), donate_argnums=0)(*inputs)


def multiplied(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(quantized_product, implementation="mosaic"))(*inputs)


def multiplied_in_threads(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(quantized_product, implementation="triton"))(*inputs)


def multiplied_row(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(skinny_product, implementation="triton"))(*inputs)


def by_experts(case: Any, inputs: Any) -> Any:
    dtype = "float32" if case.weighted else None
    options = {"gated": case.gated, "dtype": dtype, "implementation": "triton"}
    return jax.jit(partial(expert_product, **options))(*inputs)


def experts_chosen(case: Any, inputs: Any) -> Any:
    options = {"normalized": case.normalized, "implementation": "triton"}
    return jax.jit(partial(expert_choice, k=case.k, **options))(*inputs)


def multiplied_norm(_: Any, inputs: Any) -> Any:
    eps = norm_product_cases.EPS
    return jax.jit(partial(norm_product, eps=eps, implementation="triton"))(*inputs)


def multiplied_gate(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(gated_product, implementation="triton"))(*inputs)


def norm_and_blocks(case: Any) -> Any:
    x, delta, scale, matrix, bias = norm_product_cases.build(case)
    return x, delta, scale, to_blocks(matrix.T), bias


def gate_and_blocks(case: Any) -> Any:
    gate_up, matrix = gated_cases.build(case)
    return gate_up, to_blocks(matrix.T)


def normed(case: Any, inputs: Any) -> Any:
    return jax.jit(partial(residual_norm, eps=case.eps, implementation="triton"))(*inputs)


def rotated(_: Any, inputs: Any) -> Any:
    heads, *rest = inputs

    def run(qkv: Any, *rest: Any) -> Any:
        return rope_append(heads._replace(qkv=qkv), *rest, implementation="triton")

    return jax.jit(run, donate_argnums=1)(heads.qkv, *rest)


def listed_runs(_: Any, inputs: Any) -> Any:
    arrays, capacity = inputs
    return jax.jit(partial(runs_to_tokens, capacity=capacity, implementation="triton"))(*arrays)


def centroids_scored(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(centroid_scores, implementation="triton"))(*inputs)


def averaged(case: Any, inputs: Any) -> Any:
    op = partial(group_means, max_groups=case.max_groups, implementation="triton")
    return jax.jit(op)(*inputs)


def nearest(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(nearest_centroid, implementation="triton"))(*inputs)


def updated(case: Any, inputs: Any) -> Any:
    op = partial(centroid_update, normalise=case.normalise, implementation="triton")
    return jax.jit(op)(*inputs)


def attended_by_window(_: Any, inputs: Any) -> Any:
    """Computes the shares of every head and those of groups, of competing slots and of all."""
    op = partial(window_attention, implementation="triton")
    ways = (op, partial(op, group="max"), partial(op, over="held"))
    return [jax.jit(way)(*inputs) for way in ways]


def chunk_attention(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(block_sparse_prefill, implementation="mosaic"))(*inputs)


def candidates(_: Any, inputs: Any) -> Any:
    op = partial(table_candidates, **inputs.kwargs, implementation="triton", rule=inputs.rule)
    return jax.jit(op)(*inputs[:3])


def tables_updated(_: Any, inputs: Any) -> Any:
    """Writes in place."""
    op = partial(table_update, **inputs.kwargs, implementation="triton")
    return jax.jit(op, donate_argnums=(0, 1))(*inputs[:5])


def splits(number: int) -> Any:
    """Returns partial results of `number` splits for three pairs, which use all, none and two."""
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.normal(size=(3, number, 8, 96)), jnp.float32)
    lse = jnp.asarray(rng.normal(size=(3, number, 8)), jnp.float32)
    return o, lse, jnp.array([number, 0, 2])


def joined(_: Any, inputs: Any) -> Any:
    return jax.jit(partial(new_token_attention, implementation="triton"))(*inputs)


def merged(_: Any, inputs: Any) -> Any:
    merge = partial(merge_splits, rows=5, lse_only=2, implementation="triton")
    return jax.jit(merge)(*inputs)


def listed_products(case: Any, inputs: Any) -> Any:
    """Multiplies every query by the rows that its KV head lists."""
    q, layer, listed = inputs[:3]
    grouped = q.reshape(*layer.lengths.shape, -1, q.shape[-1])
    return jax.jit(products)(grouped, layer.k, layer, listed.ids)


def shared(case: Any, inputs: Any) -> Any:
    return jax.jit(partial(shared_counts, **case.bounds, implementation="triton"))(*inputs)


def compacted(_: Any, inputs: Any) -> Any:
    """Compacts in place."""
    layer, keep, rewrite = inputs
    return jax.jit(partial(compact_pages, implementation="triton"), donate_argnums=0)(
        layer, keep, rewrite=rewrite
    )


def appended(append: Callable[..., Any], _: Any, inputs: Any) -> Any:
    """Appends in place."""
    return jax.jit(partial(append, implementation="triton"), donate_argnums=0)(*inputs)


def int4_appended(_: Any, inputs: Any) -> Any:
    """Appends in place."""
    given, kept = inputs
    return jax.jit(partial(int4_append, implementation="triton"), donate_argnums=0)(*given, **kept)


def int4_inputs(case: Any) -> Any:
    """Returns inputs for scoring, and the keys' format."""
    return int4_cases.build(case), int4_cases.options(case)


def int4_append_inputs(case: Any) -> Any:
    """Returns inputs that append each head's last five tokens (or all if fewer) once more."""
    (q, layer, keys, _), kept = int4_inputs(case)
    k = jnp.ones((case.batch, 5, case.kv_heads, q.shape[-1]), layer.k.dtype)
    return (keys, layer, k, jnp.full(case.batch, 5), jnp.maximum(layer.lengths - 5, 0)), kept


def bounds_append_inputs(case: Any) -> Any:
    """Returns the same for the page bounds."""
    built = bounds_cases.build(case)
    return (
        built.bounds,
        built.layer,
        jnp.full(case.batch, 5),
        jnp.maximum(built.layer.lengths - 5, 0),
    )


def on_host(case: Any) -> Any:
    """Returns the inputs with K and V in host memory; without a table, head 1 is resident."""
    q, layer, selection = case.build()
    heads = () if layer.block_table is not None else (1,)
    pages = HostPages(layer.k, layer.v)
    return q, lent(jax.jit(refill, static_argnums=(2, 3))(layer, pages, 2, heads), pages), selection


BOUNDS_CASES = "scrambled head_dim_40 bfloat16 codes codes_scrambled codes_head_dim_40"
MOSAIC_CASES = [
    *(case for case in block_sparse_cases.CASES if case.head_dim < 256),
    block_sparse_cases.Case("head_dim_256", head_dim=256, group=16, dense="mixed"),
    block_sparse_cases.Case(
        "many_splits", head_dim=128, num_pages=300, dense="mixed", table="scrambled"
    ),
]
OPS = {
    "threshold_select": Op(
        lambda case, i: threshold_select(i.scores, i.rule, **i.kwargs, implementation="triton"),
        named(
            select_cases.CASES,
            "top_p_union_capped top_k_per_head top_k_max_raw threshold_max "
            "top_p_bfloat16 top_k_long top_k_long_max top_p_long_row always always_masked "
            "always_max always_long budget_ties budget_capped mass_top_p mass_capped "
            "named_mass_pairs",
        ),
    ),
    "page_bounds": Op(
        partial(scores, page_bounds),
        named(bounds_cases.CASES, f"ragged head_dim_256 {BOUNDS_CASES}"),
        bounds_cases.build,
    ),
    "page_bounds_of_means": Op(
        partial(scores, partial(page_bounds, group="mean")),
        named(bounds_cases.CASES, "group_of_7 bfloat16 codes_group_of_7"),
        bounds_cases.build,
    ),
    "page_bounds_framed": Op(
        framed_scores,
        named(bounds_cases.CASES, "codes codes_scrambled codes_head_dim_40 codes_group_of_7"),
        framed_bounds,
    ),
    "token_sparse": Op(
        partial(attention, token_sparse_decode, "triton"),
        named(
            token_sparse_cases.CASES,
            "scrambled dense_and_sparse empty_list bfloat16_96 bfloat16_256 long_lists_of_all "
            "int8 int8_dense int8_long_lists",
        ),
    ),
    "token_sparse_few_units": Op(
        attention_in_few_units, named(token_sparse_cases.CASES, "dense_and_sparse int8_dense")
    ),
    "token_sparse_host": Op(
        partial(attention, token_sparse_decode, "triton"),
        named(
            token_sparse_cases.CASES, "scrambled dense_and_sparse int8_dense int8_long_lists int8"
        ),
        on_host,
    ),
    "block_sparse": Op(
        partial(attention, block_sparse_decode, "mosaic"),
        named(MOSAIC_CASES, "bits_16 dense_and_bits all_dense head_dim_256 many_splits"),
        lambda case: replace(case, dtype="bfloat16").build(),
    ),
    "block_sparse_prefill": Op(
        chunk_attention,
        {case.name: case for case in block_sparse_prefill_cases.CASES},
    ),
    "block_sparse_rows": Op(
        partial(attention, block_sparse_decode, "triton"),
        named(
            MOSAIC_CASES, "bits_16 dense_and_bits all_dense head_dim_96 head_dim_256 many_splits"
        ),
        lambda case: replace(case, dtype="bfloat16").build(),
    ),
    "block_sparse_int8": Op(
        partial(attention, block_sparse_decode, "triton"),
        {case.name: case for case in block_sparse_cases.INT8_CASES},
    ),
    "int4_scores": Op(
        int4_scored,
        named(
            int4_cases.CASES,
            "whole_scrambled whole_head_dim_96 8_of_128_channels bits_16 dense_and_sparse "
            "whole_in_frame_pages_of_64 in_frame_head_dim_40 in_frame_32_channels",
        ),
        int4_inputs,
    ),
    "int4_append": Op(
        int4_appended,
        named(
            int4_cases.CASES,
            "whole_scrambled whole_head_dim_96 8_of_128_channels bfloat16 "
            "in_frame_head_dim_40 in_frame_32_channels",
        ),
        int4_append_inputs,
    ),
    "bounds_append": Op(
        partial(appended, partial(bounds_append, max_new=5)),
        named(
            (*bounds_cases.CASES, *bounds_cases.INT8_CASES),
            f"head_dim_256 {BOUNDS_CASES} int8 codes_int8",
        ),
        bounds_append_inputs,
    ),
    "centroid_scores": Op(
        centroids_scored,
        named(
            centroid_cases.CASES,
            "any radii_bfloat16 group_of_20 odd many_blocks float16 units",
        ),
    ),
    "compact_pages": Op(
        compacted,
        named(
            compact_cases.CASES,
            "scrambled every_other_head pages_of_64 head_dim_96 many_chunks int8",
        ),
    ),
    "place_logits": Op(
        placed,
        named(
            place_cases.CASES,
            "any dense_and_listed pages_of_24 many_pages by_slot_dense by_slot_24",
        ),
    ),
    "shared_counts": Op(
        shared, named(shared_cases.CASES, "shares zeros absent an_empty_list odd_slots bfloat16")
    ),
    "quantized_product": Op(
        multiplied, named(quantized_cases.CASES, "few sixteen thirty chunks_left_over")
    ),
    "many_rows_product": Op(
        multiplied,
        named(quantized_cases.OTHERS, "many_rows many_rows_left_over pairs_of_programs one_tile")
        | {case.name: replace(case, batch=(50,)) for case in quantized_cases.OF_FORMS},
    ),
    "few_rows_product": Op(
        multiplied_in_threads,
        named(
            (*quantized_cases.CASES, *quantized_cases.OTHERS),
            "one_row columns_left_over one_block parts loud float32 odd_sizes",
        ),
    ),
    "skinny_product": Op(
        multiplied_row, named(skinny_cases.CASES, "one_row bias rows_left_over odd_sizes narrow")
    ),
    "expert_product": Op(
        by_experts,
        named(
            expert_product_cases.CASES,
            "one_row down few_rows few_down same_experts absent few_absent parts_of_pairs "
            "one_expert many_rows many_down many_alike",
        ),
    ),
    "expert_choice": Op(
        experts_chosen, named(expert_choice_cases.CASES, "few shares qwen3 equal all loud")
    ),
    "norm_product": Op(
        multiplied_norm,
        named(
            norm_product_cases.CASES,
            "one_row bias rows_left_over odd_sizes narrow delta_in_parts",
        ),
        norm_product_cases.build,
    ),
    "gated_product": Op(
        multiplied_gate,
        named(gated_cases.CASES, "one_row rows_left_over odd_sizes narrow"),
        gated_cases.build,
    ),
    "norm_product_of_blocks": Op(
        multiplied_norm,
        named(norm_product_cases.CASES, "bias rows_left_over narrow"),
        norm_and_blocks,
    ),
    "gated_product_of_blocks": Op(
        multiplied_gate, named(gated_cases.CASES, "one_row rows_left_over narrow"), gate_and_blocks
    ),
    "residual_norm": Op(normed, named(norm_cases.CASES, "few one_row odd_width parts")),
    "rope_append": Op(
        rotated,
        named(
            rope_cases.CASES,
            "plain paged normed odd_width narrower_cache broken several parts int8 int8_as_llama "
            "int8_broken",
        ),
    ),
    "row_gather": Op(gathered, named(gather_cases.CASES, "far_ids large_pages odd_width")),
    "row_scatter": Op(scattered, named(scatter_cases.CASES, "rows pages odd_width")),
    "runs_to_tokens": Op(
        listed_runs,
        named(runs_cases.CASES, "shared cut_in_a_long_run one_slot many_blocks outside odd"),
    ),
    "nearest_centroid": Op(nearest, named(nearest_cases.CASES, "any float32 few_points odd wide")),
    "group_means": Op(averaged, named(means_cases.CASES, "any float32 few_groups odd wide")),
    "centroid_update": Op(updated, named(update_cases.CASES, "any radii_of_points odd all_in_one")),
    "merge_splits": Op(merged, {"few": 5, "many": 33}, splits),
    "new_token_attention": Op(joined, {case.name: case for case in new_token_cases.CASES}),
    "listed_products": Op(
        listed_products,
        named(token_sparse_cases.CASES, "scrambled bfloat16_96 bfloat16_256 int8_dense"),
    ),
    "table_candidates": Op(
        candidates,
        named(
            candidate_cases.CASES,
            "best_ragged best_odd best_long best_striped best_inverted best_gap",
        ),
    ),
    "table_update": Op(tables_updated, named(table_cases.CASES, "any penalty odd one_slot long")),
    "window_attention": Op(
        attended_by_window,
        named(window_cases.CASES, "inside scrambled bias group_of_16 group_of_7 llama int8"),
    ),
}
# those that run on Mosaic GPU
MOSAIC = ("block_sparse", "block_sparse_prefill", "quantized_product", "many_rows_product")
