"""Tests what bench.persistent_layers runs and reckons without a GPU."""

import numpy as np
import pytest

from bench import persistent_layers
from tests.tiny import tiny_params


def test_a_layer_s_products_are_those_of_a_decode_step(monkeypatch):
    monkeypatch.setitem(persistent_layers.SHAPES, "tiny", (tiny_params().config, 2))
    layers, x = persistent_layers.random_layers("tiny")
    of_layers = [persistent_layers.Layers(*(w[n] for w in layers)) for n in range(2)]
    (got,) = persistent_layers.launched(of_layers, x, 0.5 * x)

    def norm(x):
        return x / np.sqrt(np.mean(x**2) + 1e-5)

    row = np.asarray(x, np.float64)
    delta = 0.5 * row
    for layer in of_layers:
        qkv, o, gate_up, down = (np.asarray(w, np.float64) for w in layer[1:])
        row = row + delta
        row = row + (norm(row) @ qkv)[:, : len(o)] @ o
        gate, up = np.split(norm(row) @ gate_up, 2, axis=-1)
        delta = (gate / (1 + np.exp(-gate)) * up) @ down
    wanted = row + delta
    assert np.abs(np.asarray(got, np.float64) - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_program_waits_from_its_arrival_to_the_last_one_s():
    stamps = np.zeros((2, 4, 3, 2), np.int32)  # layers, meetings, programs, arrived and went on
    stamps[..., 0] = [100, 200, 300]
    stamps[..., 1] = 1300
    assert persistent_layers.waited(stamps) == pytest.approx(4 * 1.1)
