"""Tests models and tokenizers passed in memory against transformers' own.

Needs the extra hf: `python3 -m uv run --extra hf pytest tests/models/test_with_transformers.py`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
torch = pytest.importorskip("torch", reason="needs the extra hf")

import jax  # noqa: E402

import jsparse  # noqa: E402
from jsparse.models.gguf import GGUFFile  # noqa: E402
from jsparse.models.tokenizer import Tokenizer  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures"
HF = FIXTURES / "hf"
FOLDERS = (
    *("llama3", "qwen2", "qwen2_sharded", "qwen3", "qwen2_yarn", "qwen3_yarn", "llama_linear"),
    *("mistral", "qwen2_windows", "qwen2_moe", "qwen3_moe"),
)
STRINGS = json.loads((FIXTURES / "tokenizers" / "corpus.json").read_text())["strings"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "named tokens": "{{ bos_token }}{{ pad_token }}{{ unk_token }}" + CHATML + "{{ eos_token }}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}\n{% else %}none\n{% endif %}" + CHATML,
    "loops": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}] {{ m.content }}"
        "{% generation %}{% set n = 7 %}{{ n }}{% endgeneration %}{{ n }}\n{% endfor %}"
    ),
}
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Où est <|im_end|> le fleuve?"},
    {"role": "assistant", "content": "Là-bas & <ici>"},
    {"role": "user", "content": "Merci"},
]


def model_of(name: str, dtype: Any = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(HF / name, dtype=dtype)


@torch.inference_mode()
def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(tokens).long()).logits.float().numpy()


@pytest.mark.parametrize("name", FOLDERS)
def test_model_in_memory_equals_the_model_of_its_files(name):
    model = model_of(name)
    made, read = jsparse.from_transformers(model, dtype="float32"), jsparse.load(HF / name)
    jax.tree.map(np.testing.assert_array_equal, made.weights, read.weights)
    assert made.config == read.config
    assert made.generation_defaults == read.generation_defaults
    assert made.name == str(HF / name)
    with np.load(HF / name / "expected.npz") as file:
        tokens = file["tokens"][:, :100]
    expected = logits_of(model, tokens)
    error = np.abs(np.asarray(jsparse.logits(made, tokens)) - expected).max()
    assert error < 2e-4 * np.abs(expected).max()


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Returns transformers' tokenizer with the vocabulary of a GGUF fixture."""
    metadata = GGUFFile(FIXTURES / "tokenizers" / f"{name}.gguf").metadata
    own = Tokenizer.from_gguf(metadata)
    if name == "qwen2":
        tokens, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
        vocab = {token: index for index, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        made = transformers.Qwen2Tokenizer(vocab=vocab, merges=pairs)
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        return made
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own._core, bos_token=own._bos_token, eos_token=own._eos_token
    )


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "llama"])
def test_ids_equal_those_of_transformers(name):
    theirs = tokenizer_of(name)
    ours = Tokenizer.from_transformers(theirs)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    cleaned = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in [*STRINGS, "<|im_start|>a<|im_end|>", "</s> <s>"]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, **cleaned), text


@pytest.mark.parametrize("tools", [None, [{"name": "é", "parameters": {"b": [1, "<&>"]}}]])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe"])
def test_chats_equal_those_of_transformers(name, template, tools):
    theirs = tokenizer_of(name)
    theirs.chat_template = TEMPLATES[template]
    ours = Tokenizer.from_transformers(theirs)
    options = {"add_generation_prompt": True, "tools": tools}
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, **options) == text
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **options)
    assert ours.encode(text, add_special_tokens=False) == ids
