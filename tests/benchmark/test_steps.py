"""Tests which decode steps are measured and how their bytes are counted, not their times."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.benchmark import memory_floor, random_cache, steps
from jsparse.benchmark.random_model import random_model
from jsparse.builder import dense
from jsparse.cache import CacheSpec, StepView
from jsparse.cli.app import app
from jsparse.models.checkpoint import spread
from jsparse.policy import Policy
from tests.support.tiny import tiny_params

STREAMING = "streaming(sink=2, recent=6)"


@pytest.fixture(scope="module")
def measured():
    params = tiny_params(num_layers=1)
    policies = ["quest(budget=32)", STREAMING, "dense"]
    return params, steps.measure(params, policies, contexts=(64,), num_iters=2, bandwidth=2e9)


def test_dense_comes_first_and_only_once(measured):
    _, report = measured
    names = [row["policy"].partition("(")[0] for row in report["results"]]
    assert names == ["dense", "quest", "streaming"]
    for row in report["results"]:
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
    assert (report["bandwidth"], report["bandwidth_measured"]) == (2e9, False)


def test_last_step_ends_at_the_context_length(measured):
    _, report = measured
    dense, quest, streaming = report["results"]
    assert dense["attended"] == dense["read"] == 1
    assert streaming["attended"] == pytest.approx(8 / 64)
    assert 0 < quest["attended"] <= 32 / 64


def test_lower_bound_counts_weights_and_attended_tokens(measured):
    params, report = measured
    assert not params.config.tie_word_embeddings
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    weights -= params.weights["params"]["embed"].nbytes
    dense, _, streaming = report["results"]
    per_token = 2 * 2 * 16 * 4  # K and V, KV heads, head_dim, float32
    assert dense["floor_ms"] == pytest.approx(1e3 * (weights + 64 * per_token) / 2e9)
    assert streaming["floor_ms"] == pytest.approx(1e3 * (weights + 8 * per_token) / 2e9)
    assert dense["over_dense"] == 1
    assert streaming["over_floor"] == streaming["ms"]["median"] / streaming["floor_ms"]


@pytest.mark.slow
def test_model_on_two_devices_has_the_same_shares_and_half_the_bytes(measured):
    params, one = measured
    two = steps.measure(spread(params, 2), [STREAMING], contexts=(64,), num_iters=2, bandwidth=2e9)
    norms = 3 * params.config.hidden_size * 4  # replicated on both devices
    dense, _, streaming = one["results"]
    assert two["results"][0]["weight_bytes"] == (dense["weight_bytes"] - norms) // 2 + norms
    for own, other in zip(two["results"], (dense, streaming), strict=True):
        assert own["attended"] == pytest.approx(other["attended"])
        assert own["attended_bytes"] == other["attended_bytes"] / 2


def test_random_weights_on_two_devices_equal_those_on_one():
    """No device ever has all of them."""
    config, dtype = tiny_params(num_layers=1).config, np.dtype("float32")
    ours = random_model(config, dtype, tensor_parallel_size=2)
    theirs = spread(random_model(config, dtype), 2)
    assert (ours.config, ours.mesh) == (theirs.config, theirs.mesh)
    for a, b in zip(*map(jax.tree.leaves, (ours.weights, theirs.weights)), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_bandwidth_is_measured_unless_given(monkeypatch):
    monkeypatch.setattr(memory_floor, "BYTES_TO_MOVE", 2**20)
    assert 1e6 < memory_floor.memory_bandwidth() < 1e14
    monkeypatch.setattr(steps, "memory_bandwidth", lambda: 7e9)
    report = steps.measure(tiny_params(num_layers=1), [], contexts=(64,), num_iters=1)
    assert (report["bandwidth"], report["bandwidth_measured"]) == (7e9, True)


def test_heads_of_a_random_cache_have_equal_lengths():
    spec = CacheSpec(2, 3, 4, 2, 16, 8, 4, np.float32)
    cache = random_cache.random_cache(spec, 20, ("slot_positions",))
    keys = np.asarray(cache.layers[0].k)
    assert abs(keys.std() - 1) < 0.1
    assert not np.array_equal(keys, cache.layers[0].v)
    assert not np.array_equal(keys, cache.layers[1].k)
    assert (np.asarray(cache.layers[1].lengths) == 20).all()
    assert cache.positions.tolist() == [20] * 3
    positions = np.asarray(cache.layers[0].slot_positions).reshape(3, 2, 32)
    assert (positions == np.arange(32)).all()
    policy = Policy(
        dense().select,
        init=lambda spec: jnp.zeros((3, 32, 2, 16)),
        prefill=lambda state, layer, view: view.k if layer == 0 else state,
    )
    kept = random_cache.state_after_prompt(policy, spec, StepView(cache), 300)
    np.testing.assert_array_equal(kept, np.moveaxis(keys.reshape(3, 2, 32, 16), 1, 2))


def test_unmeasurable_runs_are_refused():
    for options, message in [
        ({"contexts": (0,)}, "context=0: must be an integer of at least 1"),
        ({"contexts": (513,)}, "context=513: must be at most 512, the model's maximum"),
        ({"contexts": (24,)}, "context=24: must be at least 25, for 4 steps of warm-up and 20"),
        ({"batches": (0,)}, "batch=0: must be an integer of at least 1"),
        ({"num_iters": 0}, "num_iters=0: must be an integer of at least 1"),
        ({"num_iters_warmup": 0}, "num_iters_warmup=0: must be an integer of at least 1"),
        ({"bandwidth": -1.0}, "bandwidth=-1.0: must be a number of bytes/s above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            steps.measure(tiny_params(num_layers=2), [], **{"bandwidth": 1e9, **options})


def test_command_prints_json_or_a_table(tmp_path):
    jsparse.save(tiny_params(num_layers=1), tmp_path / "model")

    def printed(*options):
        given = ["bench", "latency", f"{tmp_path}/model", "--context", "64", "--num-iters", "1"]
        ran = CliRunner().invoke(app, [*given, "--bandwidth", "3", *options])
        assert ran.exit_code == 0, ran.output
        return ran.stdout

    table = printed()
    assert "at 3 GB/s, as given" in table
    assert "block_sparse_decode (plain JAX)" in table
    made_up = json.loads(printed("--json", "--random-weights"))
    assert (made_up["bandwidth"], made_up["random_weights"]) == (3e9, True)
    assert [row["batch"] for row in made_up["results"]] == [1]
