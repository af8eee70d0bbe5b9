"""Tests what bench.acceptance makes of rounds."""

import pytest

from bench import acceptance

pytestmark = pytest.mark.pure


def test_figures():
    """Two rounds of three drafts, of which three and one were accepted."""
    run = {"tokens": list(range(8)), "rounds": [(3, 3), (3, 1)], "seconds": 2.0}
    row = acceptance.figures(run, {"tokens": [*range(5), 9, 9, 9], "seconds": 3.0}, 3)
    assert row["text_is_dense"] is False and row["first_difference"] == 5
    assert row["drafted"] == 6 and row["accepted_share"] == pytest.approx(4 / 6)
    # of those behind a draft that was accepted, or behind none
    assert row["accepted_by_position"] == [1.0, 0.5, 1.0]
    assert row["tokens_per_round"] == 3.5 and row["over_dense"] == 1.5


def test_texts_are_long_enough():
    for text in acceptance.texts(4096).values():
        assert len(text) > 3 * 4096
