"""Tests that pieces add up to the text, for any tokens and stop strings."""

from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jsparse.text.stream import TextStream

pytestmark = pytest.mark.pure

SPECIAL = -1


class ByteTokenizer:
    """Ids are bytes; as in a byte-level BPE, bytes that form no character become U+FFFD.

    SPECIAL has no text.
    """

    control_tokens: ClassVar = {"<turn>": SPECIAL}

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i != SPECIAL).decode("utf-8", errors="replace")


class WordTokenizer:
    """Ids name pieces; as in SentencePiece, one leading space of the decoded text is dropped."""

    control_tokens: ClassVar = {"<turn>": SPECIAL}

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids if i != SPECIAL).removeprefix(" ")


def run(tokenizer: Any, ids, stop=(), **options):
    """Returns the pieces in order (the flush last), the stream, and the number of consumed ids."""
    stream, pieces = TextStream(tokenizer, tuple(stop), **options), []
    for token in ids:
        if not stream.stopped:
            pieces.append(stream.push(token))
    taken = len(pieces)
    pieces.append(stream.finish())
    return pieces, stream, taken


def test_character_over_several_tokens_waits_for_its_end():
    pieces, stream, _ = run(ByteTokenizer(), "né→🙂!".encode())
    assert pieces == ["n", "", "é", "", "", "→", "", "", "", "🙂", "!", ""]
    assert stream.text == "né→🙂!"


def test_incomplete_character_comes_with_the_flush():
    pieces, stream, _ = run(ByteTokenizer(), b"a" + "→".encode()[:2])
    assert pieces == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


def test_spaces_survive_decoders_that_strip():
    tokenizer = WordTokenizer(" one", " two", "!")
    assert run(tokenizer, [0, 1, 2, 0])[0] == ["one", " two", "!", " one", ""]
    assert run(tokenizer, [0, SPECIAL, 1, SPECIAL, SPECIAL, 1])[1].text == "one two two"


def test_first_space_after_a_prompt_stays():
    tokenizer = WordTokenizer(" one", " two", "!")
    for before in ([0], [2, SPECIAL], [1] + 40 * [SPECIAL]):
        pieces, stream, _ = run(tokenizer, [0, 1], before=before)
        assert (pieces, stream.text) == ([" one", " two", ""], " one two")
        _, stream, taken = run(tokenizer, [0, 1], [" one"], before=before)
        assert (stream.text, taken) == ("", 1)
    assert run(tokenizer, [0, 1], before=[SPECIAL])[1].text == "one two"  # the text's own start


def test_stop_string_that_is_a_control_token_ends_there():
    for ids, options, text, taken in [
        ([97, SPECIAL, 98], {}, "a", 2),
        ([97, SPECIAL, 98], {"include_stop": True}, "a<turn>", 2),
        ([SPECIAL, 97, SPECIAL, 98], {"min_tokens": 2}, "a", 3),
        ([SPECIAL, 97, SPECIAL, 98], {"min_tokens": 2, "before": [99]}, "a", 3),
        ([*"→".encode()[:2], SPECIAL], {}, "\N{REPLACEMENT CHARACTER}", 3),
        (b"<turn>b", {}, "", 6),
        ([97, 33, SPECIAL], {}, "a", 2),
    ]:
        pieces, stream, count = run(ByteTokenizer(), ids, ["<turn>", "!"], **options)
        assert (stream.text, "".join(pieces), count, stream.stopped) == (text, text, taken, True), (
            ids
        )


def test_stop_strings():
    for pieces, stop, expected, text in [
        (["ab", "ST", "OP", "cd"], ["STOP"], ["ab", "", "", ""], "ab"),
        (["ab", "ST", "art"], ["STOP"], ["ab", "", "STart", ""], "abSTart"),
        (["ab", "ST"], ["STOP"], ["ab", "", "ST"], "abST"),
        (["STOP"], ["STOP"], ["", ""], ""),
        # the match begins inside another possible match
        (["x", "aa", "ab"], ["aab"], ["x", "", "a", ""], "xa"),
        (["a", "bc"], ["abcd", "bc"], ["", "a", ""], "a"),
        (["ab", "cd"], ["cd", "bc"], ["a", "", ""], "a"),  # of several, the one that begins first
        (["ab", "c"], ["b", "abc"], ["a", ""], "a"),
        (["one", "two"], [], ["one", "two", ""], "onetwo"),
    ]:
        got, stream, _ = run(WordTokenizer(*pieces), range(len(pieces)), stop)
        assert (got, stream.text) == (expected, text), pieces
        assert stream.stopped == (text != "".join(pieces)), pieces


def test_stop_strings_may_stay_and_min_tokens_delays_them():
    for pieces, stop, options, expected, text in [
        (["ab", "ST", "OPcd"], ["STOP"], {"include_stop": True}, ["ab", "ST", "OP", ""], "abSTOP"),
        (["a", "bc"], ["abcd", "bc"], {"include_stop": True}, ["a", "bc", ""], "abc"),
        (["abcd"], ["abc", "ab"], {"include_stop": True}, ["ab", ""], "ab"),
        (["xab", "yab"], ["ab"], {"min_tokens": 1}, ["xab", "y", ""], "xaby"),
        (["xa", "by"], ["ab"], {"min_tokens": 1}, ["x", "", ""], "x"),
        (["ab", "ab"], ["ab"], {"min_tokens": 2}, ["ab", "ab", ""], "abab"),
        (["aa", "a"], ["aa"], {"min_tokens": 1}, ["a", "", ""], "a"),
    ]:
        got, stream, taken = run(WordTokenizer(*pieces), range(len(pieces)), stop, **options)
        assert (got, stream.text, taken) == (expected, text, len(pieces)), pieces


letters = st.sampled_from(["a", "b", "ab", "ba", "aab", "é", "→", "🙂", " "])
stops = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@settings(max_examples=200)
@given(st.lists(letters, max_size=10), stops, st.booleans(), st.integers(0, 12))
@example(["a", "a", "b"], ["ab", "aab"], False, 0)
@example(["a", "é", "b"], ["aé", "éb"], True, 2)
def test_pieces_add_up_and_stop_where_they_should(words, stop, include_stop, min_tokens):
    ids = list("".join(words).encode())
    options = {"include_stop": include_stop, "min_tokens": min_tokens}
    pieces, stream, taken = run(ByteTokenizer(), ids, stop, **options)
    assert "".join(pieces) == stream.text
    # the slow way: decode everything again after each id, and search for the first stop string
    early = len(bytes(ids[:min_tokens]).decode("utf-8", errors="ignore"))
    for n in range(min_tokens + 1, len(ids) + 1):
        text = bytes(ids[:n]).decode("utf-8", errors="ignore")
        ends = [
            (at, at + len(s)) for s in stop for at in range(len(text)) if text.startswith(s, at)
        ]
        found = [(start, end) for start, end in ends if end > early]
        if found:
            text = text[: min(found)[include_stop]]
            assert (stream.text, stream.stopped, taken) == (text, True, n)
            return
    assert (stream.text, stream.stopped) == ("".join(words), False)


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"aé→🙂".encode(), 0xFF, 0xC3, SPECIAL]), max_size=40))
@example([*"\N{REPLACEMENT CHARACTER}".encode(), 0x61])
@example([0xF0] * 9 + [*"🙂🙂".encode(), 0x9F] * 3)
@example([0xA1] * 8 + [0xF0, 0x9F] * 5 + [0xF0])
@example([0xFF] * 5 + [*"🙂".encode()] + [0xFF] * 3)
def test_any_bytes_become_the_text_of_all_ids(ids):
    """One by one or many at a time."""
    whole = ByteTokenizer().decode(ids)
    pieces, stream, _ = run(ByteTokenizer(), ids)
    assert "".join(pieces) == stream.text == whole
    for size in (5, 12, 40):
        stream = TextStream(ByteTokenizer(), ())
        pieces = [stream.push(*ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join([*pieces, stream.finish()]) == whole


def test_invalid_bytes_cost_no_more_than_others():
    """The number of ids decoded per id does not grow."""
    decoded = []

    class Counted(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            decoded.append(len(ids))
            return super().decode(ids)

    run(Counted(), [0xF0] * 2000, ["zz"])
    assert sum(decoded) < 2000 * 80


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0, 1, 2, 3, SPECIAL]), max_size=12), stops)
def test_words_become_the_text_of_all_ids(ids, stop):
    tokenizer = WordTokenizer(" a", " b", "ab", "é ")
    pieces, stream, taken = run(tokenizer, ids, stop)
    assert "".join(pieces) == stream.text
    whole = tokenizer.decode(ids[:taken])
    assert whole.startswith(stream.text)
    assert stream.stopped or stream.text == whole
