"""Tests that results of `recommend` are stored by device and model, and found for caches of similar
size.
"""

import json

import jax
import numpy as np
import pytest

from jsparse.builder import dense
from jsparse.cache import CacheSpec
from jsparse.policies import choices
from jsparse.policies.auto import _log, auto, choose
from jsparse.policies.choices import Choice, find, keep, known_as, stored
from jsparse.policy import resolved

HERE = "here"


def make_choice(**changed):
    given = {
        "model": "org/name",
        "device": HERE,
        "dtype": "float32",
        "batch": 2,
        "context": 1024,
        "policy": "streaming(sink=4, recent=60)",
        "ms": 2.0,
        "dense_ms": 3.0,
        "kl": 0.01,
        "date": "2026-01-02",
    }
    return Choice(**given | changed)


def spec(tokens=1024, batch=2, model="org/name", dtype="float32"):
    return CacheSpec(1, batch, 4, 2, 16, 8, tokens // 8, np.dtype(dtype), model=model)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPARSE_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


def test_store_is_empty_at_first():
    assert stored() == []
    assert find(spec(), HERE) is None


def test_choice_replaces_that_of_the_same_sizes(folder):
    keep([make_choice(), make_choice(context=4096)])
    keep([make_choice(policy="dense()")])
    assert [(each.context, each.policy) for each in stored()] == [
        (1024, "dense()"),
        (4096, "streaming(sink=4, recent=60)"),
    ]
    assert [path.name for path in folder.iterdir()] == ["choices.json"]


def test_unmeasured_models_and_devices_have_no_choice():
    keep([make_choice()])
    assert find(spec(), HERE) == make_choice()
    assert find(spec(batch=7), HERE) == find(spec(520), HERE) == find(spec(1280), HERE)
    for other in (
        {"model": "org/x"},
        {"dtype": "bfloat16"},
        {"batch": 1},
        {"tokens": 512},
        {"tokens": 1288},
    ):
        assert find(spec(**other), HERE) is None, other
    assert find(spec(), "another device") is None


def test_nearest_batch_and_shortest_context_win():
    keep(
        [make_choice(batch=batch, context=context) for batch in (1, 4) for context in (1024, 1200)]
    )
    assert find(spec(1024, batch=3), HERE) == make_choice(batch=1, context=1024)
    assert find(spec(1024, batch=9), HERE) == make_choice(batch=4, context=1024)
    assert find(spec(1400, batch=9), HERE) == make_choice(batch=4, context=1200)


def test_paths_are_absolute(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert known_as("model") == known_as("./model") == str(tmp_path / "model")
    assert known_as("org/model") == "org/model"
    assert known_as("") == ""


def test_damaged_file_is_named(folder):
    folder.mkdir()
    wrong = json.dumps([make_choice()._asdict() | {"batch": "2"}])
    for text in ("[", '[{"model": "m"}]', wrong):
        (folder / "choices.json").write_text(text)
        with pytest.raises(ValueError, match=r"choices\.json was not written by `jsparse"):
            find(spec(), HERE)


def test_auto_uses_the_measured_choice_and_names_its_source():
    assert resolved(auto(), spec()) is dense()
    keep([make_choice(device=jax.local_devices()[0].device_kind)])
    assert resolved(auto(), spec()).name == "streaming(sink=4, recent=60)"
    assert choose(spec()).reason == (
        "measured by `jsparse recommend` on 2026-01-02, 2 x 1024 tokens: 1.50 times as fast as "
        "dense attention, KL 0.01"
    )


def test_auto_warns_once_without_measurements(caplog):
    _log.cache_clear()
    for _ in range(2):
        assert resolved(auto(), spec()) is dense()
    (line,) = caplog.messages
    assert "dense() here: this model has not been measured" in line
    assert line.endswith("`jsparse recommend org/name` measures it")
    keep([make_choice(device=jax.local_devices()[0].device_kind, policy="dense()")])
    _log.cache_clear()
    assert resolved(auto(), spec()) is dense()
    assert len(caplog.messages) == 1
    assert choices.file().exists()
