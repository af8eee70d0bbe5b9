"""Tests models and tokenizers passed in memory, with fakes of transformers' classes.

test_with_transformers.py tests the real classes, if they are installed.
"""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import jsparse
from jsparse.models.tokenizer import Tokenizer
from tests.support.writers import (
    expected_weights,
    hf_config,
    hf_tensors,
    write_folder,
    write_gguf,
)

CONFIG = hf_config("llama", num_hidden_layers=1)
TENSORS = hf_tensors(CONFIG)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{{ pad_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


class Tensor:
    """Stands in for a torch.Tensor."""

    def __init__(self, array: np.ndarray, device: str = "cuda"):
        self.array, self.shape, self.dtype = array, array.shape, f"torch.{array.dtype}"
        self.device = SimpleNamespace(type=device)

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.array, "cpu")

    def float(self):
        return Tensor(self.array.astype(np.float32), self.device.type)

    def numpy(self):
        assert self.device.type == "cpu"
        assert self.array.dtype != ml_dtypes.bfloat16
        return self.array


class LlamaForCausalLM:
    """Stands in for a transformers model."""

    def __init__(self, config, tensors, generation=None):
        self.config = SimpleNamespace(to_dict=lambda: dict(config))
        self.generation_config = SimpleNamespace(to_diff_dict=lambda: dict(generation or {}))
        self.tensors = tensors

    def state_dict(self):
        return {
            name: tensor if isinstance(tensor, Tensor) else Tensor(tensor)
            for name, tensor in self.tensors.items()
        }


def fast_tokenizer(**changes):
    """Returns a fake of a fast transformers tokenizer."""
    vocab = {"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<pad>": 4, "<end>": 5}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>", "<pad>", "<end>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    fields = {
        "backend_tokenizer": core,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "special_tokens_map": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        "chat_template": TEMPLATE,
        "split_special_tokens": False,
    }
    return SimpleNamespace(**(fields | changes))


def its_tokenizer(params: jsparse.Params) -> Tokenizer:
    assert params.tokenizer is not None
    return params.tokenizer


def assert_same(weights, expected):
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_model_in_memory_equals_its_files(family, tied, tmp_path):
    config = hf_config(family, tie_word_embeddings=tied)
    tensors = hf_tensors(config)
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}
    folder = write_folder(tmp_path / "model", config, tensors)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    # a tied model's state_dict has the embedding twice
    twice = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if tied else {}
    made = jsparse.from_transformers(LlamaForCausalLM(config, tensors | twice, generation))
    # a config may say tied although the head differs
    said = LlamaForCausalLM(config | {"tie_word_embeddings": True}, tensors | twice, generation)
    assert jsparse.from_transformers(said).config == made.config
    read = jsparse.load(folder)
    assert_same(made.weights, read.weights)
    assert (made.config, made.generation_defaults) == (read.config, read.generation_defaults)
    assert (made.name, made.tokenizer) == ("LlamaForCausalLM", None)


@pytest.mark.parametrize(
    ("stored", "dtype"), [(np.float16, "float32"), (ml_dtypes.bfloat16, "bfloat16")]
)
def test_tensors_are_cast_to_the_requested_dtype(stored, dtype):
    tensors = {name: tensor.astype(stored) for name, tensor in TENSORS.items()}
    params = jsparse.from_transformers(LlamaForCausalLM(CONFIG, tensors), dtype=dtype)
    assert params.dtype == jnp.dtype(dtype)
    expected = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    assert_same(params.weights, expected_weights(CONFIG, expected))


def test_weights_share_no_memory_with_the_model():
    tensors = {name: tensor.copy() for name, tensor in TENSORS.items()}
    params = jsparse.from_transformers(LlamaForCausalLM(CONFIG, tensors))
    for tensor in tensors.values():
        tensor[:] = 0
    assert_same(params.weights, expected_weights(CONFIG, TENSORS))


def with_tensor(name, tensor):
    return LlamaForCausalLM(CONFIG, TENSORS | {name: tensor})


def test_unsupported_models_are_refused():
    head = "lm_head.weight"
    for model, message in [
        ("org/name", "model is 'org/name': must be a transformers model.*jsparse.load reads"),
        (None, r"model is of type NoneType: .*pip install '\.\[hf\]'"),
        (LlamaForCausalLM(CONFIG | {"model_type": "gpt2"}, TENSORS), "model_type is 'gpt2'.*llama"),
        (LlamaForCausalLM(CONFIG | {"mlp_bias": True}, TENSORS), "^model.config: .* mlp_bias=True"),
        (LlamaForCausalLM(CONFIG, {}), "LlamaForCausalLM holds 0 tensors"),
        (with_tensor("model.norm.weight", np.ones(3, np.float32)), r"norm.weight has shape \(3,\)"),
        (with_tensor("score.weight", np.ones((2, 32), np.float32)), "holds score.weight"),
        (with_tensor(head, np.ones((40, 32), np.int8)), f"{head} has dtype 'int8': must be one"),
        (with_tensor(head, Tensor(TENSORS[head], "meta")), f"{head} is on the device 'meta': must"),
        (LlamaForCausalLM(CONFIG, TENSORS, {"top_p": "a"}), "generation_config: top_p='a': must"),
    ]:
        with pytest.raises(ValueError, match=message):
            jsparse.from_transformers(model)


def test_fast_tokenizer_is_copied(tmp_path):
    given = fast_tokenizer()
    given.backend_tokenizer.enable_truncation(2)
    given.backend_tokenizer.enable_padding(length=9)
    params = jsparse.from_transformers(LlamaForCausalLM(CONFIG, TENSORS), tokenizer=given)
    tokenizer = its_tokenizer(params)
    assert tokenizer.encode("b a b a") == [2, 1, 0, 1, 0]
    assert tokenizer.encode("b</s>", add_special_tokens=False) == [1, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (3,))
    messages = [{"role": "user", "content": "b"}]
    assert tokenizer.apply_chat_template(messages) == "<s>b</s><pad>a"
    assert given.backend_tokenizer.truncation is not None  # the user's object is unchanged
    given.backend_tokenizer.add_tokens(["c"])
    assert tokenizer.vocab_size == 6

    jsparse.save(params, tmp_path / "saved")
    back = its_tokenizer(jsparse.load(tmp_path / "saved"))
    assert back.encode("b a b a") == [2, 1, 0, 1, 0]
    assert back.apply_chat_template(messages) == "<s>b</s><pad>a"


def test_given_tokenizer_replaces_that_of_the_files(tmp_path):
    folder = write_folder(tmp_path / "model", CONFIG | {"eos_token_id": [5, 3]}, TENSORS)
    (folder / "tokenizer.json").write_text("not read")
    params = jsparse.load(folder, tokenizer=fast_tokenizer())
    assert its_tokenizer(params).eos_token_ids == (3, 5)
    params = jsparse.load(
        write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS), tokenizer=fast_tokenizer()
    )
    assert its_tokenizer(params).encode("b") == [2, 1]
    own = Tokenizer.from_transformers(fast_tokenizer())
    assert jsparse.load(folder, tokenizer=own).tokenizer is own


def test_end_ids_of_model_and_tokenizer_are_joined():
    model = LlamaForCausalLM(CONFIG | {"eos_token_id": 5}, TENSORS, {"eos_token_id": [4, 3]})
    params = jsparse.from_transformers(model, tokenizer=fast_tokenizer(eos_token_id=None))
    assert its_tokenizer(params).eos_token_ids == (4, 3, 5)


def test_default_of_several_chat_templates_is_used():
    named = {"default": "x", "tool_use": "y"}
    assert Tokenizer.from_transformers(fast_tokenizer(chat_template=named)).chat_template == "x"
    only = fast_tokenizer(chat_template={"tool_use": "y"}, bos_token_id=None)
    assert Tokenizer.from_transformers(only).chat_template is None
    assert Tokenizer.from_transformers(only).bos_token_id is None


def test_tokenizers_that_cannot_be_copied_are_refused(tmp_path):
    for given, message in [
        (SimpleNamespace(), "type SimpleNamespace: must be a fast transformers tokenizer"),
        ("org/name", "type str: must be a fast"),
        (fast_tokenizer(split_special_tokens=True), "split_special_tokens=True: must be False"),
        (fast_tokenizer(eos_token_id=77), "eos_token_ids holds 77"),
        (fast_tokenizer(chat_template=3), "chat_template is of type int"),
    ]:
        folder = write_folder(tmp_path, CONFIG, TENSORS)
        with pytest.raises(ValueError, match=message):
            jsparse.load(folder, tokenizer=given)
        with pytest.raises(ValueError, match=message):
            jsparse.from_transformers(LlamaForCausalLM(CONFIG, TENSORS), tokenizer=given)


def test_generation_marks_of_templates_are_ignored():
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    messages = [{"role": "user", "content": "b"}]
    for template in (TEMPLATE, TEMPLATE.replace("{{ m.content }}", marked)):
        tokenizer = Tokenizer.from_transformers(fast_tokenizer(chat_template=template))
        assert tokenizer.apply_chat_template(messages) == "<s>b</s><pad>a"
