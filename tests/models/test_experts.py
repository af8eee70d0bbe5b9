"""Tests mixtures of experts: steps, spreading over devices, models in memory, and refusals."""

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.benchmark.memory_floor import read_bytes
from jsparse.evaluation.info import describe
from jsparse.models.checkpoint import Params, load, spread
from jsparse.models.config import Experts
from jsparse.models.transformer import random_weights
from tests.models.test_transformers_models import LlamaForCausalLM
from tests.support.marks import slow_except
from tests.support.programs import shared, sharing
from tests.support.tiny import assert_close, engine_logits, random_prompts, tiny_params
from tests.support.writers import (
    expected_weights,
    experts_of,
    hf_config,
    hf_tensors,
    with_stacked_experts,
    write_folder,
    write_gguf,
)

HF = Path(__file__).parents[1] / "fixtures" / "hf"


@shared
def model(name: str) -> Params:
    return load(HF / name, dtype="float32")


def random_model(**sizes: int) -> Params:
    """The tiny model with experts, one of them shared."""
    experts = Experts(
        **{"number": 6, "chosen": 2, "intermediate_size": 24} | sizes, normalized=True
    )
    config = replace(tiny_params(num_layers=2).config, family="qwen2_moe", experts=experts)
    with sharing():  # other tests may have compiled any part of it
        made = random_weights(config, jnp.float32, seed=1)
        made = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, made)
    return Params(made, config, None, {}, "moe")


@pytest.mark.parametrize("name", slow_except(("qwen2_moe", "qwen3_moe"), "qwen2_moe"))
@pytest.mark.parametrize(
    "policy", slow_except(("dense", "quest(budget=1024)"), "quest(budget=1024)")
)
def test_steps_give_the_logits_of_one_pass(name, policy):
    with np.load(HF / name / "expected.npz") as file:
        expected = dict(file)
    tokens = expected["tokens"]
    forced = np.append(tokens[:, -20:], tokens[:, :1], axis=1)
    seen = engine_logits(model(name), policy, tokens[:, :-20].tolist(), forced)
    assert_close(seen, expected["logits"][:, -21:].swapaxes(0, 1))


def test_experts_on_two_devices_match_one_device():
    whole, tokens = random_model(shared_size=32), random_prompts((40, 40), seed=3)
    ours, theirs = jsparse.logits(spread(whole, 2), tokens), jsparse.logits(whole, tokens)
    assert_close(ours, theirs, rtol=2e-5)


@pytest.mark.slow
def test_steps_on_two_devices_match_one_device():
    whole, (prompt,) = random_model(shared_size=32), random_prompts((40,), seed=3)
    options = {"max_new_tokens": 12, "eos_token_id": [], "policy": "quest(budget=16)"}
    ours, theirs = (jsparse.generate(p, prompt, **options) for p in (spread(whole, 2), whole))
    assert ours.token_ids == theirs.token_ids


def test_experts_that_do_not_divide_are_refused():
    for sizes, message in (
        ({"number": 5}, r"tensor_parallel_size=2: must divide .*experts\.number=5"),
        ({"shared_size": 33}, r"tensor_parallel_size=2: must divide .*experts\.shared_size=33"),
    ):
        with pytest.raises(ValueError, match=message):
            spread(random_model(**sizes), 2)


@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_files_are_loaded_onto_two_devices(name):
    ours, theirs = load(HF / name, tensor_parallel_size=2), spread(model(name), 2)
    jax.tree.map(np.testing.assert_array_equal, ours.weights, theirs.weights)
    told = describe(str(HF / name), dtype="float32", tensor_parallel_size=2)
    of_both = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.weights))
    assert 2 * told["device_weight_bytes"] == of_both


def test_joined_experts_of_a_model_in_memory(tmp_path):
    config = hf_config("qwen3_moe")
    tensors = hf_tensors(config)
    joined = {name: x for name, x in tensors.items() if ".experts." not in name}
    for i in range(config["num_hidden_layers"]):
        p, names = f"model.layers.{i}.", experts_of(config)
        for target, kinds in (("gate_up", ("gate", "up")), ("down", ("down",))):
            joined[f"{p}mlp.experts.{target}_proj"] = np.stack(
                [np.concatenate([tensors[f"{p}{n}.{k}_proj.weight"] for k in kinds]) for n in names]
            )
    made = jsparse.from_transformers(LlamaForCausalLM(config, joined))
    read = load(write_folder(tmp_path, config, tensors))
    jax.tree.map(np.testing.assert_array_equal, made.weights, read.weights)


def test_quantized_experts_of_a_gguf_file(tmp_path):
    config = hf_config("qwen3_moe")
    tensors, kind = hf_tensors(config), gguf.GGMLQuantizationType.Q8_0
    stacked = with_stacked_experts(config, tensors)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    data = gguf.quants.quantize(stacked[name], kind)
    made = load(write_gguf(tmp_path / "m.gguf", config, tensors, raw={name: (data, kind)}))
    for e, values in enumerate(gguf.quants.dequantize(data, kind)):
        tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] = values
    jax.tree.map(np.testing.assert_array_equal, made.weights, expected_weights(config, tensors))


def test_active_parameters_leave_out_other_experts():
    told = describe(str(HF / "qwen3_moe"), dtype="float32")
    # per layer 6 experts of 3 matrices of 32 x 16, of which a token has 2
    assert told["parameters"] - told["active_parameters"] == 2 * 4 * 3 * 32 * 16
    assert told["parameters"] == sum(x.size for x in jax.tree.leaves(model("qwen3_moe").weights))
    assert "q8_0" not in told["weight_bytes"]


def test_floor_of_a_step_counts_expected_experts():
    params = model("qwen3_moe")
    most = sum(x.nbytes for x in jax.tree.leaves(params.weights)) - 256 * 32 * 4  # the embedding
    of_experts = 2 * 6 * 3 * 32 * 16 * 4  # layers, experts, matrices
    for tokens, unread in ((1, 2 / 3), (2, 4 / 9)):  # a token has 2 of 6 experts
        assert read_bytes(params, tokens) == pytest.approx(most - unread * of_experts, abs=1)


def test_blocks_of_experts_are_refused():
    with pytest.raises(ValueError, match="weights='q8_0': layers_.*/experts/.* holds experts"):
        load(HF / "qwen3_moe", weights="q8_0")
    with pytest.raises(ValueError, match="weights='q8_0': .* holds experts, which are not stored"):
        describe(str(HF / "qwen3_moe"), dtype="float32", weights="q8_0")
