"""The reference of every decode op: softmax attention in float64.

It rebuilds dense K and V slot by slot.
"""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np

from jsparse.cache import Int8Pages
from tests.kernels.cases.block_sparse_decode import Inputs


class Expected(NamedTuple):
    o: np.ndarray
    lse: np.ndarray
    token_logits: np.ndarray
    page_mass: np.ndarray
    stats_lse: np.ndarray
    listed: tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, count and logits


def attended_slots(chosen, head, length: int, page_size: int) -> list[int]:
    """Lists the slots that one head attends to, field by field from the Selection."""
    if chosen.dense is not None and chosen.dense[head]:
        return list(range(length))
    slots = set()
    for at in range(int(chosen.count[head])):
        unit = int(chosen.ids[head][at])
        if chosen.granularity == "token":
            slots.add(unit)
            continue
        word = None if chosen.bits is None else int(chosen.bits[head][at])
        slots |= {unit * page_size + t for t in range(page_size) if word is None or word >> t & 1}
    if chosen.count[head] and length:
        slots.add(length - 1)
    return sorted(slot for slot in slots if slot < length)


def logsumexp(x: np.ndarray) -> float:
    top = x.max(initial=-np.inf)
    return top if np.isneginf(top) else top + np.log(np.exp(x - top).sum())


def numbers(pool: np.ndarray | Int8Pages) -> np.ndarray:
    """Returns a pool's numbers, [pages, P, H], but for the reach of channels."""
    if not isinstance(pool, Int8Pages):
        return np.asarray(pool)
    return np.asarray(pool.values, np.float64) * np.asarray(pool.scales, np.float64)[..., None]


def expected(inputs: Inputs, sm_scale: float | None) -> Expected:
    """Computes attention of every query head, and all reports."""
    q = np.asarray(inputs.q, np.float64)
    layer = SimpleNamespace(
        **{name: jax.device_get(getattr(inputs.layer, name)) for name in inputs.layer._fields}
    )
    reach = getattr(layer.k, "reach", None)
    layer.k, layer.v = map(numbers, (layer.k, layer.v))
    fields = {
        name: jax.device_get(getattr(inputs.selection, name))
        for name in ("ids", "count", "bits", "dense")
    }
    chosen = SimpleNamespace(**fields, granularity=inputs.selection.granularity)
    (batch, heads), size, num_pages = layer.lengths.shape, layer.k.shape[1], inputs.layer.num_pages
    group, scale = q.shape[1] // heads, q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    logits_of_mean = np.full((batch, heads, num_pages * size), -np.inf)
    entries = chosen.ids.shape[-1] + 1
    ids, count = np.zeros((batch, heads, entries), np.int32), np.zeros((batch, heads), np.int32)
    logits_of_heads = np.full((batch, heads, group, entries), -np.inf)
    for b, k in np.ndindex(batch, heads):
        slots = attended_slots(chosen, (b, k), int(layer.lengths[b, k]), size)
        first = (b * heads + k) * num_pages
        lies = [
            first + m if layer.block_table is None else layer.block_table[b, k, m]
            for m in range(num_pages)
        ]
        keys = np.array([layer.k[lies[s // size], s % size] for s in slots], np.float64).reshape(
            -1, q.shape[2]
        )
        if reach is not None:
            keys *= reach[k]
        values = np.array([layer.v[lies[s // size], s % size] for s in slots], np.float64).reshape(
            -1, q.shape[2]
        )
        bias = np.zeros(len(slots))
        if layer.bias is not None:
            bias += [layer.bias[lies[s // size], s % size] for s in slots]
        if chosen.granularity == "token" and not (chosen.dense is not None and chosen.dense[b, k]):
            count[b, k] = len(slots)
            ids[b, k, : len(slots)] = slots
        for n in range(k * group, (k + 1) * group):
            logits = scale * keys @ q[b, n] + bias
            lse[b, n] = logsumexp(logits)
            o[b, n] = np.exp(logits - lse[b, n]) @ values if slots else 0.0
            logits_of_heads[b, k, n - k * group, : count[b, k]] = logits[: count[b, k]]
        logits_of_mean[b, k, slots] = (
            scale * keys @ q[b, k * group : (k + 1) * group].mean(0) + bias
        )
    pages = logits_of_mean.reshape(batch, heads, num_pages, size)
    return Expected(
        o,
        lse,
        logits_of_mean,
        np.apply_along_axis(logsumexp, -1, pages),
        np.apply_along_axis(logsumexp, -1, logits_of_mean),
        (ids, count, logits_of_heads),
    )
