"""Tests Quest against its formula and the paper's, page by page and channel by channel."""

import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import CacheSpec
from jsparse.runtime.capacity import policy_bytes
from tests.support.marks import slow_except
from tests.support.one_layer import OneLayer


def exact(layer: OneLayer, b: int, head: int, page: int):
    """The smallest and largest keys of a page."""
    keys = layer.k[b, head, page * layer.page_size : (page + 1) * layer.page_size]
    return keys.min(axis=0), keys.max(axis=0)


def rounded(layer: OneLayer, b: int, head: int, page: int):
    """The bounds that the policy stored."""
    assert {x.dtype.name for x in layer.state[0]} == {"uint8", "bfloat16"}
    low, high = (
        np.asarray(x, np.float64).reshape(*layer.k.shape[:2], -1, 16)
        for x in layer.state[0].values()
    )
    assert (low[b, head, page] <= exact(layer, b, head, page)[0]).all()
    assert (high[b, head, page] >= exact(layer, b, head, page)[1]).all()
    return low[b, head, page], high[b, head, page]


EXTREMES = {None: exact, "uint8": rounded}


def paper(queries, low, high):
    """The largest bound of a group's queries."""
    return max(sum(max(x * high[d], x * low[d]) for d, x in enumerate(q)) for q in queries)


def shrunk(queries, low, high):
    """The score of the group's mean query, with half of half the range."""
    mid, half = (low + high) / 2, (high - low) / 2
    q = sum(queries) / len(queries)
    return sum(x * mid[d] + 0.5 * abs(x) * half[d] for d, x in enumerate(q))


def pages_of(layer: OneLayer, budget: int, extremes, score) -> list[set[int]]:
    """The pages that Quest keeps, per row and head."""
    found = []
    for b, head in np.ndindex(layer.k.shape[:2]):
        bounds = {}
        for page in range(-(-layer.length // layer.page_size)):
            low, high = extremes(layer, b, head, page)
            queries = np.asarray(
                layer.q[b, head * layer.group : (head + 1) * layer.group], np.float64
            )
            bounds[page] = score(queries, low, high)
        newest = max(bounds)
        best = sorted((page for page in bounds if page != newest), key=lambda page: -bounds[page])
        found.append({newest, *best[: max(budget // layer.page_size, 1) - 1]})
    return found


@pytest.mark.parametrize("bounds_dtype", slow_except(EXTREMES, None))
@pytest.mark.parametrize(
    ("given", "score"), [({"slack": 1.0, "group": "max"}, paper), ({}, shrunk)]
)
def test_keeps_the_pages_of_the_largest_scores(bounds_dtype, given, score):
    for budget in (1, 31):
        layer = OneLayer(jsparse.quest(budget, bounds_dtype, **given), length=41)
        chosen = layer.select()
        listed = [
            set(ids[:n].tolist())
            for ids, n in zip(chosen.ids.reshape(4, -1), chosen.count.reshape(4), strict=True)
        ]
        assert listed == pages_of(layer, budget, EXTREMES[bounds_dtype], score)


def test_short_head_is_attended_to_in_full():
    layer = OneLayer(jsparse.quest(budget=4096), length=13)
    chosen = layer.select()
    assert chosen.count.tolist() == [[2, 2], [2, 2]]
    assert chosen.ids[..., :2].tolist() == [[[0, 1]] * 2] * 2


def test_8_bits_take_half_the_bytes():
    """Plus 4 bytes per page for its scale and zero."""
    spec = CacheSpec(
        num_layers=3,
        batch=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        page_size=16,
        num_pages=10,
        dtype=jnp.bfloat16,
    )
    pages = 3 * 2 * 4 * 10
    assert policy_bytes(spec, jsparse.quest()) == pages * 4 * 128
    assert policy_bytes(spec, jsparse.quest(bounds_dtype="uint8")) == pages * (2 * 128 + 4)


def test_wrong_hyper_parameters_are_refused():
    for name, values, rule in (
        ("budget", (0, 1.5, True), "must be an integer of at least 1"),
        ("slack", (-0.1, 1.1, True, "0.5"), "must be a number from 0 to 1"),
        ("group", ("sum",), r"must be one of \['mean', 'max'\]"),
        ("bounds_dtype", ("int8", 8), r"must be one of \[None, 'uint8'\]"),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value!r}: {rule}"):
                jsparse.quest(**{name: value})
