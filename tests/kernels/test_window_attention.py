"""Tests window_attention's reference against float64 numpy, and its refusals."""

from functools import partial

import jax
import numpy as np
import pytest

from jsparse.pallas_kernels.window_attention import reference, window_attention
from tests.kernels.cases.window_attention import CASES
from tests.support.dense_attention import numbers
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}


def slowly(inputs, group, over="competing"):
    """Averages softmaxes one query after the other, in float64.

    SnapKV's softmaxes cover all slots that a query can see: the newest slots, one per token, up to
    its own.
    """
    queries, positions, layer, competing = inputs
    (batch, kv_heads), size = layer.lengths.shape, layer.page_size
    pool, reach = numbers(layer.k), getattr(layer.k, "reach", None)
    table = layer.block_table
    if table is None:
        table = np.arange(len(pool)).reshape(batch, kv_heads, -1)
    out = np.zeros(competing.shape)
    for b, k in np.ndindex(batch, kv_heads):
        chosen = np.asarray(competing[b, k])
        slots = np.arange(layer.lengths[b, k]) if over == "held" else np.flatnonzero(chosen)
        pages = np.asarray(table)[b, k, slots // size]
        if not chosen.any():
            continue
        keys = np.asarray(pool[pages, slots % size], np.float64)
        keys = keys if reach is None else keys * np.asarray(reach)[k]
        bias = 0.0 if layer.bias is None else np.asarray(layer.bias)[pages, slots % size]
        each = queries.shape[2] // kv_heads
        sets = []
        newest = int(positions[b])
        window = np.asarray(queries, np.float64)[b, :, k * each : (k + 1) * each]
        for position in range(max(newest - len(window), 0), newest):
            q = window[position % len(window)]
            logits = q @ keys.T * q.shape[-1] ** -0.5 + bias
            if over == "held":
                later = newest - 1 - position
                logits[:, len(slots) - later :] = -np.inf
            sets += [logits.max(0)] if group == "max" else list(logits)
        weights = [np.exp(logits - logits.max()) for logits in sets]
        out[b, k, slots] = np.mean([w / w.sum() for w in weights], axis=0)
        out[b, k, ~chosen] = 0.0
    return out


reference_alone = partial(window_attention, implementation="reference")
shares = jax.jit(reference_alone, static_argnames=("group", "over"))
WAYS = [(group, over) for group in ("mean", "max") for over in ("competing", "held")]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("case", slow_except_named(CASES, "short", "inside", "scrambled"), ids=str)
def test_shares_are_means_of_softmaxes(case, way):
    inputs, (group, over) = case.build(), way
    got = shares(*inputs, group=group, over=over)
    tolerance = 2e-6 if case.dtype == "float32" else 2e-3
    np.testing.assert_allclose(got, slowly(inputs, group, over), atol=tolerance)


@pytest.mark.parametrize("way", WAYS[1:3], ids="-".join)
def test_block_size_changes_nothing(way, monkeypatch):
    inputs, (group, over) = by_name["scrambled"].build(), way
    whole = shares(*inputs, group=group, over=over)
    for pages in (1, 4):
        heads, size = inputs.queries.shape[2], inputs.queries.shape[1]
        page_bytes = 4 * len(inputs.positions) * heads * size * inputs.layer.page_size
        monkeypatch.setattr(reference, "BLOCK_BYTES", pages * page_bytes)
        blocks = jax.jit(lambda *given: reference_alone(*given, group=group, over=over))(*inputs)
        np.testing.assert_allclose(blocks, whole, atol=1e-6)


def test_competing_slots_are_those_of_the_layer():
    inputs = CASES[0].build()
    inputs = inputs._replace(competing=inputs.competing[..., 1:])
    with pytest.raises(ValueError, match="competing.shape=.*: must have 144 slots"):
        window_attention(*inputs)
