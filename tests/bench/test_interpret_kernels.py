"""Tests the comparisons of bench.interpret_kernels, and runs it if Triton is installed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from bench.interpret_kernels import difference
from bench.lib.environment import REPOSITORY

WANTED = np.array([[1.0, -200.0, np.inf], [np.nan, 0.0, 3.0]], np.float32)
TENTH = np.float32(0.1)


def test_small_differences_are_accepted():
    for got in [WANTED, WANTED + TENTH * np.array([[1], [0]], np.float32)]:
        assert difference(got, WANTED) is None, got


def test_larger_differences_are_reported():
    for got, said in [
        (WANTED + TENTH, r"2 of 6, at first \[1, 1\]: 0.1\d* for 0.0"),
        (np.where(np.isnan(WANTED), TENTH, WANTED), r"1 of 6, at first \[1, 0\]: 0.1\d* for nan"),
        (np.where(np.isinf(WANTED), TENTH, WANTED), r"1 of 6, at first \[0, 2\]: 0.1\d* for inf"),
        (WANTED.astype(np.float16), r"float16\[2, 3\] for float32\[2, 3\]"),
        (WANTED[:1], r"float32\[1, 3\] for float32\[2, 3\]"),
    ]:
        assert re.fullmatch(said, difference(got, WANTED) or ""), got


def test_integers_must_be_equal():
    assert difference(np.array([1, 2]), np.array([1, 2])) is None
    assert difference(np.array([1, 2]), np.array([1, 3])) == "1 of 2, at first [1]: 2 for 3"


CASES = {
    "bounds_append": "scrambled codes_head_dim_40",
    "centroid_scores": "group_of_20 odd",
    "centroid_update": "radii_of_points",
    "compact_pages": "many_chunks",
    "expert_choice": "shares equal",
    "expert_product": "one_row same_experts few_absent many_down",
    "few_rows_product": "one_row float32",
    "group_means": "odd",
    "merge_splits": "few many",
    "new_token_attention": "few many_queries",
    "norm_product": "bias one_row",
    "page_bounds": "ragged",
    "place_logits": "any dense_and_listed by_slot_dense",
    "residual_norm": "few",
    "rope_append": "normed several int8",
    "row_gather": "far_ids odd_width",
    "row_scatter": "odd_width",
    "runs_to_tokens": "outside one_slot",
    "shared_counts": "an_empty_list",
    "table_update": "penalty",
    "threshold_select": "always_max top_p_bfloat16 top_p_long_row",
    "token_sparse": "dense_and_sparse int8_dense",
    "token_sparse_few_units": "dense_and_sparse",
    "window_attention": "inside bias",
}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("op", CASES)
def test_kernels_match_their_references(op):
    cases = CASES[op].split()
    done = subprocess.run(
        [sys.executable, "-m", "bench.interpret_kernels", "--only", op, "--cases", *cases],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases) and all("as the reference" in line for line in lines)
