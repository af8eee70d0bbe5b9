"""Tests attention-level metrics against numpy sums over lists, with the engine's own queries."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.cache import LayerCache
from jsparse.evaluation.attention_metrics import HeadMetrics, attention_metrics, measured
from jsparse.evaluation.teacher_forcing import force
from jsparse.policies.oracle import oracle_top_k
from jsparse.policy import Policy
from jsparse.selection import Selection
from tests.support.tiny import random_prompts, tiny_params
from tests.support.toy_policies import even_ids

BATCH, HEADS, GROUP, HEAD_DIM, PAGE, PAGES = 2, 3, 2, 8, 4, 5
SPEC = kv_cache.CacheSpec(
    1, BATCH, HEADS * GROUP, HEADS, HEAD_DIM, PAGE, PAGES, jnp.dtype(jnp.float32)
)
LENGTHS = np.array([[17, 9, 2], [20, 5, 13]], np.int32)


def ids(*rows):
    """Returns ids[B, K, C] and count, from one list per head."""
    width = max(map(len, rows))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
    count = np.array([*map(len, rows)], np.int32)
    return jax.device_put((padded.reshape(BATCH, HEADS, -1), count.reshape(BATCH, HEADS)))


TOKENS = Selection(*ids([0, 3, 16], [1, 2], [0], [5, 6, 7, 8], [], [12]), granularity="token")
WHOLE_PAGES = ids([0, 4], [1, 2], [0], [0, 1, 2], [1], [])
BITS = np.random.default_rng(3).integers(1, 16, WHOLE_PAGES[0].shape).astype(np.uint32)
PAGES_OF_BITS = Selection(*WHOLE_PAGES, bits=jax.device_put(BITS))
DENSE_HEADS = np.array([[True, False, False], [False, True, False]])
WITH_DENSE_HEADS = Selection(*WHOLE_PAGES, dense=jax.device_put(DENSE_HEADS))


def drawn(seed=0, bias=False):
    """Draws queries and a layer of LENGTHS tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jax.device_put(rng.standard_normal(shape).astype(np.float32))

    pool = BATCH * HEADS * PAGES, PAGE
    lengths = jax.device_put(LENGTHS)
    layer = LayerCache(normal(*pool, HEAD_DIM), normal(*pool, HEAD_DIM), lengths)
    return normal(BATCH, HEADS * GROUP, HEAD_DIM), layer._replace(
        bias=normal(*pool)
    ) if bias else layer


def slots_of(selection, at, length):
    """Lists the slots that a head attends to, in order."""
    if selection.dense is not None and selection.dense[at]:
        return list(range(length))
    slots = set()
    for i in range(int(selection.count[at])):
        unit = int(selection.ids[at][i])
        word = 15 if selection.bits is None else int(selection.bits[at][i])
        if selection.granularity == "token":
            slots.add(unit)
        else:
            slots |= {unit * PAGE + t for t in range(4) if word >> t & 1}
        slots.add(length - 1)
    return sorted(slot for slot in slots if slot < length)


def bytes_of(selection, at, length):
    """Counts the bytes of K and V that are read: every used row of a listed page."""
    if selection.dense is not None and selection.dense[at]:
        rows = length
    else:
        units = {int(unit) for unit in selection.ids[at][: int(selection.count[at])]}
        size = 1 if selection.granularity == "token" else PAGE
        units |= {(length - 1) // size} if units else set()
        rows = sum(max(min((unit + 1) * size, length) - unit * size, 0) for unit in units)
    return rows * 2 * HEAD_DIM * 4


def attend(logits, values):
    """Computes o and lse over lists."""
    if len(logits) == 0:
        return np.zeros(HEAD_DIM), -np.inf
    weights = np.exp(logits)
    return weights @ values / weights.sum(), np.log(weights.sum())


def slow_metrics(q, layer, selection, summary, top_k, positions) -> HeadMetrics:
    out = HeadMetrics(*(np.zeros((BATCH, HEADS)) for _ in HeadMetrics._fields))
    k, v = (
        np.asarray(x, np.float64).reshape(BATCH, HEADS, -1, HEAD_DIM) for x in (layer.k, layer.v)
    )
    bias = (
        np.zeros(k.shape[:3]) if layer.bias is None else np.asarray(layer.bias).reshape(k.shape[:3])
    )
    for b, head in np.ndindex(BATCH, HEADS):
        length = int(LENGTHS[b, head])
        slots = slots_of(selection, (b, head), length)
        weights, mass, error, lse_error = [], [], [], []
        for n in range(head * GROUP, (head + 1) * GROUP):
            logits = (
                k[b, head, :length] @ np.asarray(q[b, n], np.float64) / np.sqrt(HEAD_DIM)
                + bias[b, head, :length]
            )
            weights.append(np.exp(logits) / np.exp(logits).sum())
            exact, exact_lse = attend(logits, v[b, head, :length])
            o, lse = attend(logits[slots], v[b, head, slots])
            mass.append(weights[-1][slots].sum())
            if summary is not None:
                e = np.exp([lse, float(summary[1][b, n])])
                o, lse = (e[0] * o + e[1] * np.asarray(summary[0][b, n])) / e.sum(), np.log(e.sum())
            error.append(np.linalg.norm(exact - o) / np.linalg.norm(exact))
            lse_error.append(abs(exact_lse - lse))
        older = [slot for slot in slots if slot != length - 1]
        ranked = sorted(range(length - 1), key=lambda slot: (-max(w[slot] for w in weights), slot))
        ranked = ranked[: top_k or max(len(older), 1)]
        means = map(np.mean, (mass, error, lse_error))
        read = bytes_of(selection, (b, head), length)
        pages = len({slot // PAGE for slot in slots}) / -(-length // PAGE)
        recall, attended = len({*ranked} & {*older}) / len(ranked), len(slots) / (positions[b] + 1)
        for field, value in zip(out, (recall, *means, attended, pages, read), strict=True):
            field[b, head] = value
    return out


@pytest.mark.parametrize(
    ("chosen", "more", "top_k"),
    [(TOKENS, False, 0), (PAGES_OF_BITS, True, 3), (WITH_DENSE_HEADS, True, 0)],
    ids=["tokens", "bits", "dense heads"],
)
def test_metrics_equal_slow_sums(chosen, more, top_k):
    """Two steps with different queries and caches, with a summary and a bias or with neither.

    k is given or defaults to the number of attended tokens.
    """
    rng = np.random.default_rng(5)
    shape = (BATCH, HEADS * GROUP)
    means = rng.standard_normal((*shape, HEAD_DIM)).astype(np.float32)
    summary = (means, np.ones(shape, np.float32)) if more else None

    def chosen_there(state, layer, q, cache):
        return *jax.tree.map(jnp.asarray, (chosen, summary)), state

    policy = measured(Policy(chosen_there, name="chosen"), top_k)
    state, expected = jax.jit(lambda: policy.init(SPEC))(), []
    select = jax.jit(policy.select, static_argnums=1)
    positions = np.array([30, 19], np.int32)
    for seed in (0, 1):
        q, layer = drawn(seed, more)
        cache = kv_cache.KVCache((layer,), positions, np.zeros((), bool))
        given, merged, state = select(state, 0, q, kv_cache.StepView(cache))
        merged = merged and tuple(merged[:2])
        jax.tree.map(np.testing.assert_array_equal, (given, merged), (chosen, summary))
        expected.append(slow_metrics(q, layer, chosen, summary, top_k, positions))
    sums = state.own[0]
    assert sums.steps.tolist() == [2] * BATCH
    for field, value, *steps in zip(HeadMetrics._fields, sums.heads, *expected, strict=True):
        np.testing.assert_allclose(value, sum(steps), rtol=1e-4, atol=1e-5, err_msg=field)


def test_oracle_has_full_recall():
    q, layer = drawn(7)
    cache = kv_cache.KVCache((layer,), jnp.asarray(LENGTHS.max(1) - 1), np.zeros((), bool))
    view = kv_cache.StepView(cache)
    policy = measured(oracle_top_k(7))
    heads = jax.jit(lambda: policy.select(policy.init(SPEC), 0, jnp.asarray(q), view)[2])()
    np.testing.assert_array_equal(heads.own[0].heads.recall, 1)
    assert (np.asarray(heads.own[0].heads.mass) <= 1 + 1e-6).all()


@pytest.mark.slow
def test_dense_fallback_steps_are_not_counted():
    """Eight steps; even_ids is dense while every row holds at most 24 tokens."""
    forced = force(
        tiny_params(num_layers=1),
        [measured(even_ids())],
        random_prompts((20, 9)),
        max_new_tokens=8,
        page_size=8,
    )
    (metrics,) = attention_metrics(forced)
    assert metrics.steps.tolist() == [4]
    assert (metrics.heads.attended[:, 0] < 1).all()


def test_policies_must_be_measured():
    held = [SimpleNamespace(state=())] * 2
    unmeasured: Any = SimpleNamespace(
        shared=SimpleNamespace(policies=["dense()", "streaming()"], prefilled=held)
    )
    with pytest.raises(ValueError, match=r"policy=streaming.*must be wrapped in measured"):
        attention_metrics(unmeasured)
    with pytest.raises(ValueError, match="top_k=-1"):
        measured(dense(), top_k=-1)
    with pytest.raises(ValueError, match="policy=3: must be a policy"):
        measured(3)
