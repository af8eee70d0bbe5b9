"""Tests place_logits against a walk over each head's list."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.place_logits import place_logits
from tests.kernels.cases.place_logits import CASES
from tests.support.dense_attention import logsumexp
from tests.support.marks import slow_except_named


def expected(inputs, num_pages, page_size, by_slot):
    """Places the logits of all slots, page by page in each head's reading order."""
    logits, lengths = np.asarray(inputs.logits), np.asarray(inputs.lengths)
    ids, count, dense = (
        jax.device_get(getattr(inputs.selection, name)) for name in ("ids", "count", "dense")
    )
    rows = logits.reshape(*lengths.shape, -1, page_size)
    placed = np.full((*lengths.shape, num_pages, page_size), -np.inf, np.float32)
    for head in np.ndindex(*lengths.shape):
        used = -(-int(lengths[head]) // page_size)
        pages = list(ids[head][: count[head]])
        missing = pages and used - 1 not in pages
        if missing:
            pages.append(used - 1)
        if dense is not None and dense[head]:
            pages, missing = range(used), False
        for entry, page in enumerate(pages if used else []):
            placed[head][page] = rows[head][page if by_slot else entry]
        if by_slot:
            newest = lengths[head] - 1
            of_newest = placed[head].flat[newest]
            if missing:
                placed[head][used - 1] = -np.inf
            placed[head].flat[newest if used else 0 :] = -np.inf
            if used:
                placed[head].flat[newest] = of_newest
    return placed


run = jax.jit(place_logits, static_argnames=("stats", "num_pages", "page_size", "by_slot"))


def check(case, seed=0):
    inputs = case.build(seed)
    placed = expected(inputs, **case.options)
    np.testing.assert_array_equal(
        run(*inputs, stats="token_logits", **case.options),
        placed.reshape(*inputs.lengths.shape, -1),
    )
    mass = run(*inputs, stats="page_mass", **case.options)
    assert mass.dtype == np.float32
    np.testing.assert_allclose(
        mass, np.apply_along_axis(logsumexp, -1, placed), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "case",
    slow_except_named(
        CASES, "any", "first", "dense_and_short_lists", "all_dense", "pages_of_24", "by_slot_dense"
    ),
    ids=str,
)
def test_every_page_gets_its_logits(case):
    check(case)


def test_lengths_beyond_capacity_count_as_full():
    # after an overflow lengths exceed the capacity: the newest token's page is not the head's
    case = replace(CASES[0], lengths="full", listed="newest", dense="mixed")
    inputs = case.build()
    longer = inputs._replace(lengths=np.asarray(inputs.lengths) + 1000)
    for stats in ("page_mass", "token_logits"):
        got = (run(*args, stats=stats, **case.options) for args in (longer, inputs))
        np.testing.assert_array_equal(*got)


def test_wrong_calls_are_refused():
    case = CASES[0]
    logits, selection, lengths = inputs = case.build()
    dense = replace(selection, dense=lengths > 0)
    token = replace(selection, granularity="token")
    for args, change, message in (
        (inputs, {"stats": "listed_logits"}, r"stats='listed_logits': must be one of"),
        ((logits, token, lengths), {}, "granularity='token': place_logits takes"),
        ((logits[1:], selection, lengths), {}, r"\(7, 192\): must be \[8, a multiple of 16\]"),
        ((logits[:, 1:], selection, lengths), {}, r"\(8, 191\): must be \[8, a multiple of 16\]"),
        ((logits[:, :144], selection, lengths), {}, "must have room for 10 pages of 16"),
        ((logits, dense, lengths), {"num_pages": 13}, "room for 13 pages"),
    ):
        with pytest.raises(ValueError, match=message):
            place_logits(*args, **{"stats": "page_mass", **case.options, **change})
