"""Tests the properties that all generated tasks share, and their names."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.evaluation.tasks import TASKS, parse
from jsparse.evaluation.tasks.sample import Sample, filled, largest, score_all, score_any
from tests.support.encoders import smollm2, spent, words

pytestmark = pytest.mark.pure

GENERATED = (
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "vt",
    "cwe",
    "fwe",
    "passkey",
    "niah_grid",
    "json_retrieval",
)


def one(name):
    return parse(name)[0]


@pytest.mark.parametrize(("encode", "length"), [(smollm2, 1024), (words, 8192)])
def test_budget_is_filled_and_not_exceeded(encode, length):
    for task in map(one, GENERATED):
        sample = task.sample(encode, length, 1)
        assert 0.9 * length < spent(encode, sample) <= length
        assert sample.meta["context_tokens"] == spent(encode, sample) - sample.max_new_tokens
        assert len(encode(sample.prompt + sample.prefix)) + sample.max_new_tokens <= length


def test_too_small_length_names_the_smallest():
    for task in map(one, GENERATED):
        with pytest.raises(ValueError, match=r"length=60: must be at least \d+ for s") as error:
            task.sample(words, 60, 3)
        min_size = int(str(error.value).split("at least ")[1].split()[0])
        assert spent(words, task.sample(words, min_size, 3)) <= min_size


def test_samples_depend_only_on_their_number():
    for task in map(one, GENERATED):
        ordered = [task.sample(words, 1024, index) for index in range(4)]
        random.seed(7)
        again = one(task.name)
        for index in (3, 2, 2, 0):
            assert again.sample(words, 1024, index) == ordered[index], task.name
        assert len({sample.prompt for sample in ordered}) == 4, task.name
        assert len({sample.answers for sample in ordered}) == 4, task.name
        assert task.sample(words, 1056, 0).answers != ordered[0].answers, task.name


def test_answers_score_and_the_question_does_not():
    for task in map(one, GENERATED):
        sample = task.sample(words, 1024, 1)
        said = f"They are {', '.join(sample.answers)}."
        if task.name != "json_retrieval":
            for spelled in (said, said.upper(), said.lower()):
                assert task.score(spelled, sample) == 1, task.name
        question = sample.prompt.rpartition("\n")[2] + sample.prefix
        for other in ("I do not know", "", question):
            assert task.score(other, sample) == 0, task.name
        with pytest.raises(ValueError, match="index=-1: must be from 0"):
            task.sample(words, 1024, -1)


def test_scores_match_hand_computed_ones():
    sample = Sample("", "", ("Red", "blue", "GREEN", "1234567"), 1, {})
    assert score_all("the red and the Green", sample) == 0.5
    assert score_all("12345678", sample) == 0.25
    assert score_all("yellow", sample) == 0
    assert score_any("yellow and BLUE", sample) == 1
    assert score_any("yellow", sample) == 0


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200), st.integers(0, 5), st.integers(0, 500)
)
def test_largest_size_fits_and_the_next_does_not(costs, min_size, spare):
    """The cost is a sum over units, so that it grows unevenly with the size.

    Each unit past the last one costs one more.
    """

    def cost(size):
        return sum(costs[:size]) + max(size - len(costs), 0)

    budget = cost(min_size) + spare
    size = largest(cost, budget, min_size)
    assert size >= min_size and cost(size) <= budget < cost(size + 1)
    assert largest(cost, budget, min_size, min_size + 3) == min(size, min_size + 3)


def test_running_out_of_words_is_an_error():
    def make(encode, rng, length, index, size):
        return Sample(" ".join(string.ascii_lowercase[:size]), "", ("a",), 4, {})

    with pytest.raises(
        ValueError, match="length=31: must be less, few has words for 30 tokens only"
    ):
        filled("few", make, min_size=1, max_size=26).sample(words, 31, 0)
    assert (
        len(filled("few", make, min_size=1, max_size=26).sample(words, 29, 0).prompt.split()) == 25
    )


def test_unknown_name_lists_the_known_ones():
    for name in ["kl", "", "VT", "longbench_dureader"]:
        with pytest.raises(ValueError, match=f"task {name!r} is unknown") as error:
            parse(f"vt,{name}")
        assert all(known in str(error.value) for known in TASKS), name


def test_duplicate_name_is_refused():
    with pytest.raises(ValueError, match="task 'vt' is given twice"):
        parse("vt,cwe,vt")
