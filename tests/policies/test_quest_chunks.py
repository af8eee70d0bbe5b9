"""Tests Quest over chunks against its definition, channel by channel and chunk by chunk."""

import numpy as np
import pytest

import jsparse
from tests.support.chunk_layer import DIM, GROUP, HEADS, PAGE, ROWS, Layer, chunks_of
from tests.support.marks import slow_except

BUDGET, SINK = 28, 2
SMALL = f"quest_chunks({BUDGET}, recent=3, period=4, "
PAPER = {"slack": 1.0, "group": "max"}


def greatest(q, keys, *, slack=0.5, group="mean"):
    """The score of a chunk: q·mid + slack · |q|·half, in float64."""
    queries = q.astype(np.float64) if group == "max" else [q.astype(np.float64).mean(0)]
    total = -np.inf
    for one in queries:
        score = 0.0
        for x, channel in zip(one, keys.T.astype(np.float64), strict=True):
            low, high = channel.min(), channel.max()
            score += x * (low + high) / 2 + slack * abs(x) * (high - low) / 2
        total = max(total, score)
    return total


def attended(q, keys, chunks, length, sink, given):
    """The attended tokens by the definition."""
    end = chunks[-1][1] if chunks else sink
    found = {*range(sink), *range(end, length)}
    ranked = sorted(chunks, key=lambda chunk: -greatest(q, keys[chunk[0] : chunk[1]], **given))
    for first, behind in ranked:
        if len(found) + behind - first > BUDGET:
            break
        found |= set(range(first, behind))
    return found


CASES = {
    SMALL + "lengths=(2, 4), slack=1.0, group='max')": (0, PAPER),
    SMALL + f"lengths=(2, 4), sink={SINK})": (SINK, {}),
    SMALL + "lengths=(1, 3), chunks='fixed', slack=0.0)": (0, {"slack": 0.0}),
}


@pytest.mark.parametrize("expression", slow_except(CASES, next(iter(CASES))))
def test_chunks_of_the_largest_bounds_are_attended_to(expression):
    sink, given = CASES[expression]
    layer = Layer(expression, (45, 33), 72)
    left_out, lengths = 0, set()
    while max(layer.lengths) < layer.k.shape[1]:
        chosen, q = layer.step()
        slots = layer.slots(chosen)
        q = q.reshape(ROWS, HEADS, GROUP, DIM)
        for b, h in np.ndindex(ROWS, HEADS):
            chunks = chunks_of(layer.state, b)
            lengths |= {behind - first for first, behind in chunks}
            wanted = attended(q[b, h], layer.k[b, :, h], chunks, layer.lengths[b], sink, given)
            assert set(np.flatnonzero(slots[b, h]).tolist()) == wanted, (layer.lengths, b, h)
            left_out += layer.lengths[b] - len(wanted)
        layer.maintain()
    assert left_out > 500
    assert lengths == ({3} if "fixed" in expression else {2, 3, 4})


@pytest.mark.slow
def test_chunks_of_one_page_match_quest():
    """If chunks coincide with pages and the newest page is open, both attend to the same tokens."""
    over_chunks = f"quest_chunks({BUDGET + 4}, 'fixed', recent=1, lengths=(8, 8), period=8)"
    layers = [Layer(text, (49, 41), 72) for text in (over_chunks, f"quest({BUDGET + 4})")]
    (chunks, q), (pages, _) = (layer.step() for layer in layers)
    assert q.shape[0] == ROWS
    for b, h in np.ndindex(ROWS, HEADS):
        ids = np.asarray(chunks.ids)[b, h, : int(chunks.count[b, h])]
        listed = np.asarray(pages.ids)[b, h, : int(pages.count[b, h])]
        assert set(ids // PAGE) == set(listed.tolist())


def test_bad_hyper_parameters_are_refused():
    for given, message in (
        ({"budget": 55}, "budget=55: must be at least 56"),
        ({"slack": 1.5}, "slack=1.5: must be a number from 0 to 1"),
        ({"group": "sum"}, r"group='sum': must be one of \['mean', 'max'\]"),
        ({"chunks": "page"}, "chunks='page': must be one of"),
        ({"period": 0}, "period=0: must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jsparse.quest_chunks(**given)
