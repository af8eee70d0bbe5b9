"""Tests constants of a model: their values, that they are made once, and where they are stored."""

import dataclasses
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import KEY_REACH
from jsparse.cache.key_constants import KEY_CONSTANTS, SPAN, KeyConstants, angles_at, rotated
from jsparse.policies.clusters.boundary_classes import boundary_classes
from jsparse.runtime import constants as module
from jsparse.runtime.constants import (
    constants,
    fingerprint,
    key_constants,
    mid_and_scale,
    reach_of,
)
from tests.support.model_tokenizers import tokenizer_of
from tests.support.tiny import random_prompts, tiny_params

PROMPT = random_prompts((20,))[0]
POLICY = "twilight(all_pages(), p=0.6)"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPARSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def made(monkeypatch):
    """A list that grows by one whenever constants are made."""
    calls = []

    def counted(params, report):
        calls.append(params)
        return key_constants(params, report)

    counted.__name__ = "key_constants"
    monkeypatch.setattr(module, "MAKERS", dict.fromkeys(KEY_CONSTANTS, counted))
    return calls


def fresh(seed=0):
    return dataclasses.replace(tiny_params(num_layers=1, seed=seed), constants={})


def files(tmp_path):
    return sorted((tmp_path / "cache" / "key_constants").iterdir())


def test_mean_is_of_keys_before_rope_and_framed_keys_reach_as_far_as_queries():
    rng = np.random.default_rng(0)
    positions = jax.device_put(np.arange(512, dtype=np.int32))
    frequencies = jnp.asarray(1e6 ** (-np.arange(16) / 16), jnp.float32)
    constant = np.zeros((2, 1, 32))
    constant[:, :, [13, 14, 29, 31]] = rng.uniform(50, 200, (2, 1, 4))
    constant[:, :, [0, 16]] = 100  # turns by a radian per token: no mean shortens its reach
    before = jnp.asarray(constant + rng.standard_normal((2, 512, 32)), jnp.float32)
    keys = rotated(before, angles_at(positions, frequencies))
    queries = jnp.asarray(rng.standard_normal((4, 32, 32)) * np.arange(1, 33), jnp.float32)
    mid, scale = jax.jit(mid_and_scale)(keys, queries, positions, frequencies)
    long = [13, 14, 15, 29, 30, 31]
    np.testing.assert_allclose(mid[:, long], np.mean(before, 1)[:, long], atol=0.01)
    assert (np.asarray(mid)[:, [0, 16]] == 0).all()
    spans = angles_at(positions // SPAN * SPAN, frequencies)
    left = np.asarray(keys - rotated(mid[:, None], spans)) / np.tile(scale, 2)[:, None]
    reach = np.abs(left).reshape(2, 512, 2, 16).max((1, 2))
    met = np.asarray(queries).reshape(2, 64, 32) * np.tile(scale, 2)[:, None]
    size = np.sqrt((met.reshape(2, 64, 2, 16) ** 2).mean((1, 2)))
    np.testing.assert_allclose(reach, size, rtol=1e-4)


def test_reach_is_the_largest_key_of_a_pair():
    keys = np.zeros((1, 3, 8), np.float32)
    keys[0, 1, [1, 5]], keys[0, 2, 6] = (-7, 2), 3
    np.testing.assert_array_equal(reach_of(jnp.asarray(keys)), [[1, 7, 3, 1]])


def test_constants_are_made_once_per_model_and_kept_in_it(made):
    params, seen = fresh(), []
    report = lambda *progress: seen.append(progress)  # noqa: E731
    jsparse.generate(params, PROMPT, max_new_tokens=1, policy=POLICY, on_progress=report)
    assert sorted(params.constants) == sorted((*KEY_CONSTANTS, KEY_REACH))
    assert [done for phase, done, _ in seen if phase == "key constants"] == [0, 512]
    config = params.config
    shapes = {name: array.shape for name, array in params.constants.items()}
    by_pair = (config.num_layers, 2, 8)
    framed = KeyConstants((config.num_layers, 2, 16), by_pair, (8,))
    assert shapes == framed._asdict() | {KEY_REACH: by_pair}
    assert sorted(constants(params, jsparse.double_sparsity(budget=4))) == sorted(KEY_CONSTANTS)
    assert made == [params]


def test_next_process_finds_them_on_disk(made, tmp_path):
    first, again, other = fresh(), fresh(), fresh(seed=1)
    assert constants(first, jsparse.dense()) is None
    policy = jsparse.twilight(jsparse.all_pages())
    wanted, found = (constants(params, policy) for params in (first, again))
    assert len(made) == 1
    for name in KEY_CONSTANTS:
        np.testing.assert_array_equal(wanted[name], found[name])
    constants(other, policy)
    assert len(made) == 2
    assert len(files(tmp_path)) == 2
    config = dataclasses.replace(first.config, rope_theta=1e6)
    changed = dataclasses.replace(first, config=config)
    assert len({fingerprint(params) for params in (first, again, other, changed)}) == 3


def test_damaged_file_is_made_again(made, tmp_path, caplog):
    policy = jsparse.twilight(jsparse.all_pages())
    constants(fresh(), policy)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with caplog.at_level(logging.WARNING, "jsparse.constants"):
        constants(fresh(), policy)
    assert len(made) == 2
    assert "is damaged" in caplog.text
    assert path.read_bytes() == whole
    assert files(tmp_path) == [path]


def test_unwritable_folder_only_costs_time(made, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPARSE_CACHE_DIR", str(tmp_path / "file"))
    policy = jsparse.twilight(jsparse.all_pages())
    assert constants(fresh(), policy)
    assert "cannot be written" in caplog.text
    assert os.listdir(tmp_path) == ["file"]


def test_save_writes_the_constants(made, tmp_path):
    params = fresh()
    jsparse.save(params, tmp_path / "without")
    assert jsparse.load(tmp_path / "without").constants == {}
    constants(params, jsparse.twilight(jsparse.all_pages()))
    jsparse.save(params, tmp_path / "with")
    loaded = jsparse.load(tmp_path / "with")
    assert sorted(loaded.constants) == sorted((*KEY_CONSTANTS, KEY_REACH))
    for name, array in params.constants.items():
        np.testing.assert_array_equal(loaded.constants[name], array)
    path = tmp_path / "with" / "constants.safetensors"
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"constants\.safetensors is damaged"):
        jsparse.load(tmp_path / "with")


def needing(*names):
    """A policy that needs these constants."""
    return jsparse.dense()._replace(needs=names, name="chunky()")


def with_tokenizer(params):
    return dataclasses.replace(params, tokenizer=tokenizer_of("llama"))


def test_boundary_classes_come_from_the_tokenizer_and_are_made_once(monkeypatch, tmp_path, caplog):
    calls = []

    def counted(tokenizer, vocab_size):
        calls.append(tokenizer)
        return boundary_classes(tokenizer, vocab_size)

    monkeypatch.setattr(module, "boundary_classes", counted)
    params = with_tokenizer(fresh())
    with caplog.at_level(logging.WARNING, "jsparse.constants"):
        found = constants(params, needing("boundary_classes", "boundary_classes_or_none")) or {}
    assert not caplog.text
    for table in found.values():
        assert isinstance(table, jax.Array)
        wanted = boundary_classes(params.tokenizer, params.config.vocab_size)
        np.testing.assert_array_equal(table, wanted)
    assert constants(params, needing("boundary_classes"))["boundary_classes"] is table
    assert calls == [params.tokenizer]
    other = dataclasses.replace(params, tokenizer=tokenizer_of("qwen2"))
    wanted = boundary_classes(other.tokenizer, params.config.vocab_size)
    again = constants(other, needing("boundary_classes"))["boundary_classes"]
    np.testing.assert_array_equal(again, wanted)
    assert calls == [params.tokenizer, other.tokenizer]


def test_model_without_a_tokenizer_is_refused_before_anything_is_allocated():
    policy = needing("boundary_classes")
    message = r"policy=chunky\(\) needs 'boundary_classes': .*'tiny' must have a tokenizer"
    with pytest.raises(ValueError, match=message):
        constants(fresh(), policy)
    with pytest.raises(ValueError, match=message):
        jsparse.generate(fresh(), PROMPT, max_new_tokens=2, policy=policy)


def test_or_none_gives_zeros_without_a_tokenizer_and_warns_once(caplog):
    params, policy = fresh(), needing("boundary_classes_or_none")
    with caplog.at_level(logging.WARNING, "jsparse.constants"):
        found = [constants(params, policy)["boundary_classes_or_none"] for _ in range(2)]
    assert [record.message for record in caplog.records] == [
        "chunks will be of a fixed size: the model 'tiny' must have a tokenizer, and has none"
    ]
    assert found[0] is found[1]
    assert found[0].shape == (params.config.vocab_size, 2)
    assert found[0].dtype == jnp.uint8
    assert not found[0].any()


def test_table_that_does_not_fit_the_vocabulary_is_refused():
    for table in (jnp.zeros((7, 2), jnp.uint8), jnp.zeros((300, 2), jnp.int32)):
        params = dataclasses.replace(fresh(), constants={"boundary_classes": table})
        with pytest.raises(ValueError, match=r"must be uint8\[\d+, 2\], the vocabulary's"):
            constants(params, needing("boundary_classes_or_none"))
