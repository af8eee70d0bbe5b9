"""Tests bench.head_baselines: which head wins, exact counts, different draws, the files."""

import copy
import dataclasses
import sys

import numpy as np
import pytest
from tiny import tiny_params

from bench import head_baselines
from bench.head_baselines import drawn, far_mass, main, ranked
from jsparse.policies import head_gates

pytestmark = pytest.mark.slow
LENGTH, STEPS, PAGE = 420, 3, 16
PLAIN, MARK = 5, 9
LAYER, HEAD = 2, 1
FED = range(LENGTH - STEPS, LENGTH)  # tokens held at each step


def looking_params():
    """Returns a model of 3 layers and 2 KV heads whose HEAD in LAYER looks for the token MARK.

    Every other head weighs all tokens alike. Residuals stay embeddings. All tokens have channel 0,
    which the queries read; only MARK has channel 1, which is its key. Both lie in the slowest pair
    of rotated channels.
    """
    params = tiny_params()
    weights = copy.deepcopy(params.weights)
    embed = np.zeros(weights["params"]["embed"].shape, np.float32)
    embed[:, 0], embed[MARK, 1] = 1, 1
    weights["params"]["embed"] = embed
    config = params.config
    for layer in range(config.num_layers):
        block = weights["params"][f"layers_{layer}"]
        for part, name in (("attention", "qkv"), ("attention", "o"), ("mlp", "down")):
            block[part][name]["kernel"] = np.zeros(block[part][name]["kernel"].shape, np.float32)
        block["attention_norm"]["scale"] = np.ones(config.hidden_size, np.float32)
    slowest, group = config.head_dim // 2 - 1, config.num_heads // config.num_kv_heads
    heads = weights["params"][f"layers_{LAYER}"]["attention"]["qkv"]["kernel"].reshape(
        config.hidden_size, -1, 16
    )
    heads[0, HEAD * group : (HEAD + 1) * group, slowest] = 3
    heads[1, config.num_heads + HEAD, slowest] = 3
    return dataclasses.replace(params, weights=weights)


def window(marked):
    """Returns a window of the text with a mark at this place, or none."""
    return [MARK if place == marked else PLAIN for place in range(LENGTH)]


def mass(*marked, **other):
    tokens = [token for place in marked for token in window(place)]
    return far_mass(
        looking_params(),
        tokens,
        **{"prompts": len(marked), "length": LENGTH, "steps": STEPS, **other},
    )


def uniform():
    """Returns the far mass of a head that weighs all alike.

    It lies on pages from 64 on that end before the newest 256.
    """
    return np.mean([((held - 256) // PAGE * PAGE - 64) / held for held in FED])


@pytest.mark.parametrize(
    ("place", "expected"), [(64, 1), (159, 1), (63, 0), (160, 0), (LENGTH - 5, 0)]
)
def test_mass_between_the_first_tokens_and_the_newest_counts(place, expected):
    """With 417 to 419 tokens held, some of the page from 160 to 175 are among the newest."""
    scores = mass(place)
    assert scores.shape == (3, 2)
    assert scores[LAYER, HEAD] == pytest.approx(expected, abs=0.01)
    others = np.delete(scores.ravel(), LAYER * 2 + HEAD)
    np.testing.assert_allclose(others, uniform(), rtol=1e-4)


def test_the_head_that_looks_far_away_wins():
    gates = ranked(mass(100), 3, steps=STEPS)
    np.testing.assert_array_equal(gates.retrieval, [[1, 1], [0, 0], [0, 1]])
    assert np.argmax(gates.scores) == LAYER * 2 + HEAD
    assert gates.record == {"ranking": "mass", "sink": 64, "recent": 256, "steps": STEPS}


def test_prompts_are_averaged():
    scores = mass(100, LENGTH - 5)
    assert scores[LAYER, HEAD] == pytest.approx(0.5, abs=0.01)
    assert scores[0, 0] == pytest.approx(uniform(), rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "sizes", "message"),
    [
        (
            LENGTH,
            {"prompts": 2},
            "prompts=2 of length=420: must be at least 1, within 420 tokens of text",
        ),
        (LENGTH, {"prompts": 0}, "prompts=0"),
        (
            335,
            {"length": 335},
            "length=335: must have pages between the first 64 tokens and the newest 256",
        ),
        (LENGTH, {"steps": LENGTH}, "scored=420"),
    ],
)
def test_windows_that_do_not_fit_are_refused(tokens, sizes, message):
    with pytest.raises(ValueError, match=message):
        far_mass(
            tiny_params(),
            [PLAIN] * tokens,
            **{"prompts": 1, "length": LENGTH, "steps": STEPS, **sizes},
        )


@pytest.mark.parametrize("count", [3, 11, 90])
def test_draws_have_layer_0_and_the_count_and_differ_by_seed(count):
    gates = [drawn((30, 3), count, seed) for seed in range(4)]
    for seed, one in enumerate(gates):
        assert (
            one.retrieval.shape == (30, 3)
            and one.retrieval.sum() == count
            and one.retrieval[0].all()
        )
        assert one.scores is None and one.record == {"ranking": "random", "seed": seed}
        np.testing.assert_array_equal(one.retrieval, drawn((30, 3), count, seed).retrieval)
    assert len({one.retrieval.tobytes() for one in gates}) == (4 if count == 11 else 1)


def command(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(head_baselines, "load", lambda name: looking_params())
    monkeypatch.setattr(head_baselines, "text_tokens", lambda params: window(100))
    sizes = ("--prompts", "1", "--length", str(LENGTH), "--steps", str(STEPS))
    monkeypatch.setattr(
        sys, "argv", ["head_baselines", "--out", str(tmp_path / "gates"), *sizes, *arguments]
    )
    main()


def test_the_command_writes_files_that_policies_read(monkeypatch, tmp_path, capsys):
    command(monkeypatch, tmp_path, "--count", "3", "--random-seeds", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gates", "random_0", "random_1", "mass"]
    assert lines[-1].split()[1:] == [f"{LAYER}.{HEAD}"]
    for name in ("random_0", "random_1", "mass"):
        gates = head_gates.load(str(tmp_path / "gates" / f"{name}.safetensors"))
        assert gates.retrieval.sum() == 3 and gates.retrieval[0].all()
        assert gates.record["model"] == "smollm2" and "git_revision" in gates.record["environment"]
        assert (gates.scores is None) == (gates.record["ranking"] == "random")


def test_a_count_that_cannot_be_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, tmp_path, "--count", "1")
    assert "count=1: must be from 2, layer 0's heads, to 6" in capsys.readouterr().err


def test_the_default_count_is_one_head_in_eight(monkeypatch, tmp_path):
    monkeypatch.setattr(head_baselines, "far_mass", lambda *_, **__: np.zeros((30, 3), np.float32))
    config = dataclasses.replace(
        looking_params().config, num_layers=30, num_heads=9, num_kv_heads=3
    )
    params = dataclasses.replace(looking_params(), config=config)
    monkeypatch.setattr(sys, "argv", ["head_baselines", "--out", str(tmp_path)])
    monkeypatch.setattr(head_baselines, "load", lambda name: params)
    monkeypatch.setattr(head_baselines, "text_tokens", lambda params: [])
    main()
    assert len(list(tmp_path.iterdir())) == 4
    assert head_gates.load(str(tmp_path / "mass.safetensors")).retrieval.sum() == 11
