"""Tests bench.gate_distances: which gates it compares, and that more heads are nearer."""

import numpy as np
import pytest
from tiny import VOCAB, tiny_params

from bench.gate_distances import compared, distances
from jsparse.policies.head_gates import HeadGates, save
from jsparse.train.data import Source, TrainingSample


@pytest.mark.slow
def test_distances_fall_to_none_where_all_heads_see_everything():
    rng = np.random.default_rng(0)
    context, target = (rng.integers(VOCAB, size=n).astype(np.int32) for n in (40, 4))
    source = Source(
        lambda step, size: [TrainingSample(context, target, np.ones(4, bool))], 4, (40,), {}
    )
    every = np.ones((3, 2), bool)
    alone = every & (np.arange(3) == 0)[:, None]
    rows = distances(tiny_params(), {"all": every, "alone": alone}, source, 2, 0.3)
    assert [row["gates"] for row in rows] == ["all", "alone"]
    assert rows[0]["handed_on"] == pytest.approx(0, abs=1e-9) == rows[0]["refreshed"]
    assert rows[1]["handed_on"] > 0.01 < rows[1]["refreshed"]
    assert rows[1]["handed_on"] != rows[1]["refreshed"]


@pytest.mark.slow
def test_as_many_heads_are_drawn_as_the_first_gates_have(tmp_path):
    path, mask = str(tmp_path / "own.safetensors"), np.eye(4, 3, dtype=bool)
    mask[0] = True
    save(HeadGates(mask), path)
    masks = compared([path], 2)
    assert [*masks] == ["layer 0 alone", "random 0", "random 1", path]
    assert [int(mask.sum()) for mask in masks.values()] == [3, 5, 5, 5]
    assert not (masks["random 0"] == masks["random 1"]).all()
