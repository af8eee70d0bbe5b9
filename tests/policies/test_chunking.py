"""Tests chunks against the greedy loop over the text, and chunks added later against one cut."""

import re
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.policies.clusters.boundary_classes import boundary_classes
from jsparse.policies.clusters.chunking import Chunks, boundaries, cut, cut_on, marks
from tests.support.model_tokenizers import NAMES, tokenizer_of

SLOTS = 160
TEXTS = {
    "prose": "The cache keeps what was read, so that nothing is read twice; it grows with the "
    "text. Most of it hardly matters! Which part does? Nobody knows before the question "
    "comes.\n\nSo we cut it into pieces, each of which (we hope) says one thing: a clause, a "
    "sentence.\n",
    "python": "def greedy(classes, least=8, most=16):\n    start = 0\n    while start < "
    "len(classes):\n        window = classes[start + least - 1 : start + most]\n        # the last "
    "of the best\n        start += least + max(range(len(window)), key=lambda i: rank[window[i]])"
    "\n\n\nclass Chunk:\n\tpass\r\n\r\n",
    "json": '{"name": "passkey", "values": [1, 2, [3, 4]], "where": {"row": 7, "page": null}, '
    '"notes": "a string, with a comma"}\n{"name": "other", "values": [], "where": {}}\n',
    "markdown": "# Title\n\n- one item\n- another, longer item\n\n---\n\n```\ncode > here\n```\n\n"
    "***\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "chinese": "河水结冰了，直到三月。我们读得越长，就越慢；为什么？因为每一步都要读所有的词！"
    "于是有人问：哪些词、哪些句子要紧？没有人知道。\n\n等到问题来了，才知道。",
    "no separators": "x" * 30 + "ﬃ" * 12 + "𝔘𝔫𝔦𝔠𝔬𝔡𝔢" * 8,
}
SEPARATORS = (
    (1, rb"(\n[ \t]*\n[ \t]*|(```|---|\*\*\*|[}\]>])[ \t\n]*)\Z"),
    (2, "([.?!\n]|。|？|！)[ \t]*\\Z".encode()),
    (3, "([,;:]|，|；|：|、)[ \t]*\\Z".encode()),
)


def slow_classes(tokens: list[bytes]) -> list[int]:
    """The class of the boundary after each token, by looking at its bytes and its neighbours'."""
    found = []
    for i, token in enumerate(tokens):
        behind = tokens[i + 1] if i + 1 < len(tokens) else b""
        before = (tokens[i - 1] if i else b"").replace(b"\r\n", b"\n")
        token = token.replace(b"\r\n", b"\n")
        if re.fullmatch(rb"[ \t\n]*\n[ \t]*", token) and re.search(rb"\n[ \t]*\Z", before):
            found.append(1)
            continue
        of_token = (number for number, pattern in SEPARATORS if re.search(pattern, token))
        blank = token.endswith((b" ", b"\t")) or behind.startswith((b" ", b"\t"))
        found.append(next(of_token, 4 if blank else 0))
    return found


def slow_starts(
    classes, first, end, size, *, capacity=10**9, min_length=8, max_length=16
) -> list[int]:
    """The greedy loop: from each start, walk to the last of the best boundaries."""
    starts = [first]
    while len(starts) <= capacity:
        stop, best = starts[-1] + max_length, 5
        if max_length * (capacity - len(starts) + 1) >= size - starts[-1] + max_length - min_length:
            for slot in range(starts[-1] + min_length - 1, starts[-1] + max_length):
                number = classes[slot] if slot < size and classes[slot] else 5
                if number <= best:
                    stop, best = slot + 1, number
        if stop > end:
            break
        starts.append(stop)
    return starts


def agree(chunks: Chunks, row: int, starts: list[int]) -> bool:
    """Whether a row's chunks are these, and all entries past them the end of the last one."""
    assert int(chunks.count[row]) == len(starts) - 1
    filled = starts + starts[-1:] * (chunks.starts.shape[1] - len(starts))
    assert chunks.starts[row].tolist() == filled
    return True


cut_jit = partial(jax.jit, static_argnames=("capacity", "min_length", "max_length"))(cut)
cut_on_jit = partial(jax.jit, static_argnames=("max_new", "min_length", "max_length"))(cut_on)


@cache
def vocabulary(name):
    tokenizer = tokenizer_of(name)
    return tokenizer.token_bytes(), jnp.asarray(
        boundary_classes(tokenizer, tokenizer.vocab_size + 3)
    )


def batch(name, texts):
    """Rows of tokens padded to SLOTS, their lengths and the bytes of each token."""
    rows = [tokenizer_of(name).encode(text, add_special_tokens=False)[:SLOTS] for text in texts]
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), SLOTS), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded, lengths, [[vocabulary(name)[0][i] for i in row] for row in padded]


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_all_kinds_are_cut_as_by_the_loop(name):
    tokens, lengths, spelled = batch(name, TEXTS.values())
    classes = jax.jit(boundaries)(marks(vocabulary(name)[1], jnp.asarray(tokens)))
    wanted = [slow_classes(row) for row in spelled]
    assert classes.tolist() == wanted
    first = np.array([0, 16, 3, 1, 4, 0], np.int32)
    chunks = cut_jit(classes, jnp.asarray(first), jnp.asarray(lengths), capacity=11)
    for row, its in enumerate(wanted):
        starts = slow_starts(its, first[row], lengths[row], SLOTS, capacity=11)
        assert agree(chunks, row, starts)
        assert first[row] == starts[0]
        assert 0 <= lengths[row] - starts[-1] < 16  # a row may end inside a chunk


CUT = {
    "prose": [
        "The cache keeps what was read, so that nothing is read twice;",
        " it grows with the text. Most of it hardly matters! Which part does?",
        " Nobody knows before the question comes.\n\n",
        "So we cut it into pieces, each of which (we hope) says one",
        " thing: a clause, a sentence.\n",
    ],
    "json": [
        '{"name": "passkey", "values": [1, 2,',
        ' [3, 4]], "where": {"row": 7,',
        ' "page": null}, "notes": "a string, with a comma"}',
        '\n{"name": "other", "values": [], "where": {}}',
    ],
}


@pytest.mark.parametrize("kind", ["prose", "json"])
def test_chunks_end_at_text_boundaries(kind):
    text = TEXTS[kind] + "zz" * 16  # the text continues, so that its end is an ordinary boundary
    tokens, lengths, spelled = batch("smollm2", [text])
    classes = boundaries(marks(vocabulary("smollm2")[1], jnp.asarray(tokens)))
    starts = (
        cut_jit(classes, jnp.zeros(1, jnp.int32), jnp.asarray(lengths), capacity=20)
        .starts[0]
        .tolist()
    )
    found = [b"".join(spelled[0][a:b]).decode() for a, b in pairwise(starts) if a < b]
    assert found[: len(CUT[kind])] == CUT[kind]


def test_second_newline_is_an_empty_line_and_a_following_blank_a_boundary():
    table = jnp.asarray([[2, 6], [0, 0], [0, 1], [2, 4], [4, 1], [1, 0]], jnp.uint8)
    newline, word, blank_word, line, blank, control = range(6)
    rows = [
        [newline, newline, word, newline, newline, newline],
        [line, newline, word, word, blank_word, word],
        [word, blank, newline, line, newline, control],
        [control, blank_word, line, blank_word, blank, word],
    ]
    found = boundaries(marks(table, jnp.asarray(rows)))
    assert found.dtype == jnp.uint8
    assert found.tolist() == [
        [2, 1, 0, 2, 1, 1],
        [2, 1, 0, 4, 0, 0],
        [4, 4, 2, 2, 1, 1],
        [1, 0, 2, 4, 4, 0],
    ]


SIZES = ((8, 16, 96), (4, 5, 40), (1, 1, 24))


@settings(max_examples=60)
@given(data=st.data())
def test_chunks_match_the_loop_at_any_capacity_without_losing_slots(data):
    min_length, max_length, size = data.draw(st.sampled_from(SIZES))
    odds = data.draw(st.sampled_from([(1, 1, 1, 1, 1), (9, 0, 0, 0, 1), (0, 1, 0, 0, 0)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    classes = rng.choice(5, (3, size), p=np.array(odds) / sum(odds)).astype(np.uint8)
    first = rng.integers(0, 10, 3).astype(np.int32)
    ends = rng.integers(0, size + 1, 3).astype(np.int32)
    ends[0] = size
    num_needed = -(-size // max_length)  # fits all rows and first slots
    capacity = data.draw(st.sampled_from([num_needed, size]))
    chunks = cut_jit(
        classes, first, ends, capacity=capacity, min_length=min_length, max_length=max_length
    )
    for row in range(3):
        starts = slow_starts(
            *(classes[row], first[row], ends[row], size),
            **{"capacity": capacity, "min_length": min_length, "max_length": max_length},
        )
        assert agree(chunks, row, starts)
        lengths = np.diff(starts)
        assert ((lengths >= min_length) & (lengths <= max_length)).all()
        assert ends[row] - starts[-1] < max_length
    # the same rows cut as they grow, at most two chunks at a time
    early = cut_jit(
        classes, first, ends // 3, capacity=capacity, min_length=min_length, max_length=max_length
    )
    for part in (2, 3):
        upto = ends * part // 3
        for _ in range(size // min_length):
            before, early = (
                early,
                cut_on_jit(
                    classes, early, upto, max_new=2, min_length=min_length, max_length=max_length
                ),
            )
            if (before.count == early.count).all():
                break
    for grown, whole in zip(early, chunks, strict=True):
        np.testing.assert_array_equal(grown, whole)


def test_chunks_are_full_length_once_capacity_is_short():
    classes = np.zeros((2, 64), np.uint8)
    classes[:, [3, 7, 11]] = 1, 2, 3
    ends = np.array([64, 40], np.int32)
    wide, tight = (
        cut_jit(
            classes, ends * 0, ends, capacity=capacity, min_length=4, max_length=8
        ).starts.tolist()
        for capacity in (16, 9)
    )
    assert wide[0] == [0, 4, 8, 12, 20, 28, 36, 44, 52, *[60] * 8]
    assert tight[0] == [0, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert tight[1] == [0, 4, 8, 16, 24, 32, 40, 40, 40, 40]


def test_fixed_chunks_need_no_classes():
    first, ends = np.array([0, 3, 9], np.int32), np.array([40, 18, 8], np.int32)
    chunks = cut_jit(None, first, ends, capacity=5, max_length=5)
    classes = np.zeros((3, 28), np.uint8)
    zeros = cut_jit(classes, first, np.array([25, 18, 8]), capacity=6, min_length=3, max_length=5)
    assert zeros.starts[:, :6].tolist() == chunks.starts.tolist()
    begun = cut_jit(None, first, first + 6, capacity=5, max_length=5)
    assert begun.count.tolist() == [1, 1, 1]
    grown = cut_on_jit(None, begun, ends + 1, max_new=5, max_length=5)
    wanted = cut_jit(None, first, ends + 1, capacity=5, max_length=5)
    assert grown.starts[:2].tolist() == wanted.starts[:2].tolist()
    assert grown.count.tolist() == [5, 3, 1]  # a row loses no chunks


def test_contradictory_sizes_are_refused():
    classes, ends = jnp.zeros((1, 64), jnp.uint8), jnp.array([64], jnp.int32)
    for first, sizes, message in (
        (
            0,
            {"min_length": 0},
            "min_length=0, max_length=16: must be 1 <= min_length <= max_length",
        ),
        (0, {"min_length": 17}, "min_length=17, max_length=16"),
        (0, {"capacity": 0}, "capacity=0: must be at least 1"),
        (0, {"capacity": 3}, "first=0: must be from 16 to 64, for 3 chunks of 16 tokens in 64"),
        (65, {}, "first=65: must be from 0 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            cut(classes, first, ends, **{"capacity": 4} | sizes)
    chunks = Chunks(jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="max_new=0: must be at least 1"):
        cut_on(None, chunks, jnp.array([9], jnp.int32), max_new=0)
