"""Tests bench.lychee_cluster_speed: parts, bytes and ratios by hand, and tiny runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import lychee_cluster_speed
from bench.lib.cluster_search import clusters_of, made, read_bytes
from bench.lib.kernel_cases import AttentionCase
from bench.lib.llama_8b import LLAMA_8B, boundary_constants
from bench.lychee_cluster_speed import (
    clustered,
    compared,
    index_times,
    line_of_length,
    main,
    parts,
    used_bytes,
)
from jsparse.policies.clusters.chunking import boundaries, cut, marks


@pytest.mark.slow
def test_random_tokens_are_cut_as_prose_is():
    slots = 8192
    shape = 1, slots
    ids = jax.random.randint(jax.random.key(0), shape, 0, LLAMA_8B.vocab_size, jnp.int32)
    classes = boundaries(marks(boundary_constants()["boundary_classes"], ids))
    chunks = cut(classes, 0, jnp.full(1, slots), capacity=slots // 8)
    assert slots / int(chunks.count[0]) == pytest.approx(13.7, abs=0.3)


def test_kernels_that_are_no_op_of_ours_count_as_scores():
    names = ["fusion", "gemm", "select_kernel", "list_kernel", "attend_kernel", "_merge"]
    kernels = {
        name: {"us": float(2**nth), "launches": 1 + (name == "gemm")}
        for nth, name in enumerate(names)
    }
    found = parts({"by_kernel": kernels})
    assert found == {"scores": 1 + 2 * 2, "choose": 4, "list": 8, "attend": 16 + 32}
    del kernels["list_kernel"]
    assert parts({"by_kernel": kernels}) == parts({}) == {}


def test_bytes_that_are_used_end_at_the_last_that_is_not_0():
    centroids = np.zeros((2, 3, 50, 128), np.float16)
    centroids[:, :, :20] = 1
    starts = np.arange(200, dtype=np.int32)[None]
    state = jnp.asarray(centroids), jnp.asarray(starts), jnp.zeros((1, 9), jnp.int32)
    assert used_bytes(state) == centroids.nbytes * 20 / 50 + starts.nbytes


def test_times_are_set_beside_bytes():
    case, budget = AttentionCase("x", 1, 4096, dense="all"), 256
    rows = [
        {"contender": name, "us": {"median": us}}
        for name, us in (("dense", 100.0), ("lychee_cluster", 18.0), ("packing", 32.0))
    ]
    dense, ours, packing = compared([*rows], {"lychee_cluster": 0}, case, budget, 16)
    assert "over_dense" not in dense and "over_dense" not in packing
    assert (ours["us_with_packing"], ours["over_dense"]) == (20.0, 100 / 18)
    assert ours["over_dense_bytes"] == 4096 / 256
    assert "over_dense" not in compared(rows[1:], {"lychee_cluster": 0}, case, budget, 16)[0]


def test_a_build_is_compared_to_the_dense_prompt_of_its_length():
    packed = {"packing_seconds_per_step": 1e-6, "used_share": 0.02, "allocated_share": 0.03}
    build = {"part": "index", "context": 64, "policy": "p", "build_seconds": {"median": 0.1}}
    prefills = [
        {"part": "prefill", "context": context, "policy": policy, "seconds": {"median": seconds}}
        for context, policy, seconds in ((64, "p", 1.0), (32, "dense", 1.0), (64, "dense", 2.0))
    ]
    assert "100.0 ms, 5.0% of prefill; packing 1 us" in line_of_length(build | packed, prefills)
    assert "prefill" not in line_of_length(build | packed, prefills[:2])


def test_keys_of_a_page_lie_around_a_direction():
    keys = np.asarray(clustered(0, 8, 16), np.float32)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    within = np.einsum("pah,pbh->pab", keys, keys).mean()
    across = np.einsum("ah,bh->ab", keys[0], keys[1]).mean()
    assert within > 0.7 > 0.2 > abs(across)


@pytest.mark.slow
def test_an_index_is_built_and_packed():
    row = index_times(512, "lychee_cluster(budget=256)", 2)
    assert 0 < row["used_bytes"] <= row["allocated_bytes"]
    assert 0.005 < row["used_share"] < row["allocated_share"] < 0.05
    assert min(row["build_seconds"]["min"], row["packing_seconds"]["min"]) > 0


def test_a_search_by_units_reads_the_centroids_of_those_that_were_chosen():
    """Of 13 units the best 8, or as many as hold 4 times the budget."""
    context, heads = 4096, 2 * 8
    index, clusters = made(0, 2, context), clusters_of(context)
    assert clusters == 157
    sizes = np.asarray(index.coarse.size)
    assert sizes.sum(-1).tolist() == [[clusters] * 8] * 2
    q = jnp.zeros((2, 32, 128), jnp.bfloat16)  # to which all units are worth the same
    few, all_of_them = read_bytes(index, q, 1), read_bytes(index, q, context)
    assert few["flat"] == all_of_them["flat"] == heads * clusters * 256
    read = sizes[..., :8].sum()  # of equal scores the first
    assert few["levels"] == read * 256 + heads * 13 * 256 + heads * clusters * 4
    assert all_of_them["levels"] == heads * (clusters * 260 + 13 * 256)
    assert few["chunks"] == heads * 2 * clusters * 9


@pytest.mark.slow
def test_a_tiny_search_has_a_line_for_each_contender(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lychee_cluster_speed", "--tiny", "--parts", "search"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[21:35].strip() for line in lines] == ["flat", "levels", "chunks"]
    assert all(line.endswith(" us") for line in lines)


@pytest.mark.slow
def test_a_tiny_run_has_a_line_for_each_contender(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.json"
    given = ["--tiny", "--parts", "operator", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["lychee_cluster_speed", *given])
    main()
    names = ["dense", *lychee_cluster_speed.expressions(1), "packing"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names)
    rows = json.loads(out.read_text())["results"]
    assert [row["contender"] for row in rows] == names
    for row in rows[1:-1]:
        assert row["over_dense"] > 0 and row["held_bytes"] > 0
        assert 1 < row["over_dense_bytes"] < 2
