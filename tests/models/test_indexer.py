"""Files and checkpoints with an indexer: reading, writing, refusals, and use by a policy."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jsparse
from jsparse.models.indexer import (
    INDEXER,
    Indexer,
    IndexerFile,
    file_of,
    load_indexer,
    mean_indexer,
    read_constants_at,
    save_indexer,
)
from jsparse.policies.expressions import parse
from jsparse.runtime.constants import constants

QWEN3 = Path(__file__).parents[1] / "fixtures" / "hf" / "qwen3"
CONFIG = json.loads((QWEN3 / "config.json").read_text())
LAYERS, HEADS = CONFIG["num_hidden_layers"], CONFIG["num_attention_heads"]
KV_HEADS, SIZE = CONFIG["num_key_value_heads"], CONFIG["head_dim"]
GROUP, BLOCK = HEADS // KV_HEADS, 16
# the names in the authors' files, in their order
GATE = "model.layers.{}.self_attn.attn_gate.attngate_{}.weight"


def published(*, normed=True, layers=LAYERS, seed=0):
    """Random gates under the names and in the shapes of the authors' repository."""
    rng, heads = np.random.default_rng(seed), (KV_HEADS, GROUP, SIZE, SIZE)
    shapes = {"linear_q": heads, "linear_k": (KV_HEADS, 3 * SIZE, SIZE)}
    if normed:
        shapes |= {"qnorm": (SIZE,), "knorm": (SIZE,)}
    return {
        GATE.format(layer, kind): rng.normal(size=shape).astype(np.float32)
        for layer in range(layers)
        for kind, shape in shapes.items()
    }


def stored(tmp_path, tensors, metadata=None):
    path = tmp_path / "gates.safetensors"
    save_file(tensors, path, metadata=metadata)
    return str(path)


@pytest.mark.parametrize("normed", [True, False])
def test_published_layout(tmp_path, normed):
    tensors = published(normed=normed)
    found = load_indexer(stored(tmp_path, tensors))
    for layer in range(LAYERS):
        q, k, norms = (x[layer] for x in found.indexer)
        np.testing.assert_array_equal(q, tensors[GATE.format(layer, "linear_q")])
        np.testing.assert_array_equal(k, tensors[GATE.format(layer, "linear_k")])
        none = np.zeros(SIZE)
        for row, kind in zip(norms, ("qnorm", "knorm"), strict=True):
            np.testing.assert_array_equal(row, tensors.get(GATE.format(layer, kind), none))
    assert (found.block, found.record) == (64, {})
    save_indexer(found, tmp_path / "again.safetensors")
    assert load_file(tmp_path / "again.safetensors").keys() == tensors.keys()


def test_file_keeps_the_block_and_the_record(tmp_path):
    made = IndexerFile(mean_indexer(2, 4, 2, 8), 16, {"steps": 3})
    save_indexer(made, tmp_path / "file")
    found = load_indexer(str(tmp_path / "file"))
    assert found[1:] == made[1:]
    for one, other in zip(made.indexer, found.indexer, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_file_keeps_types_of_16_bits(tmp_path, dtype):
    made = Indexer(*(np.asarray(x).astype(dtype) for x in mean_indexer(2, 4, 2, 8)))
    save_indexer(IndexerFile(made), tmp_path / "file")
    assert all(x.dtype == dtype for x in load_indexer(str(tmp_path / "file")).indexer)


def changed(name, value):
    """The published tensors with one replaced, or removed by None."""
    return {n: x for n, x in (published() | {name: value}).items() if x is not None}


Q1, K1, NORM1 = (GATE.format(1, kind) for kind in ("linear_q", "linear_k", "qnorm"))
REFUSED = [
    ({"x": np.zeros(1)}, "must hold model.layers.0.*linear_q.weight, an indexer's weights"),
    (changed(K1, None), f"must hold {K1}, as of the other layers"),
    (changed(NORM1, None), f"must hold {NORM1}, as of the other layers"),
    (changed(K1, np.zeros((1, 2))), rf"{K1} must be \[.*\], not \[1, 2\]"),
    (changed(Q1, np.zeros((1, 2))), rf"{Q1} must be \[.*\], not \[1, 2\]"),
    (changed(NORM1.replace("qnorm", "knorm"), None), "knorm.weight, as of the other layers"),
    (
        published(normed=False) | {GATE.format(0, "knorm"): np.ones(SIZE, np.float32)},
        "must hold .*qnorm.weight, as of the other layers",
    ),
    (changed(K1, published()[K1].astype(np.int8)), f"{K1} must be in float32, .*, not int8"),
    (changed(K1, published()[K1].astype(float)), f"{K1} must be in float32, .*, not float64"),
    (
        changed(Q1.replace("weight", "bias"), np.ones(SIZE, np.float32)),
        "must not hold attngate_linear_q.bias, which gates have no place for",
    ),
    (changed(GATE.format(0, "linear_q"), np.zeros(3)), r"must be \[K, G, H, D\], not \[3\]"),
]


@pytest.mark.parametrize(("tensors", "said"), REFUSED)
def test_damaged_files_are_refused_by_name(tmp_path, tensors, said):
    with pytest.raises(ValueError, match=f"^gates='.*gates.safetensors'.*{said}"):
        jsparse.seer_attention(stored(tmp_path, tensors))


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    path = stored(tmp_path, published(layers=LAYERS + 1), {"block": "16"})
    with pytest.raises(ValueError, match=r"block=64: must be 16, as gates='.*' were trained"):
        jsparse.seer_attention(path, block=64)
    policy = jsparse.seer_attention(path)
    own, others = (
        rf"{layers} × {KV_HEADS} × {GROUP} × {SIZE} × {SIZE}" for layers in (LAYERS, LAYERS + 1)
    )
    with pytest.raises(ValueError, match=f"is for {others} layers .* the model's {own}(\n|$)"):
        jsparse.generate(jsparse.load(QWEN3), [1, 2, 3], max_new_tokens=2, policy=policy)
    with pytest.raises(ValueError, match="needs 'indexer_q': must be among the constants"):
        jsparse.generate(jsparse.load(QWEN3), [1, 2, 3], max_new_tokens=2, policy="seer_attention")
    for metadata in ({"block": "0"}, {"block": "x"}, {"record": "[]"}):
        with pytest.raises(ValueError, match=r"gates='.*"):
            load_indexer(stored(tmp_path, published(), metadata))


def with_indexer(folder, tensors):
    """A checkpoint of Qwen3 that also holds these tensors."""
    shutil.copytree(QWEN3, folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    return folder


OWN = f"seer_attention(budget={2 * BLOCK}, block={BLOCK})"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model with the indexer of its checkpoint."""
    params = jsparse.load(with_indexer(tmp_path_factory.mktemp("own") / "own", published()))
    constants(params, parse(OWN))
    return params


def test_indexer_of_a_checkpoint_is_a_constant_of_the_model(own):
    assert own.constants.keys() >= set(INDEXER)
    tensor = published()[GATE.format(1, "linear_k")]
    np.testing.assert_array_equal(own.constants["indexer_k"][1], tensor)


def test_checkpoint_with_its_own_indexer_selects(own):
    prompt = np.random.default_rng(1).integers(CONFIG["vocab_size"], size=90).tolist()
    made = jsparse.generate(own, prompt, policy=OWN, max_new_tokens=12)
    assert made.stats.attended_fraction < 0.6


@pytest.mark.slow
def test_weights_of_a_file_select_as_those_of_a_checkpoint(own, tmp_path):
    tensors = published()
    plain = jsparse.load(QWEN3)
    prompt = np.random.default_rng(1).integers(CONFIG["vocab_size"], size=90).tolist()
    gates = stored(tmp_path, tensors, {"block": f"{BLOCK}"})
    of_file = jsparse.seer_attention(gates, budget=2 * BLOCK)
    found, wanted, full, dense = (
        jsparse.generate(model, prompt, policy=policy, max_new_tokens=12).token_ids
        for model, policy in (
            (plain, of_file),
            (own, OWN),
            (plain, jsparse.seer_attention(gates, budget=2**30)),
            (plain, "dense"),
        )
    )
    assert found == wanted != dense
    assert full == dense


def test_save_keeps_the_indexer_of_a_checkpoint_alone(own, tmp_path):
    """Weights of a file belong to the policy, an indexer of the checkpoint to the model."""
    arrays = own.constants | read_constants_at(stored(tmp_path, published()))
    params = dataclasses.replace(own, constants=arrays)
    jsparse.save(params, tmp_path / "saved")
    saved = jsparse.load(tmp_path / "saved").constants
    assert saved.keys() >= set(INDEXER) and not any(map(file_of, saved))
    for name in INDEXER:
        np.testing.assert_array_equal(saved[name], params.constants[name])


@pytest.mark.slow
def test_engine_serves_a_checkpoint_with_an_indexer(own):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(CONFIG["vocab_size"], size=n).tolist() for n in (90, 41)]
    sampling = jsparse.SamplingParams(max_tokens=8)
    llm = jsparse.LLM(own, OWN, max_model_len=128, max_num_seqs=2)
    outputs = llm.generate(prompts, sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = jsparse.generate(own, prompt, max_new_tokens=8, policy=OWN)
        assert output.outputs[0].token_ids == alone.token_ids


def test_checkpoint_whose_indexer_does_not_fit_is_refused(tmp_path):
    folder = with_indexer(tmp_path / "own", published(layers=LAYERS + 1))
    with pytest.raises(ValueError, match=f"own: is for {LAYERS + 1} × .* must be for the model's"):
        jsparse.load(folder)


def test_mean_indexer_scores_by_means():
    made: Indexer = mean_indexer(1, 4, 2, 3)
    q, k = np.arange(6.0).reshape(2, 3), np.arange(9.0)
    np.testing.assert_allclose(np.einsum("gh,ghd->d", q, made.q[0, 0]), q.mean(0))
    np.testing.assert_allclose(k @ made.k[0, 1], k[6:])
