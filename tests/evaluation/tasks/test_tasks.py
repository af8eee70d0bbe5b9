"""Tests what all generated tasks have in common, and their names."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.evaluation.tasks import TASKS, parse
from jsparse.evaluation.tasks.sample import Sample, filled, largest, score_all, score_any
from tests.support.encoders import smollm2, spent, words
from tests.support.marks import slow_except

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


@pytest.fixture(params=GENERATED)
def task(request):
    return parse(request.param)[0]


@pytest.mark.parametrize("length", slow_except([1024, 2048, 8192], 1024, 8192))
@pytest.mark.parametrize("encode", [smollm2, words])
def test_the_budget_is_used_and_kept(task, encode, length):
    for index in range(3 if length == 1024 else 1):
        sample = task.sample(encode, length, index)
        assert 0.9 * length < spent(encode, sample) <= length
        assert sample.meta["context_tokens"] == spent(encode, sample) - sample.max_new_tokens
        assert len(encode(sample.prompt + sample.prefix)) + sample.max_new_tokens <= length


@pytest.mark.parametrize("encode", [smollm2, words])
def test_a_length_too_small_says_which_works(task, encode):
    with pytest.raises(ValueError, match=r"length=60: must be at least \d+ for sample 3") as error:
        task.sample(encode, 60, 3)
    min_size = int(str(error.value).split("at least ")[1].split()[0])
    assert spent(encode, task.sample(encode, min_size, 3)) <= min_size


def test_samples_depend_on_their_number_alone(task):
    ordered = [task.sample(words, 1024, index) for index in range(4)]
    again = parse(task.name)[0]
    assert [again.sample(words, 1024, index) for index in (3, 2, 2, 0)] == [
        ordered[i] for i in (3, 2, 2, 0)
    ]
    assert len({sample.prompt for sample in ordered}) == 4
    assert len({sample.answers for sample in ordered}) == 4
    assert task.sample(words, 1056, 0).answers != ordered[0].answers


def test_samples_do_not_depend_on_the_global_generator(task):
    first = task.sample(words, 1024, 0)
    random.seed(7)
    assert task.sample(words, 1024, 0) == first


@pytest.mark.parametrize("task", GENERATED[:-1], indirect=True)
def test_saying_the_answers_scores_one(task):
    sample = task.sample(words, 1024, 1)
    said = f"They are {', '.join(sample.answers)}."
    assert (
        task.score(said, sample)
        == task.score(said.upper(), sample)
        == task.score(said.lower(), sample)
        == 1
    )
    assert task.score("I do not know", sample) == task.score("", sample) == 0


def test_the_prompt_alone_does_not_say_the_answer_at_its_end(task):
    sample = task.sample(words, 1024, 1)
    question = sample.prompt.rpartition("\n")[2] + sample.prefix
    assert task.score(question, sample) == 0


def test_samples_are_numbered_from_zero(task):
    with pytest.raises(ValueError, match="index=-1: must be from 0"):
        task.sample(words, 1024, -1)


def test_scores_by_hand():
    sample = Sample("", "", ("Red", "blue", "GREEN", "1234567"), 1, {})
    assert score_all("the red and the Green", sample) == 0.5
    assert score_all("12345678", sample) == 0.25
    assert score_all("yellow", sample) == 0
    assert score_any("yellow and BLUE", sample) == 1
    assert score_any("yellow", sample) == 0


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200), st.integers(0, 5), st.integers(0, 500)
)
def test_the_largest_size_fits_and_the_next_does_not(costs, min_size, spare):
    """The costs are those of units, so that those of sizes grow unevenly.

    Past the last unit they grow by one each.
    """

    def cost(size):
        return sum(costs[:size]) + max(size - len(costs), 0)

    budget = cost(min_size) + spare
    size = largest(cost, budget, min_size)
    assert size >= min_size and cost(size) <= budget < cost(size + 1)
    assert largest(cost, budget, min_size, min_size + 3) == min(size, min_size + 3)


def test_sizing_costs_little():
    sizes = []

    def cost(size):
        sizes.append(size)
        return 60 + 23 * size

    assert cost(largest(cost, 131072, 1)) <= 131072
    assert len(sizes) <= 6 and max(sizes) < 2 * 131072 / 23


def test_words_that_run_out_are_an_error():
    def make(encode, rng, length, index, size):
        return Sample(" ".join(string.ascii_lowercase[:size]), "", ("a",), 4, {})

    with pytest.raises(
        ValueError, match="length=31: must be less, few has words for 30 tokens only"
    ):
        filled("few", make, min_size=1, max_size=26).sample(words, 31, 0)
    assert (
        len(filled("few", make, min_size=1, max_size=26).sample(words, 29, 0).prompt.split()) == 25
    )


def test_names_become_tasks():
    assert [task.name for task in parse(" vt, cwe ,fwe")] == ["vt", "cwe", "fwe"]


@pytest.mark.parametrize("name", ["kl", "", "VT", "longbench_dureader"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=f"task {name!r} is unknown") as error:
        parse(f"vt,{name}")
    assert all(known in str(error.value) for known in TASKS)


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="task 'vt' is given twice"):
        parse("vt,cwe,vt")
