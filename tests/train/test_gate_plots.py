"""Plots of the training are PNGs that show the steps, heads and numbers they were given."""

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


@pytest.fixture(scope="module")
def shapes():
    """Makes gates [steps, 3, 2] that part.

    The fourth becomes the clearest of retrieval, the third the sparsest.
    """
    ends = np.array([[-1, 1], [-2, 3], [0.5, -0.5]])
    logs = np.linspace(0, 1, len(STEPS))[:, None, None] * ends
    return np.exp(logs), np.exp(-logs)


def assert_png(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000


def test_the_heat_map_shows_six_steps_from_first_to_last(values, tmp_path, figures):
    heat_map(tmp_path / "h.png", STEPS, values)
    assert_png(tmp_path / "h.png")
    *panels, bar = figures[0].axes
    assert [panel.get_title() for panel in panels] == [
        f"step {STEPS[i]}" for i in (0, 2, 4, 6, 8, 10)
    ]
    for panel, i in zip(panels, (0, 2, 4, 6, 8, 10), strict=True):
        (image,) = panel.get_images()
        np.testing.assert_allclose(image.get_array(), values[i], rtol=1e-6)
        assert image.get_clim() == (0, 1)
    assert "retrieval" in bar.get_ylabel()


def test_few_steps_are_all_shown(values, tmp_path, figures):
    heat_map(str(tmp_path / "h.png"), STEPS[:2], values[:2])
    assert len(figures[0].axes) == 3


@pytest.fixture(scope="module")
def drawn(shapes, tmp_path_factory):
    """Draws the densities; returns the figure and its file."""
    from matplotlib.figure import Figure

    path, saved, save = tmp_path_factory.mktemp("densities") / "d.png", [], Figure.savefig

    def savefig(figure, *given, **how):
        saved.append(figure)
        return save(figure, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        densities(path, STEPS, shapes[0], shapes[1], NAMES)
    return saved[0], path


def test_the_densities_are_of_the_clearest_gates(shapes, drawn):
    figure, path = drawn
    assert_png(path)
    retrieval, sparse = figure.axes
    score, pdf = jax.jit(hard_kuma.score), jax.jit(hard_kuma.pdf)
    a, b = shapes[0].astype(np.float32), shapes[1].astype(np.float32)
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


def test_a_heat_map_of_another_shape_is_refused(tmp_path):
    for shape in [(10, 4, 2), (11, 8), (11, 0, 2), (11, 4, 2, 1)]:
        with pytest.raises(
            ValueError, match=r"values of shape \(.*\): must be \[11 steps, layers, KV heads\]"
        ):
            heat_map(tmp_path / "h.png", STEPS, np.zeros(shape))
        assert not list(tmp_path.iterdir()), shape


def test_densities_of_another_shape_are_refused(tmp_path):
    for a, b in [
        ((11, 3, 2), (11, 2, 3)),
        ((10, 3, 2),) * 2,
        ((11, 5),) * 2,
        ((11,),) * 2,
        ((11, 0),) * 2,
    ]:
        with pytest.raises(
            ValueError,
            match=r"a of shape .* and b of shape .* must both be \[11 steps, ...\] of 6 named",
        ):
            densities(tmp_path / "d.png", STEPS, np.ones(a), np.ones(b), NAMES)
        assert not list(tmp_path.iterdir()), a


def test_without_matplotlib_the_error_says_what_to_install(values, tmp_path, monkeypatch):
    found = builtins.__import__

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {module!r}", name="matplotlib")
        return found(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"plots need matplotlib: .*pip install '\.\[eval\]'"):
        heat_map(tmp_path / "p.png", STEPS, values)
