"""Tests models spread over devices (tensor parallel) against the same models on one device."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jsparse
from jsparse.benchmark.recommend import recommend
from jsparse.benchmark.requirements import Requirements
from jsparse.evaluation.channel_calibration import calibrate_channels
from jsparse.evaluation.info import describe
from jsparse.models.checkpoint import Params, load, spread
from jsparse.models.spreading import Spreading
from jsparse.models.transformer import hidden_states, random_weights, to_logits
from jsparse.policies import channel_ranking
from jsparse.policies.expressions import parse
from jsparse.runtime.chunk_attention import flash
from jsparse.runtime.constants import constants
from jsparse.runtime.spread_programs import REPLICATED, on_ranks
from tests.support.marks import slow_except
from tests.support.programs import shared, sharing
from tests.support.serving import assert_at_rest, greedy, tiny_llm
from tests.support.tiny import VOCAB, random_prompts, tiny_params

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
# decisions over the heads of all ranks: a mean, a layer's budget, and gates; and constants of the
# model, of which each rank has its own
DEFAULT = (
    "tidal(budget=8, first=0, again=5, sink=1, recent=3)",
    "ada_kv(budget=8, window=4, pool=3)",
    "lychee_decode(((1, 1), (0, 1)), value=24, sink=1, recent=6)",
    "twilight(all_pages(), p=0.6)",
)
PROMPTS = random_prompts((9, 41, 21), seed=5)


@cache
def model(heads: int = 2) -> Params:
    """The tiny model with `kv_heads` KV heads."""
    return tiny_params(num_layers=2, num_heads=2 * heads, num_kv_heads=heads)


@shared
def halves() -> Params:
    """The model on two devices, which made the constants of their keys together."""
    params = spread(model(), 2)
    constants(params, parse(DEFAULT[-1]))
    return params


def answers(params, policy, sampling=None, **options):
    """Tokens of requests, and the attended shares of each step in each layer."""
    sizes = {"kv_cache_tokens": 384, "ladder": ((0, 16),), "layer_stats": True}
    llm = tiny_llm(policy, params=params, **sizes | options)
    sampling = sampling or greedy(12, logprobs=None)
    outs = [out.outputs[0] for out in llm.generate(PROMPTS, sampling)]
    assert_at_rest(llm)
    return [out.token_ids for out in outs], [out.layer_stats for out in outs]


@shared
def on_one(expression):
    return answers(model(), expression)


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    for own, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@pytest.mark.parametrize("expression", slow_except(DEFAULT))
def test_heads_on_two_devices_match_one_device(expression):
    assert_same(answers(halves(), expression), on_one(expression))


@pytest.mark.slow
def test_each_device_has_the_channels_of_its_heads(tmp_path):
    order = np.random.default_rng(5).permuted(
        np.tile(np.arange(16, dtype=np.int32), (2, 2, 1)), axis=-1
    )
    channel_ranking.save(order, tmp_path / "order")
    expression = f"double_sparsity(budget=8, channels=4, calibration={str(tmp_path / 'order')!r})"
    assert_same(answers(halves(), expression), answers(model(), expression))
    with pytest.raises(ValueError, match="is for 2 layers of 2 KV heads of 16 channels, must be"):
        answers(spread(model(4), 2), expression)


@pytest.mark.slow
def test_drafts_and_verification_on_two_devices():
    """Shares are means over drafts, whose number depends on when results arrive."""
    options = {"exact": True, "num_speculative_tokens": 3, "decode_rows": [4]}
    ours, _ = answers(halves(), "quest(budget=16)", **options)
    assert ours == answers(model(), "quest(budget=16)", **options)[0]


@pytest.mark.parametrize(
    "switches",
    [
        pytest.param({"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param({"qkv_bias": True, "qk_norm": True}, marks=pytest.mark.slow),
        {"vocab_size": VOCAB + 1},  # not a multiple of the ranks
    ],
    ids=str,
)
def test_logits_equal_those_of_the_whole_model(switches):
    config = replace(model(4).config, **switches)
    with sharing():  # other tests may have compiled any part of it
        whole = Params(random_weights(config, jnp.float32, seed=1), config, None, {}, "tiny")
    tokens = jnp.asarray(random_prompts((12,), seed=3))

    def logits(decoder, weights, tokens):
        def attend(layer, q, k, v):
            return flash(q, k, v, causal=True)[0]

        positions = jnp.arange(tokens.shape[1])[None]
        return to_logits(
            decoder, weights, hidden_states(decoder, weights, tokens, positions, attend)
        )

    parts = spread(whole, 4)
    run = on_ranks(logits, parts.mesh, ("weights",), ("decoder",), REPLICATED)
    ours = jax.jit(run, static_argnums=0)(parts.decoder, parts.weights, tokens)
    theirs = jax.jit(logits, static_argnums=0)(whole.decoder, whole.weights, tokens)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def assert_same_weights(ours, theirs):
    def same(own, other):
        assert own.sharding == other.sharding
        np.testing.assert_array_equal(own, other)

    jax.tree.map(same, ours.weights, theirs.weights)


@pytest.mark.slow
def test_weights_and_prompt_logprobs_of_two_devices_are_those_of_one():
    """New weights come from one device, as in a training loop."""
    own = greedy(4, prompt_logprobs=1)
    new = tiny_params(num_layers=2, num_heads=4, num_kv_heads=2, seed=1)
    halved = tiny_llm(DEFAULT[-1], params=halves())
    halved.update_weights(new)
    for out, wanted in zip(
        halved.generate(PROMPTS, own),
        tiny_llm(DEFAULT[-1], params=new).generate(PROMPTS, own),
        strict=True,
    ):
        assert out.outputs[0].token_ids == wanted.outputs[0].token_ids
        found, expected = out.prompt_scores, wanted.prompt_scores
        assert found is not None and expected is not None
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3/model.gguf", "qwen2_sharded"])
def test_model_is_loaded_onto_several_devices(name):
    ours = load(FIXTURES / name, dtype="float32", tensor_parallel_size=2)
    theirs = spread(load(FIXTURES / name, dtype="float32"), 2)
    assert ours.config == theirs.config
    assert ours.mesh == theirs.mesh
    assert_same_weights(ours, theirs)
    told = describe(str(FIXTURES / name), dtype="float32", tensor_parallel_size=2)
    of_both = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.weights))
    assert 2 * told["device_weight_bytes"] == of_both
    assert 2 * told["device_cache_bytes_per_token"] == told["cache_bytes_per_token"]


@pytest.mark.slow
def test_saved_model_is_loaded_onto_several_devices(tmp_path):
    whole = tiny_params(num_layers=11, num_heads=4, num_kv_heads=2)
    jsparse.save(whole, tmp_path / "saved")
    ours, theirs = load(tmp_path / "saved", tensor_parallel_size=2), spread(whole, 2)
    assert_same_weights(ours, theirs)


def test_spread_constants_equal_those_of_one_device_on_all():
    """Otherwise each step would copy them, and stored programs would not fit."""
    ours, theirs = (constants(each, parse(DEFAULT[-1])) for each in (halves(), model()))
    assert ours is not None and theirs is not None
    assert ours.keys() == theirs.keys()
    again = constants(halves(), parse(DEFAULT[-1])) or {}
    for name, each in theirs.items():
        np.testing.assert_allclose(ours[name], each, rtol=1e-4, atol=1e-5)
        assert ours[name].sharding == NamedSharding(halves().mesh, REPLICATED)
        assert again[name] is ours[name] is halves().constants[name]
    assert halves().constants is not model().constants


def test_models_that_cannot_be_spread_are_refused():
    for make, message in (
        (lambda: spread(model(), 4), "tensor_parallel_size=4: must divide the model's num_kv_head"),
        (lambda: spread(model(), 0), "tensor_parallel_size=0: must be an integer of at least 1"),
        (lambda: spread(model(8), 8), "tensor_parallel_size=8: must be at most 4, the number of"),
        (lambda: spread(spread(model(), 2), 2), "must be on one device, and is on 2"),
        (
            lambda: tiny_llm(params=spread(model(), 2), kv_offloading_size=1.0),
            "kv_offloading_size=1.0: must be 0 if the model is spread over several devices",
        ),
        (
            lambda: tiny_llm("offloaded(quest(budget=16))", params=spread(model(), 2)),
            "tensor_parallel_size=2: must be 1 with K and V in host memory",
        ),
        (lambda: load("smollm2", tensor_parallel_size="2"), "tensor_parallel_size='2': must be an"),
        (lambda: jsparse.save(halves(), "new"), "must be on one device, and is on 2"),
        (
            lambda: jsparse.generate(halves(), [1, 2], policy="offloaded(quest(budget=16))"),
            "tensor_parallel_size=2: must be 1 with K and V in host memory",
        ),
        (lambda: calibrate_channels(halves(), [1, 2]), "must be on one device, and is on 2"),
        (
            lambda: recommend(halves(), Requirements("tiny", 64, 1, ("dense",))),
            "must be on one device, and is on 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_engine_spreads_a_loaded_model():
    llm = tiny_llm(params=model(), tensor_parallel_size=2)
    assert llm.engine.params.mesh == Spreading(model().config, 2).mesh
    assert tiny_llm(params=llm.engine.params).engine.params is llm.engine.params
