"""Tests the bytes that selection reads, against the papers' formulas, and both floors of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import decode_step
from bench.lib import replay
from bench.lib.llama_8b import LLAMA_8B, boundary_constants
from bench.lib.selection_bytes import TOKENS_PER_CHUNK, selection_bytes
from jsparse.cache import CacheSpec
from jsparse.policies import expressions
from jsparse.policies.clusters.chunking import boundaries, cut, marks
from tests.support.tiny import tiny_params

LAYERS, ROWS, KV_HEADS, H, P, S = 3, 2, 4, 64, 16, 4096
SPEC = CacheSpec(LAYERS, ROWS, 8, KV_HEADS, H, P, S // P, "bfloat16")
HEADS = LAYERS * ROWS * KV_HEADS
PAGES, FIXED_CLUSTERS = S // P, S // 16 // 2
UNITS = 12  # of 128 clusters, ⌈√128⌉
GATES = ((1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 0))

# bytes per KV head and layer
BOUNDS, CODES, CENTROID = PAGES * 2 * H * 2, H // 2 + 4, 2 * H
OF_HEADS = {
    "quest(budget=256)": BOUNDS,
    "quest(budget=256, bounds_dtype='uint8')": PAGES * (2 * H + 4),
    "arkvale(budget=256)": BOUNDS,
    "double_sparsity(budget=256)": S * (H // 4 // 2 + 4),
    "double_sparsity(budget=256, channels=32)": S * (32 // 2 + 4),
    "twilight(quest(budget=256), p=0.9)": BOUNDS + 256 * CODES,
    "twilight(quest(budget=256), p=0.9, prune='token')": BOUNDS + 256 * CODES,
    "twilight(all_pages())": S * CODES,
    "lfps(budget=0.1)": S * 2 * 2,
    "lychee_cluster(chunks='fixed')": FIXED_CLUSTERS * CENTROID,
    "lychee_cluster(chunks='fixed', rank='bound')": FIXED_CLUSTERS * (CENTROID + 4),
    # 8 of 12 units, which is more than those with 4 x 512 tokens
    "lychee_cluster(budget=512, chunks='fixed', levels=2)": UNITS * (CENTROID + 4)
    + 8 / UNITS * FIXED_CLUSTERS * CENTROID,
    # 4 x 896 of 4096 tokens
    "lychee_cluster(budget=896, chunks='fixed', levels=2)": UNITS * (CENTROID + 4)
    + 0.875 * FIXED_CLUSTERS * CENTROID,
    "cluster_kv(cluster_size=64)": S // 64 * CENTROID,
    "dense()": 0,
    "streaming()": 0,
    "hard_kv()": 0,
    f"lychee_decode({GATES}, value=256)": 0,
}


@pytest.mark.parametrize("text", OF_HEADS)
def test_selection_reads_the_bytes_of_the_paper(text):
    assert selection_bytes(expressions.parse(text), SPEC) == HEADS * OF_HEADS[text]


def test_clusters_of_random_tokens_fill_a_part_of_the_index():
    read = selection_bytes(expressions.parse("lychee_cluster(chunks='structure')"), SPEC)
    assert read == pytest.approx(HEADS * S / TOKENS_PER_CHUNK / 2 * CENTROID, rel=0.01)


def test_chunks_of_random_tokens_have_the_assumed_length():
    @jax.jit
    def count():
        tokens = jax.random.randint(jax.random.key(0), (1, 30720), 0, LLAMA_8B.vocab_size)
        classes = boundaries(marks(boundary_constants()["boundary_classes"], tokens))
        return cut(classes, 0, jnp.array([30720]), capacity=3072, min_length=8, max_length=16).count

    np.testing.assert_allclose(30720 / np.asarray(count()), TOKENS_PER_CHUNK, rtol=0.01)


def test_heads_that_are_always_dense_select_nothing():
    def read(text):
        return selection_bytes(expressions.parse(text), SPEC)

    whole = HEADS * BOUNDS
    assert read("dense_layers(quest(budget=256), n=2)") == whole / 3
    assert read(f"retrieval_heads(quest(budget=256), {GATES})") == whole * 7 / 12
    twilight = "twilight(quest(budget=256))"
    assert read(f"dense_layers({twilight}, n=2)") == read(twilight) / 3


def test_replayed_counts_do_not_change_the_base_pages():
    text = "twilight(quest(budget=256))"
    read = selection_bytes(replay.parse(f"replayed({text})", S), SPEC)
    assert read == HEADS * OF_HEADS["twilight(quest(budget=256), p=0.9)"]


def test_bytes_do_not_depend_on_the_type_of_k_and_v():
    spec = SPEC._replace(kv_cache_dtype="int8")
    policy = expressions.parse("twilight(quest(budget=256))")
    assert selection_bytes(policy, spec) == selection_bytes(policy, SPEC)


def test_other_large_state_has_no_bytes():
    assert selection_bytes(expressions.parse("magic_pig()"), SPEC) is None


ROW = {
    "device": "NVIDIA H200",
    "seconds": {"median": 6e-3, "min": 5e-3, "max": 7e-3},
    "compile_seconds": 1.0,
    "weight_bytes": 15_000_000_000,
    "embedding_bytes": 1_000_000_000,
    "cache_bytes": 64_000_000_000,
    "attended_fraction": 0.05,
    "selection_bytes": 4_400_000_000,
}


def test_row_has_both_floors(monkeypatch):
    monkeypatch.setattr(decode_step, "run_child", lambda *_, **__: ROW)
    row = decode_step.measure("jsparse", "4x131072", "quest", [])
    assert row["floor_seconds"] == pytest.approx(17.2e9 / 4.4e12)
    assert row["over_floor"] == pytest.approx(6 / (17.2 / 4.4))
    assert row["floor_with_selection_seconds"] == pytest.approx(21.6e9 / 4.4e12)
    assert row["over_floor_with_selection"] == pytest.approx(6 / (21.6 / 4.4))
    labels = {"case": "4x131072", "name": "jsparse", "policy": "quest", "weights": "bf16"}
    text = decode_step.summary(row | labels | {"ranks": 1, "kv_cache_dtype": "auto"})
    assert "floor 3.91 ms, 1.53x; with selection 4.91 ms, 1.22x" in text


def test_row_of_unknown_bytes_has_one_floor():
    assert set(decode_step.floors(ROW | {"selection_bytes": None})) == {
        "floor_seconds",
        "over_floor",
    }


def test_timed_step_counts_the_bytes_of_its_policy(monkeypatch):
    params = tiny_params()
    monkeypatch.setattr(decode_step, "shaped_model", lambda *_: params)
    for name, value in (("STEPS", 2), ("RUNS", 1), ("WARM_UP", 2)):
        monkeypatch.setattr(decode_step, name, value)
    found = decode_step.jsparse_step(1, 256, "quest(budget=64)", 1)
    config = params.config
    of_page = config.num_layers * config.num_kv_heads * 2 * config.head_dim * 2
    assert found["selection_bytes"] == 256 // 16 * of_page
