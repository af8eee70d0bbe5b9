"""Tests the figures of what one step reads, on a made-up step."""

import numpy as np
import pytest

from bench import plot_reads
from jsparse.evaluation.inspection import Inspection
from jsparse.policies.expressions import parse


def made_up() -> Inspection:
    attended = np.zeros((2, 3, 5), bool)
    attended[0, 1, 2] = True
    weights = np.zeros((2, 3, 5), np.float32)
    weights[0, 1, 2], weights[1, 2, 4] = 0.5, 0.5
    return Inspection("made-up", "dense()", list("abcde"), 4, "f", attended, weights, ())


def test_what_is_attended_to_and_what_is_passed_over_differ():
    colours = plot_reads.picture(made_up())
    assert colours.shape == (6, 5, 3)
    np.testing.assert_allclose(colours[1, 2], plot_reads.INK)
    np.testing.assert_allclose(colours[5, 4], plot_reads.FAINT)
    np.testing.assert_allclose(colours[0, 0], plot_reads.GROUND)


def test_a_figure_is_small(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "step.png"
    plot_reads.draw(made_up(), "dense()", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size < 100_000


@pytest.mark.parametrize("name", plot_reads.POLICIES)
def test_each_paper_has_its_policy(name):
    assert name in parse(plot_reads.POLICIES[name]).name or name == "twilight"
