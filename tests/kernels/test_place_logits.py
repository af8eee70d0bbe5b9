"""Tests place_logits against a walk over each head's list."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.pallas_kernels.place_logits import place_logits
from tests.kernels.cases.place_logits import CASES, Case
from tests.support.dense_attention import logsumexp
from tests.support.marks import slow_except_named

BASE = Case("")
cases = st.builds(
    Case,
    name=st.just(""),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 9),
    num_pages=st.integers(1, 12),
    lengths=st.sampled_from(["full", "ragged"]),
    listed=st.sampled_from(["any", "held", "first", "newest", "none"]),
    capacity=st.integers(1, 14),
    dense=st.sampled_from(["none", "mixed", "all"]),
    spare=st.integers(0, 2),
)


def expected(inputs, num_pages, page_size):
    """Places the logits of all slots, page by page in the order in which each head reads them."""
    logits, lengths = np.asarray(inputs.logits), np.asarray(inputs.lengths)
    ids, count, dense = (
        jax.device_get(getattr(inputs.selection, name)) for name in ("ids", "count", "dense")
    )
    rows = logits.reshape(*lengths.shape, -1, page_size)
    placed = np.full((*lengths.shape, num_pages, page_size), -np.inf, np.float32)
    for head in np.ndindex(*lengths.shape):
        used = -(-int(lengths[head]) // page_size)
        pages = list(ids[head][: count[head]])
        if pages and used - 1 not in pages:
            pages.append(used - 1)
        if dense is not None and dense[head]:
            pages = range(used)
        for entry, page in enumerate(pages if used else []):
            placed[head][page] = rows[head][entry]
    return placed


run = jax.jit(place_logits, static_argnames=("stats", "num_pages", "page_size"))


def check(case, seed=0):
    inputs = case.build(seed)
    placed = expected(inputs, **case.sizes)
    np.testing.assert_array_equal(
        run(*inputs, stats="token_logits", **case.sizes), placed.reshape(*inputs.lengths.shape, -1)
    )
    mass = run(*inputs, stats="page_mass", **case.sizes)
    assert mass.dtype == np.float32
    np.testing.assert_allclose(
        mass, np.apply_along_axis(logsumexp, -1, placed), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "case",
    slow_except_named(CASES, "any", "first", "dense_and_short_lists", "all_dense", "pages_of_24"),
    ids=str,
)
def test_every_page_has_what_was_read_of_it(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=25)
@given(cases, st.integers(0, 2**32 - 1))
def test_any_shape(case, seed):
    check(case, seed)


def test_cases_are_what_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    found = set()
    for seed in range(5):
        _, selection, lengths = jax.device_get(BASE.build(seed))
        assert {0, 1, 9 * 16} <= set(lengths.flat)
        for head in np.ndindex(*lengths.shape):
            ids, newest = selection.ids[head][: selection.count[head]], (lengths[head] - 1) // 16
            assert (np.diff(ids) > 0).all() and (selection.ids[head][ids.size :] == 0).all()
            if ids.size and lengths[head]:
                found.add((ids[-1] > newest, newest in ids))
    assert len(found) == 4, (
        "a list that ends past what its head holds, or not, with the newest page or without"
    )
    assert np.isnan(np.asarray(BASE.build().logits)).any()


def test_heads_longer_than_their_room_are_full():
    # after an overflow lengths exceed the capacity: the newest token's page is not the head's
    case = replace(BASE, lengths="full", listed="newest", dense="mixed")
    inputs = case.build()
    longer = inputs._replace(lengths=np.asarray(inputs.lengths) + 1000)
    for stats in ("page_mass", "token_logits"):
        got = (run(*args, stats=stats, **case.sizes) for args in (longer, inputs))
        np.testing.assert_array_equal(*got)


INPUTS = BASE.build()
LENGTHS, LOGITS = np.asarray(INPUTS.lengths), np.asarray(INPUTS.logits)


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"stats": "listed_logits"}, {}, r"stats='listed_logits': must be one of \['page_mass'"),
        ({"stats": "mass"}, {}, r"stats='mass': must be one of \['page_mass', 'token_logits'\]"),
        ({"stats": None}, {}, "stats=None: must be one of"),
        (
            {"selection": replace(INPUTS.selection, granularity="token")},
            {},
            "granularity='token': place_logits takes",
        ),
        (
            {"lengths": jax.device_put(LENGTHS[:1])},
            {},
            r"lengths=int32\[1, 4\]: must be int32\[",
        ),
        (
            {"logits": jax.device_put(LOGITS[1:])},
            {},
            r"logits.shape=\(7, 192\): must be \[8, a multiple of 16\]",
        ),
        (
            {"logits": jax.device_put(LOGITS[:, 1:])},
            {},
            r"logits.shape=\(8, 191\): must be \[8, a multiple of 16\]",
        ),
        (
            {"logits": jax.device_put(LOGITS[:, :144])},
            {},
            r"logits.shape=\(8, 144\): must have room for 10 pages of 16",
        ),
        (
            {"selection": replace(INPUTS.selection, dense=jax.device_put(LENGTHS > 0))},
            {"num_pages": 13},
            "room for 13 pages",
        ),
        ({"implementation": "abacus"}, {}, "implementation='abacus': place_logits has"),
        ({"implementation": "triton"}, {}, "place_logits on this backend needs an NVIDIA GPU"),
    ],
)
def test_wrong_calls_are_refused(change, sizes, message):
    if change.get("implementation") == "triton" and jax.default_backend() == "gpu":
        pytest.skip("can run")
    with pytest.raises(ValueError, match=message):
        place_logits(**{**INPUTS._asdict(), "stats": "page_mass", **BASE.sizes, **sizes, **change})
