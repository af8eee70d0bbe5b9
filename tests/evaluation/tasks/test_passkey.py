"""Tests the pass key and the grid of needles: once in the text, where meta says."""

import re

import pytest

from jsparse.evaluation.tasks import parse
from jsparse.evaluation.tasks.niah import NOISE
from jsparse.evaluation.tasks.passkey import GRID_DEPTHS
from tests.support.encoders import smollm2, words

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("encode", "length"), [(smollm2, 512), (words, 2048)])
def test_key_occurs_once_in_the_text(encode, length):
    for index in range(10):
        sample = parse("passkey")[0].sample(encode, length, index)
        (key,) = sample.answers
        assert re.fullmatch(r"[1-9]\d{4}", key) and re.findall(r"\d+", sample.prompt) == [key]
        assert (
            sample.prompt.endswith("\nWhat is the pass key?")
            and sample.prefix == " The pass key is"
        )
        before, after = sample.prompt.split(f"The pass key is {key}. Remember it.")
        fillers = before.count(NOISE), after.count(NOISE)
        assert fillers[0] == round(sample.meta["depth"] * sum(fillers)) and sum(fillers) > 10


def test_depths_are_uniform():
    depths = sorted(
        parse("passkey")[0].sample(words, 512, index).meta["depth"] for index in range(400)
    )
    assert all(abs(depth - i / 399) < 0.07 for i, depth in enumerate(depths))


def test_grid_has_needles_at_its_depths():
    (task,) = parse("niah_grid")
    for index in range(12):
        sample = task.sample(words, 1024, index)
        lines = sample.prompt.split("\n")[1:-1]
        (position,) = (i for i, line in enumerate(lines) if line != NOISE)
        assert sample.meta["depth"] == GRID_DEPTHS[index % 11]
        assert position == round(sample.meta["depth"] * (len(lines) - 1))
        assert sample.prompt.count(sample.answers[0]) == 1
    assert (GRID_DEPTHS[0], GRID_DEPTHS[-1], len(GRID_DEPTHS)) == (0, 1, 11)
