"""Tests that apply to every op: names of cases, and errors for arguments that do not fit."""

import inspect
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest

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
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.new_token_attention import new_token_attention
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.pallas_kernels.place_logits import place_logits
from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.skinny_product import skinny_product
from jsparse.pallas_kernels.table_candidates import table_candidates
from jsparse.pallas_kernels.table_update import table_update
from jsparse.pallas_kernels.threshold_select import threshold_select
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.pallas_kernels.window_attention import window_attention

MODULES = sorted(path.stem for path in Path(__file__).with_name("cases").glob("[a-z]*.py"))
CASES = {name: import_module(f"tests.kernels.cases.{name}") for name in MODULES}


def first(op, nth=0):
    """Builds the inputs of a case of an op."""
    module = CASES[op]
    case = module.CASES[nth]
    return module.build(case) if hasattr(module, "build") else case.build()


def calls():
    """Valid positional and keyword arguments of each op."""
    q, layer, keys, _ = first("int4_scores")
    bounds = first("page_bounds").bounds
    new = np.zeros((2, 5, 2, 64), np.float32)
    counts, slots = np.full(2, 5, np.int32), np.zeros((2, 2), np.int32)
    scores, candidates, tables = map(
        first, ("threshold_select", "table_candidates", "table_update")
    )
    always = {"lengths": np.ones((2, 2), np.int32)}
    return {
        block_sparse_decode: (first("block_sparse_decode"), {}),
        block_sparse_prefill: (first("block_sparse_prefill"), {}),
        bounds_append: ((bounds, layer, counts, slots), {"max_new": 5}),
        centroid_scores: (first("centroid_scores"), {}),
        centroid_update: (first("centroid_update"), {"normalise": True}),
        compact_pages: (first("compact_pages")[:2], {}),
        expert_choice: (first("expert_choice"), {"k": 4, "normalized": True}),
        expert_product: (first("expert_product", 1), {}),
        gated_product: (first("gated_product"), {}),
        group_means: (first("group_means"), {"max_groups": 100}),
        int4_append: ((keys, layer, new, counts, slots), {}),
        int4_scores: ((q, layer, keys, None), {}),
        nearest_centroid: (first("nearest_centroid"), {}),
        new_token_attention: (first("new_token_attention"), {}),
        norm_product: (first("norm_product", 1), {"eps": 1e-5}),
        page_bounds: (first("page_bounds"), {}),
        place_logits: (
            first("place_logits"),
            {"stats": "page_mass", **CASES["place_logits"].CASES[0].options},
        ),
        quantized_product: (first("quantized_product"), {}),
        residual_norm: (first("residual_norm"), {"eps": 1e-5}),
        row_gather: (first("row_gather"), {}),
        row_scatter: (first("row_scatter"), {}),
        runs_to_tokens: (first("runs_to_tokens")[0], {"capacity": 64}),
        shared_counts: (first("shared_counts"), {"min_count": 1, "max_count": 9}),
        skinny_product: (first("skinny_product", 1), {}),
        table_candidates: (candidates[:4], candidates.kwargs),
        table_update: (tables[:5], tables.kwargs),
        threshold_select: (scores[:2], {"capacity": 4, **always}),
        token_sparse_decode: (first("token_sparse_decode"), {}),
        window_attention: (first("window_attention"), {}),
    }


def test_array_that_does_not_fit_is_named():
    """Of another dtype, or with two axes more: every array of every argument."""
    for op, (args, options) in calls().items():
        given = dict(zip(inspect.signature(op).parameters, args, strict=False)) | options
        leaves, tree = jax.tree.flatten_with_path(given)
        for nth, (path, leaf) in enumerate(leaves):
            name = path[0].key
            if not hasattr(leaf, "shape") or name == "pool":  # any dtype and rows
                continue
            wrong = [np.zeros(leaf.shape, np.complex64)]
            if name not in ("x", "gate_up"):  # any batch
                wrong.append(np.asarray(leaf)[None, None])
            for changed in wrong:
                values = [changed if i == nth else x for i, (_, x) in enumerate(leaves)]
                with pytest.raises(ValueError, match="must") as error:
                    op(**jax.tree.unflatten(tree, values))
                if changed.dtype == np.complex64:
                    assert str(error.value).startswith(name), (op.__name__, path)


def test_backends_are_those_of_the_op():
    for op, (args, options) in calls().items():
        message = rf"implementation='abacus': {op.__name__} has \[.*'reference'"
        with pytest.raises(ValueError, match=message):
            op(*args, **options, implementation="abacus")


def test_case_names_are_unique():
    for name, module in CASES.items():
        names = [case.name for case in getattr(module, "CASES", ())]
        assert len(set(names)) == len(names), name
