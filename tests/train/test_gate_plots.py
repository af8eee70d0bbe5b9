"""Tests that plots of the training are PNGs of the given steps, heads and numbers."""

import builtins

import jax
import numpy as np
import pytest

from jsparse.train import hard_kuma
from jsparse.train.plots import densities, heat_map

pytestmark = pytest.mark.filterwarnings("error")

STEPS = [*range(0, 1000, 100), 950]
NAMES = [f"layer {layer}, KV head {head}" for layer in (1, 2, 3) for head in (0, 1)]


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).random((len(STEPS), 4, 2))


def test_heat_map_shows_six_steps_from_first_to_last(values, tmp_path, figures):
    heat_map(tmp_path / "h.png", STEPS, values)
    *panels, bar = figures[0].axes
    assert [panel.get_title() for panel in panels] == [
        f"step {STEPS[i]}" for i in (0, 2, 4, 6, 8, 10)
    ]
    for panel, i in zip(panels, (0, 2, 4, 6, 8, 10), strict=True):
        (image,) = panel.get_images()
        np.testing.assert_allclose(image.get_array(), values[i], rtol=1e-6)
        assert image.get_clim() == (0, 1)
    assert "retrieval" in bar.get_ylabel()


def test_densities_are_of_the_most_decided_gates(tmp_path, figures):
    """Of gates [steps, 3, 2], the fourth becomes retrieval and the third sparse."""
    ends = np.array([[-1, 1], [-2, 3], [0.5, -0.5]])
    logs = np.linspace(0, 1, len(STEPS))[:, None, None] * ends
    a, b = np.exp(logs).astype(np.float32), np.exp(-logs).astype(np.float32)
    densities(tmp_path / "d.png", STEPS, a, b, NAMES)
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    retrieval, sparse = figures[0].axes
    score, pdf = jax.jit(hard_kuma.score), jax.jit(hard_kuma.pdf)
    for panel, role, place in ((retrieval, "retrieval", (1, 1)), (sparse, "sparse", (1, 0))):
        clearness = np.asarray(score(hard_kuma.Kuma(a[-1], b[-1])))[place]
        name = f"layer {1 + place[0]}, KV head {place[1]}"
        assert panel.get_title() == f"most clearly {role}: {name}, E[s] = {clearness:.2f}"
        lines = panel.get_lines()
        assert [line.get_label() for line in lines] == [
            f"step {STEPS[i]}" for i in (0, 2, 4, 6, 8, 10)
        ]
        np.testing.assert_allclose(lines[0].get_ydata(), 1, rtol=1e-5)
        shown = hard_kuma.Kuma(a[-1][place], b[-1][place])
        last = pdf(shown, np.asarray(lines[-1].get_xdata(), np.float32))
        np.testing.assert_allclose(lines[-1].get_ydata(), last, rtol=1e-5)


def test_values_of_another_shape_are_refused(tmp_path):
    for shape in [(10, 4, 2), (11, 8), (11, 0, 2), (11, 4, 2, 1)]:
        said = r"values of shape \(.*\): must be \[11 steps, layers, KV heads\]"
        with pytest.raises(ValueError, match=said):
            heat_map(tmp_path / "h.png", STEPS, np.zeros(shape))
    for a, b in [((11, 3, 2), (11, 2, 3)), ((10, 3, 2),) * 2, ((11, 5),) * 2, ((11, 0),) * 2]:
        said = r"a of shape .* and b of shape .* must both be \[11 steps, ...\] of 6 named"
        with pytest.raises(ValueError, match=said):
            densities(tmp_path / "d.png", STEPS, np.ones(a), np.ones(b), NAMES)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_reported_with_the_package_to_install(values, tmp_path, monkeypatch):
    found = builtins.__import__

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {module!r}", name="matplotlib")
        return found(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"plots need matplotlib: .*pip install '\.\[eval\]'"):
        heat_map(tmp_path / "p.png", STEPS, values)
