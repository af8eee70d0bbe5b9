"""Tests that the number of drafts is the fastest, for any acceptance rate and round time."""

from collections import deque
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.runtime import draft_length
from jsparse.runtime.draft_length import Acceptance, DraftLength, Remaining, most_drafts

pytestmark = pytest.mark.pure

# a round without drafts takes a second; results arrive two rounds late
LAG = 2


def tokens_of(agreement, drafts):
    """The mean tokens of a round (arXiv:2211.17192, eq. 1): 1 + p + … + p^d."""
    return sum(agreement**nth for nth in range(drafts + 1))


def best_seconds(agreement, each, most):
    """The seconds per token of the best number of drafts."""
    return min((1 + each * number) / tokens_of(agreement, number) for number in range(most + 1))


def decode(agreement, each, *, most=4, tokens=1000, rows=1, seed=0, slow=5.0):
    """Returns the seconds per token of a simulated run; its first round is measured as slow."""
    random, length, late = Random(seed), DraftLength(adapts=True), deque()
    made = took = 0
    while made < tokens * rows:
        number = length.choose(most)
        assert 0 <= number <= most
        accepted = [
            next((nth for nth in range(number) if random.random() >= agreement), number)
            for _ in range(rows)
        ]
        seconds = (1 + each * number) * random.gauss(1, 0.02)
        made, took = made + sum(accepted) + rows, took + seconds
        late.append(([number] * rows, accepted, seconds * slow))
        slow = 1.0
        if len(late) > LAG:
            drafted, kept, seconds = late.popleft()
            length.observe(drafted, kept)
            length.took(1, max(drafted), seconds)
    return took * rows / made


def batch_seconds(agreements, each, *, most=4, tokens=160, seed=0, of_rows=True):
    """Returns the seconds until all rows of a simulated batch have `tokens` tokens.

    A round with drafts takes 0.4 of a step more than they do; without drafts a program runs eight
    steps. A row that has ended takes no time of its own, which is half of a round's. An earlier
    batch gave the first estimates. Without `of_rows` the choice does not see the rows.
    """
    random, length = Random(seed), DraftLength(adapts=True)
    for _ in range(2):
        took, late = 0.0, deque()
        rows = [Remaining(tokens, Acceptance()) for _ in agreements]
        wanted = [tokens] * len(rows)
        while max(wanted) > 0:
            seen = [row for row in rows if row.tokens > 0] if of_rows else ()
            number = length.choose(most, 1, seen, steps=True)
            drafted = [max(min(number, left - 1), 0) for left in wanted]
            accepted = [
                next((nth for nth in range(some) if random.random() >= p), some)
                for some, p in zip(drafted, agreements, strict=True)
            ]
            rounds = 1 if number else min(8, max(wanted))
            seconds = 1.4 + each * number if number else rounds
            active = sum(left > 0 for left in wanted) / len(rows)
            seconds *= (1 + active) / 2 * random.gauss(1, 0.02)
            counts = [min(kept + rounds, n) for kept, n in zip(accepted, wanted, strict=True)]
            wanted = [left - count for left, count in zip(wanted, counts, strict=True)]
            took += seconds
            late.append((drafted, accepted, counts, seconds, 0 if number else rounds))
            if len(late) > LAG:
                drafted, accepted, counts, seconds, steps = late.popleft()
                length.observe(drafted, accepted)
                length.took(1, max(drafted), seconds, steps=steps)
                for b, (left, acceptance) in enumerate(rows):
                    acceptance.observe([drafted[b]], [accepted[b]])
                    rows[b] = Remaining(left - counts[b], acceptance)
    return took


@pytest.mark.parametrize(
    ("agreements", "most_over_dense"),
    [
        # text that repeats itself, except in two rows
        ([0.99] * 30 + [0.55] * 2, 1.0),
        ([0.6, 0.7, 0.8, 0.9] * 8, 1.05),
        ([0.95] * 32, 0.75),
        ([0.3] * 32, 1.03),
    ],
)
def test_batch_does_not_end_later_for_its_slowest_rows(agreements, most_over_dense):
    """A draft takes 0.4 of a step, so that those of rows with 0.7 do not pay."""
    seconds = [batch_seconds(agreements, 0.4, seed=seed) for seed in range(5)]
    assert sum(seconds) / 5 < most_over_dense * 160


def test_rows_that_are_not_seen_may_end_late():
    """Of most tokens per second, which count if ended rows are replaced."""
    agreements = [0.9] * 16 + [0.6] * 16
    unseen, seen = (
        sum(batch_seconds(agreements, 0.4, seed=seed, of_rows=of_rows) for seed in range(5))
        for of_rows in (False, True)
    )
    assert unseen > 1.05 * seen


def test_row_begins_with_the_acceptance_of_all():
    """A row of which nothing is known counts like the pool; one with many rejections does not."""
    length, rejected = DraftLength(adapts=True), Acceptance()
    for drafts in (4, 2) * 3:
        length.took(1, drafts, 1 + 0.3 * drafts)
    for _ in range(100):
        length.observe([4], [4])
        rejected.observe([4], [0])
    assert length.choose(4) == length.choose(4, 1, [Remaining(50, Acceptance())]) == 4
    assert length.choose(4, 1, [Remaining(50, rejected)]) == 0
    # it is nearly at its end, and others are not
    others = [Remaining(50, Acceptance())] * 3
    assert length.choose(4, 1, [Remaining(1, rejected), *others]) == 4


def test_it_finds_the_fastest_number():
    for case in product((0.0, 0.5, 0.98), (0.2, 0.9), (1, 16)):
        agreement, each, rows = case
        seconds = decode(agreement, each, rows=rows)
        assert seconds < 1.05 * best_seconds(agreement, each, 4), case


@pytest.mark.slow
@settings(max_examples=6)
@given(st.floats(0, 1), st.floats(0.05, 1.5), st.integers(1, 7), st.integers(0, 99))
def test_it_never_loses_much_against_no_drafts(agreement, each, most, seed):
    """A draft may take longer than a step: then hardly any is made."""
    assert decode(agreement, each, most=most, seed=seed) < 1.08


def test_old_acceptance_is_forgotten():
    length = DraftLength(adapts=True)
    for _ in range(200):
        length.observe([4], [4])
    assert length.agreement > 0.99
    for _ in range(100):
        length.observe([4], [0])
    assert length.agreement < 0.03


def test_drafts_after_a_rejected_one_do_not_count():
    """Two rounds of four drafts, with none and two kept, count as four drafts."""
    length = DraftLength(adapts=True)
    for _ in range(500):
        length.observe([4, 4], [0, 2])
    assert length.agreement == pytest.approx(2 / 4)


@pytest.mark.parametrize("unused", [1, 2, 3])
def test_both_first_numbers_are_tried(unused):
    """Even if calls do not lead to a round, or are for a program of other rows."""
    length = DraftLength(adapts=True)
    for nth in range(40):
        said = length.choose(4, 8)
        if nth % unused == 0:
            length.took(8, said, 1 + 0.1 * said)
        length.choose(4, 1)
    # two and one draft have been timed: now it is the best, four
    assert length.choose(4, 8) == 4


def test_one_slow_round_decides_nothing():
    """The first round of two drafts was slow: both numbers are tried until each has three times."""
    length = DraftLength(adapts=True)
    length.took(1, 2, 10.0)
    for _ in range(2):
        length.took(1, 1, 1.1)
        assert length.choose(4) in (1, 2)
        length.took(1, 2, 1.2)
    length.took(1, 1, 1.1)
    assert length.choose(4) == 4


def test_program_of_rounds_without_drafts_is_timed_once_it_is_ready():
    """In the program with room for drafts, such rounds take twice the time, and drafting pays."""
    length = DraftLength(adapts=True)
    for drafts in (2, 1, 0) * 3:
        length.took(1, drafts, 2 + 0.5 * drafts)
        length.observe([4], [1])
    assert length.choose(4) > 0
    for _ in range(3):
        assert length.choose(4, steps=True) == 0
        length.took(1, 0, 8.0, steps=8)
    assert [length.choose(4, steps=True) for _ in range(20)] == [0] * 20


def test_rounds_without_drafts_do_not_count():
    length = DraftLength(adapts=True)
    length.observe([4, 4], [1, 3])
    before = length.agreement
    for _ in range(50_000):
        length.observe([0, 0], [0, 0])
    assert length.agreement == before


def test_estimates_begin_as_those_of_the_last_equal_program(monkeypatch):
    """As a copy: what is observed later belongs to one of them."""
    monkeypatch.setattr(draft_length, "_newest", {})
    first = DraftLength.continuing("program", adapts=True)
    for drafts in (4, 2) * 3:
        first.observe([4], [4])
        first.took(1, drafts, 1 + 0.1 * drafts)
    second = DraftLength.continuing("program", adapts=True)
    assert (first.choose(4), second.choose(4)) == (4, 4)
    others = ("another", True), ("program", False)
    others = [DraftLength.continuing(key, adapts=adapts) for key, adapts in others]
    assert [other.choose(4) for other in others] == [2, 4]
    assert others[1].agreement == draft_length.PRIOR_SHARE
    before = first.agreement
    second.observe([4], [0])
    assert first.agreement == before > second.agreement
    assert DraftLength.continuing("program", adapts=True).agreement == second.agreement


def test_only_the_newest_estimates_are_kept(monkeypatch):
    monkeypatch.setattr(draft_length, "_newest", {})
    for key in (0, 1, 0, *range(2, draft_length.KEPT + 1)):
        DraftLength.continuing(key, adapts=True)
    assert len(draft_length._newest) == draft_length.KEPT
    assert (0, True) in draft_length._newest and (1, True) not in draft_length._newest


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_a_draft_is_tried_now_and_then(steps):
    """After 128 tokens without drafts, in however many programs."""
    length, tried, tokens = DraftLength(adapts=True), [], 0
    for drafts in (2, 1) * 3:
        length.took(1, drafts, 1 + 5 * drafts)
    for _ in range(3):
        length.took(1, 0, 1.0, steps=steps)
    while len(tried) < 3:
        if length.choose(4, steps=steps > 0):
            tried.append(tokens)
            tokens = 0
        else:
            length.took(1, 0, steps or 1.0, steps=steps)
            tokens += steps or 1
    assert tried[1:] == [128, 128]


@pytest.mark.parametrize("most", [1, 2, 3, 6])
@pytest.mark.parametrize("ready", [0, 5, 100])
def test_small_numbers_are_tried_beside_a_program_of_steps(most, ready):
    """Drafts cost nothing and agree: the most are made, whenever the program becomes ready."""
    length = DraftLength(adapts=True)
    for nth in range(60):
        number = length.choose(most, steps=nth >= ready)
        length.observe([number], [number])
        length.took(1, number, 1.0, steps=int(number == 0 and nth >= ready))
    assert [length.choose(most, steps=ready <= 60) for _ in range(3)] == [most] * 3


def test_time_of_steps_counts_only_while_their_program_runs():
    """A step takes a quarter of a round without drafts in the program with room for them."""
    length = DraftLength(adapts=True)
    for drafts in (2, 1, 0) * 3:
        length.took(1, drafts, 4 + 0.1 * drafts)
        length.took(1, 0, 1.0, steps=1)
        length.observe([2], [1])
    assert length.choose(4, steps=True) == 0
    assert length.choose(4) > 0


def test_fixed_number_is_always_returned():
    length = DraftLength(adapts=False)
    for _ in range(50):
        length.observe([5], [0])
        length.took(1, 5, 1.0)
        assert length.choose(5) == 5


def test_programs_of_other_rows_are_timed_separately():
    """If drafting does not pay for eight rows, it still may for one."""
    length = DraftLength(adapts=True)
    for rows, each in ((1, 0.1), (8, 3.0)):
        for drafts in (4, 2) * 3:
            length.took(rows, drafts, 1 + each * drafts)
    for _ in range(50):
        length.observe([4], [3])
    said = [(length.choose(4, 1), length.choose(4, 8)) for _ in range(20)]
    assert min(of_one for of_one, _ in said) > 0
    assert max(of_eight for _, of_eight in said) == 0


def test_most_drafts():
    """Including the token before them there are at most 256 in all rows, 5 to 7 in each."""
    rows = (1, 8, 32, 40, 64, 500)
    assert [most_drafts(number, on_gpu=True) for number in rows] == [6, 6, 6, 5, 4, 4]
    assert most_drafts(1, on_gpu=False) == 2
