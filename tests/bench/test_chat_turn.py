"""Tests bench.chat_turn: its turns, its line of the table, and that other tokens end it."""

import sys
from types import SimpleNamespace

import pytest
from tiny import tiny_params

from bench.chat_turn import QUESTIONS, first_turn, main, measure, second_turn, summary, turns


@pytest.fixture
def answers(monkeypatch):
    """Puts stand-ins in place of the two ways to answer, whose ids the test may change."""
    ids = {"conversation": [1, 2], "whole": [1, 2]}

    def out(way, tokens, on_progress):
        on_progress("prefill", 1, tokens)
        on_progress("decode", 1, 9)
        return SimpleNamespace(token_ids=ids[way], text="An answer")

    class Conversation:
        def __init__(self, params, **options):
            assert options["policy"] == "dense" and options["max_length"] == 512

        def answer(self, messages, *, on_progress):
            return out("conversation", 30 if len(messages) == 1 else 5, on_progress)

    def generate(params, messages, *, on_progress, **options):
        assert messages == second_turn(first_turn("Text"), "An answer")
        return out("whole", 35, on_progress)

    monkeypatch.setattr("jsparse.Conversation", Conversation, raising=False)
    monkeypatch.setattr("jsparse.generate", generate, raising=False)
    return ids


def test_the_second_turn_follows_the_answer():
    roles = [message["role"] for message in second_turn(first_turn("Text"), "An answer")]
    assert roles == ["user", "assistant", "user"]
    assert first_turn("Text")[0]["content"] == f"Text\n\n{QUESTIONS[0]}"


def test_turns_tell_seconds_and_tokens_read(answers):
    done = turns(tiny_params(num_layers=1), "dense", "Text", 2)
    read = {name: turn.tokens_read for name, turn in done.items()}
    assert read == {"first": 30, "whole": 35, "conversation": 5}
    assert all(turn.seconds > 0 for turn in done.values())


def test_other_tokens_are_an_error(answers):
    answers["conversation"] = [1, 3]
    with pytest.raises(ValueError, match=r"policy=dense: .* gave \[1, 3\], must give \[1, 2\]"):
        turns(tiny_params(num_layers=1), "dense", "Text", 2)


def test_the_line_has_both_ways_and_their_ratio():
    def turn(seconds, read):
        return {
            "seconds": {"median": seconds, "min": seconds / 2, "max": 2 * seconds},
            "tokens_read": {"median": read, "min": read, "max": read},
        }

    row = {"policy": "dense", "whole": turn(8.0, 7160), "conversation": turn(2.0, 81)}
    line = summary(row)
    assert "whole 8.00 s (4.00-16.00), 7160 tokens read" in line
    assert line.endswith("conversation 2.00 s (1.00-4.00), 81 tokens read; 4.0x")


@pytest.mark.slow
def test_documents_that_the_text_lacks_are_refused():
    with pytest.raises(ValueError, match=r"runs=9: must leave 7000 of the \d+ tokens"):
        measure("smollm2", "dense", 7000, 32, 9)


def test_sizes_of_nothing_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat_turn", "--runs", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_chat_has_a_row():
    row = measure("smollm2", "dense", 60, 3, 1)
    assert row["conversation"]["tokens_read"]["max"] < row["whole"]["tokens_read"]["min"]
    assert "tokens read; " in summary(row)
