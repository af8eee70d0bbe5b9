"""Quest against the paper's formula, page by page and channel by channel."""

import numpy as np
import pytest
from one_layer import OneLayer

import jsparse


def pages_of(layer: OneLayer, budget: int) -> list[set[int]]:
    """The pages that Quest keeps, of each row and head."""
    found = []
    for b, head in np.ndindex(layer.k.shape[:2]):
        bounds = {}
        for page in range(-(-layer.length // layer.page_size)):
            keys = layer.k[b, head, page * layer.page_size : (page + 1) * layer.page_size]
            queries = np.asarray(layer.q[b, head * layer.group : (head + 1) * layer.group], np.float64)
            bounds[page] = max(
                sum(max(x * keys[:, d].max(), x * keys[:, d].min()) for d, x in enumerate(q)) for q in queries
            )
        newest = max(bounds)
        best = sorted((page for page in bounds if page != newest), key=lambda page: -bounds[page])
        found.append({newest, *best[: max(budget // layer.page_size, 1) - 1]})
    return found


@pytest.mark.parametrize("budget", [1, 16, 31, 40])
@pytest.mark.parametrize("length", [41, 45, 48])
def test_keeps_the_pages_of_the_greatest_bounds(budget, length):
    layer = OneLayer(jsparse.quest(budget=budget), length=length)
    chosen = layer.select()
    listed = [set(ids[:n].tolist()) for ids, n in zip(chosen.ids.reshape(4, -1), chosen.count.reshape(4), strict=True)]
    assert listed == pages_of(layer, budget)


def test_a_short_head_is_read_whole():
    layer = OneLayer(jsparse.quest(budget=4096), length=13)
    chosen = layer.select()
    assert chosen.count.tolist() == [[2, 2], [2, 2]]
    assert chosen.ids[..., :2].tolist() == [[[0, 1]] * 2] * 2


@pytest.mark.parametrize("budget", [0, 1.5, True])
def test_budget_is_a_whole_number(budget):
    with pytest.raises(ValueError, match=f"budget={budget}: must be an integer of at least 1"):
        jsparse.quest(budget=budget)
