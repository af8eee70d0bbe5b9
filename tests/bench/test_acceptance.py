"""Tests what bench.acceptance makes of rounds."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench import acceptance

pytestmark = pytest.mark.pure


def test_rounds_of_rows():
    """A row with two rounds of three drafts, of which three and one were accepted, and another."""
    of = acceptance.accepted([[(3, 3), (3, 1)], [(3, 0), (2, 2)]], 7)
    assert of["drafted"] == 11 and of["accepted_share"] == pytest.approx(6 / 11)
    # of those behind a draft that was accepted, or behind none
    assert of["accepted_by_position"] == [3 / 4, 2 / 3, 1.0]
    assert of["tokens_per_round"] == 2 * 6 / 4


def test_differences():
    """What follows a row's first difference is not compared."""
    dense = acceptance.Run([[1, 2, 3, 4], [5, 6, 7, 8]], [[], []], 1.0)
    run = acceptance.Run([[1, 2, 3, 4], [5, 9, 7, 1]], [[], []], 1.0)
    gaps = np.arange(8.0).reshape(4, 2)
    found = acceptance.differences(run, dense, gaps)
    assert found == [{"row": 1, "token": 1, "gap": 3.0}]
    assert acceptance.compared(found, 2, 4) == 6


def test_results_become_rows():
    """The first token, a round of two and three tokens, and one that goes beyond what is wanted."""
    one = SimpleNamespace(tokens=np.array([[1, 2]]), drafts=None)
    drafts = SimpleNamespace(counts=np.array([2, 3]), drafted=np.array([2, 2]))
    more = SimpleNamespace(tokens=np.array([[3, 4], [5, 6], [7, 8]]), drafts=drafts)
    run = acceptance.read([one, more, more], 4, 1.0)  # pyright: ignore[reportArgumentType]
    assert run.tokens == [[1, 3, 5, 3], [2, 4, 6, 8]]
    assert run.rounds == [[(2, 1), (2, 1)], [(2, 2)]]


def test_windows_are_spread():
    assert acceptance.windows([*range(10)], 4, 3) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_texts_are_long_enough():
    for text in acceptance.texts(4096).values():
        assert len(text) > 3 * 4096
