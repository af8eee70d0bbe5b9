"""Tests pass keys for training: exact lengths, and every key once at its drawn position.

Only words of the requested keys are scored.
"""

import math
import re

import numpy as np
import pytest

from jsparse.train.data import continued
from jsparse.train.passkey import ALPHABET, INTRODUCTION, passkeys
from tests.support.model_tokenizers import NAMES, joining, tokenizer_of

pytestmark = pytest.mark.pure

TEXT = " ".join(
    f"The ferry of day {day} left the quay and turned north." for day in range(100, 400)
)
SHORT = {"min_length": 400, "max_length": 700, "needles": 4, "words": 6}
NEEDLE = re.compile(r"^\s*Pass key (\d+) is: ([a-z -]+)\.\n\Z")


def rows(source, steps, size=1):
    """Yields context, target and scored of every row, without padding of the context."""
    for step in range(steps):
        batch = source.batch(step, size)
        for context, length, target, scored in zip(*batch, strict=True):
            yield context[:length], target, scored


def parts(tokenizer, context):
    """Returns the filler before, between and after the needles, as ids, and the keys.

    The keys are listed by number.
    """
    ids = context[len(tokenizer.encode(INTRODUCTION)) :]
    ends, keys = [], {}
    opening, closing = continued(tokenizer, "\nPass key"), continued(tokenizer, ".\n")
    start = 0
    while (at := find(ids, opening, start)) >= 0:
        end = find(ids, closing, at) + len(closing)
        ((number, key),) = NEEDLE.findall(tokenizer.decode(ids[at:end]))
        assert int(number) not in keys
        keys[int(number)] = key.split()
        ends.append((start, at))
        start = end
    ends.append((start, find(ids, continued(tokenizer, "\n\nRecite"), start)))
    return [ids[low:high] for low, high in ends], keys


def find(ids, piece, start):
    windows = np.lib.stride_tricks.sliding_window_view(ids[start:], len(piece))
    hits = np.flatnonzero((windows == piece).all(1))
    return start + int(hits[0]) if hits.size else -1


def asked_of(tokenizer, context):
    question = tokenizer.decode(context).rpartition("Recite")[2]
    assert re.fullmatch(r" pass key \d+( and pass key \d+)*\.\nAnswer:", question)
    return [int(number) for number in re.findall(r"\d+", question)]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_in_the_context_once(name):
    tokenizer = tokenizer_of(name)
    filler = np.array(tokenizer.encode(TEXT, add_special_tokens=False))
    circle = np.tile(filler, 2)
    for context, _, _ in rows(passkeys(tokenizer, TEXT, **SHORT), 8, 2):
        beginning = tokenizer.encode(INTRODUCTION)
        assert context[: len(beginning)].tolist() == beginning
        fillers, keys = parts(tokenizer, context)
        assert sorted(keys) == [1, 2, 3, 4]
        assert all(len(key) == 6 and set(key) <= set(ALPHABET) for key in keys.values())
        window = np.concatenate(fillers)
        assert len(window) > 20 and find(circle, window, 0) >= 0
        depths = np.cumsum([len(piece) for piece in fillers])[:-1] / len(window)
        assert (abs(depths - 0.5) <= 0.45 + 0.5 / len(window)).all()


@pytest.mark.parametrize(("name", "asked"), [*zip(NAMES, (1, 2, 4), strict=False)])
def test_scored_words_are_the_requested_keys(name, asked):
    tokenizer = tokenizer_of(name)
    source = passkeys(tokenizer, TEXT, asked=asked, **SHORT)
    orders = set()
    for context, target, scored in rows(source, 6):
        _, keys = parts(tokenizer, context)
        numbers = asked_of(tokenizer, context)
        orders.add(tuple(numbers))
        assert len(set(numbers)) == len(numbers) == asked
        words = [word for number in numbers for word in keys[number]]
        assert tokenizer.decode(target[scored]).split() == words
        told = "\n".join(f"Pass key {number}: {' '.join(keys[number])}" for number in numbers)
        end = len(target) - int((target[::-1] != 0).argmax())
        assert tokenizer.decode(target[:end]).strip() == told and scored[end - 1]
        # tokenised as in a whole text
        assert continued(tokenizer, f" {told}").tolist() == target[:end].tolist()
    assert len(orders) > 2


def test_lengths_and_depths_are_uniform():
    tokenizer = tokenizer_of("qwen2")
    source = passkeys(tokenizer, TEXT, min_length=500, max_length=900, needles=2, words=2, asked=1)
    contexts = [context for context, _, _ in rows(source, 60, 10)]
    lengths = np.sort([len(context) for context in contexts])
    assert lengths[0] >= 500 and lengths[-1] <= 900
    np.testing.assert_allclose(lengths, np.linspace(500, 900, 600), atol=25)
    depths, firsts = [], []
    for context in contexts[:300]:
        fillers, keys = parts(tokenizer, context)
        sizes = np.array([len(piece) for piece in fillers])
        depths += (np.cumsum(sizes)[:-1] / sizes.sum()).tolist()
        firsts.append(next(iter(keys)))
    np.testing.assert_allclose(np.sort(depths), np.linspace(0.05, 0.95, 600), atol=0.06)
    assert 110 < firsts.count(1) < 190


def test_keys_that_leave_no_room_are_drawn_again():
    tokenizer, small = tokenizer_of("smollm2"), {"needles": 3, "words": 8, "asked": 3}
    with pytest.raises(ValueError, match="min_length=1: must be at least") as error:
        passkeys(tokenizer, TEXT, min_length=1, **small)
    minimum = int(re.findall(r"\d+", str(error.value))[1])
    # the minimum assumes words of average length; all else is as in every context
    of_word = {word: len(continued(tokenizer, f" {word}")) for word in ALPHABET}
    words = math.ceil(3 * 8 * sum(of_word.values()) / len(of_word))
    roomy = passkeys(tokenizer, TEXT, min_length=600, max_length=600, **small)
    for context, _, _ in rows(roomy, 8):
        fillers, keys = parts(tokenizer, context)
        drawn = sum(of_word[word] for key in keys.values() for word in key)
        assert 600 - sum(map(len, fillers)) - drawn == minimum - words
    source = passkeys(tokenizer, TEXT, min_length=minimum, max_length=minimum, **small)
    fillers = [sum(map(len, parts(tokenizer, context)[0])) for context, _, _ in rows(source, 20)]
    assert 0 <= min(fillers) < 4 < max(fillers) < 30
    with pytest.raises(ValueError, match=f"={minimum - 1}: must be at least {minimum}, which need"):
        passkeys(tokenizer, TEXT, min_length=minimum - 1, **small)


def test_targets_are_as_wide_as_the_longest_answer():
    tokenizer = tokenizer_of("llama")
    source = passkeys(tokenizer, TEXT, asked=2, min_length=900, max_length=900, needles=12, words=2)
    longest = max(len(continued(tokenizer, f" {word}")) for word in ALPHABET)
    first, later = (
        [len(continued(tokenizer, f"{mark}Pass key {number}:")) for number in range(1, 13)]
        for mark in " \n"
    )
    headings = max(first[i] + later[j] for i in range(12) for j in range(12) if i != j)
    assert source.target_tokens == headings + 2 * 2 * longest
    # one word: the longest answer is drawn soon
    single = passkeys(tokenizer, TEXT, asked=1, min_length=400, max_length=400, needles=1, words=1)
    widths = [int(scored.sum()) for _, _, scored in rows(single, 20, 10)]
    assert max(widths) == longest and single.target_tokens == longest + len(
        continued(tokenizer, " Pass key 1:")
    )


def test_batches_are_padded_only_at_the_end():
    tokenizer = tokenizer_of("smollm2")
    source = passkeys(tokenizer, TEXT, **SHORT)
    for step in range(5):
        batch = source.batch(step, 3)
        assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, bool]
        assert batch.context.shape == (3, 700) and batch.length.shape == (3,)
        assert batch.target.shape == batch.scored.shape == (3, source.target_tokens)
        for context, length, target, scored in zip(*batch, strict=True):
            assert (context[length:] == 0).all() and (context[:length] != 0).all()
            last = int(np.flatnonzero(scored)[-1])
            assert (target[last + 1 :] == 0).all() and (target[: last + 1] != 0).all()


def test_batch_of_a_step_depends_only_on_the_seed():
    tokenizer = tokenizer_of("smollm2")
    source, again, other = (passkeys(tokenizer, TEXT, **SHORT, seed=seed) for seed in (3, 3, 4))
    source.batch(0, 2)
    for one, two in zip(source.batch(7, 2), again.batch(7, 2), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(again.batch(7, 2).context, again.batch(6, 2).context)
    assert not np.array_equal(again.batch(7, 2).target, other.batch(7, 2).target)


def test_arguments_out_of_range_are_refused():
    for options, message in [
        ({"needles": 0}, "needles=0: must be at least 1"),
        ({"words": 0}, "words=0: must be at least 1"),
        ({"asked": 0}, "asked=0: must be at least 1"),
        ({"asked": 5}, "asked=5: must be at most needles=4"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"max_length": 399}, "max_length=399: must be at least min_length=400"),
        ({"min_length": 50}, r"min_length=50: must be at least \d+, which needles=4 of words=6"),
        ({"text": ""}, "text='': must have at least one token"),
    ]:
        arguments = {"text": TEXT, **SHORT, **options}
        with pytest.raises(ValueError, match=message):
            passkeys(tokenizer_of("smollm2"), **arguments)


def test_tokenizer_that_joins_pieces_is_refused():
    with pytest.raises(ValueError, match="text=.*must begin with a token of its own after a word"):
        continued(joining(), " pass key")
    assert len(continued(joining(), ".\n")) == 2
