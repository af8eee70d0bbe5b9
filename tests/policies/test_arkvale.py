"""ArkVale against its formula, page by page and query by query."""

import numpy as np
import pytest
from one_layer import OneLayer

import jsparse


def pages_of(layer: OneLayer, budget: int, rank: str) -> list[set[int]]:
    """Returns the pages that ArkVale keeps, of each row and head."""
    found, size = [], layer.page_size
    for b, head in np.ndindex(layer.k.shape[:2]):
        group = np.asarray(layer.q, np.float64)[b, head * layer.group : (head + 1) * layer.group]
        scores = []
        for first in range(0, layer.length, size):
            keys = layer.k[b, head, first : first + size]
            center = keys.mean(0)
            radius = np.linalg.norm(keys - center, axis=-1).max() if rank == "bound" else 0.0
            scores.append(max(q @ center + np.linalg.norm(q) * radius for q in group))
        newest = len(scores) - 1
        best = sorted(range(newest), key=lambda page: -scores[page])
        found.append({newest, *best[: budget // size - 1]})
    return found


@pytest.mark.parametrize("length", [41, 48])
@pytest.mark.parametrize("rank", ["bound", "centroid"])
def test_keeps_the_newest_page_and_those_of_the_greatest_scores(rank, length):
    for seed in range(4):
        layer = OneLayer(jsparse.arkvale(budget=24, rank=rank), length=length, seed=seed)
        chosen = layer.select()
        listed = [
            set(ids[:n].tolist())
            for ids, n in zip(chosen.ids.reshape(4, -1), chosen.count.reshape(4), strict=True)
        ]
        assert listed == pages_of(layer, 24, rank)
