"""Scores of the evicting policies against formulas read from their authors' published code.

They are FasterDecoding/SnapKV, FMInference/H2O and Zefan-Cai/R-KV. Heads are random; keys repeat,
so that some cosines exceed R-KV's threshold and others do not.
"""

import jax
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.policies.eviction.settings import LayerView, ScoreFn
from jsparse.policies.h2o import SUMS
from jsparse.policies.r_kv import important_and_rare
from jsparse.policies.snapkv import pooled_attention

KV_HEADS, GROUP, DIM, PAGE, SLOTS, WINDOW, KEPT = 2, 3, 16, 8, 64, 6, 20


def heads(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [S, K, G, H] and keys [K, S, H], each a noisy copy of one of 40 directions."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(KV_HEADS, 40, DIM))
    keys = directions[:, rng.integers(0, 40, SLOTS)] + 0.5 * rng.normal(size=(KV_HEADS, SLOTS, DIM))
    return 2 * rng.normal(size=(SLOTS, KV_HEADS, GROUP, DIM)), keys


def ours(score: ScoreFn, window: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The policy's scores [K, S] from the last queries [W, K, G, H]."""
    pages = keys.reshape(-1, PAGE, DIM).astype(np.float32)
    lengths, positions = np.full((1, KV_HEADS), SLOTS, np.int32), np.array([SLOTS], np.int32)
    ring = np.roll(window.reshape(len(window), -1, DIM), SLOTS % len(window), axis=0)
    competing = np.broadcast_to(np.arange(SLOTS) < SLOTS - WINDOW, (1, KV_HEADS, SLOTS))
    kv = LayerCache(pages, np.zeros_like(pages), lengths)
    view = LayerView(kv, competing, ring[None].astype(np.float32), positions, None)
    return np.asarray(jax.jit(score)(view))[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def causal_shares(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[K, G, W, S]: the softmax of each of the last queries over all keys up to its own."""
    logits = np.einsum("wkgh,ksh->kgws", queries, keys) / DIM**0.5
    own = np.arange(SLOTS - len(queries), SLOTS)
    return softmax(np.where(np.arange(SLOTS) <= own[:, None], logits, -np.inf))


def smoothed(scores: np.ndarray, width: int, how) -> np.ndarray:
    """`width` neighbours reduced along the last axis; padding is 0, and counts in means."""
    side = width // 2
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(side, side)])
    return how(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Scores are equal, and so are the slots that a budget keeps."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
    kept = [np.sort(np.argsort(-x, axis=-1)[:, :KEPT]) for x in (found, expected)]
    np.testing.assert_array_equal(*kept)


def test_snapkv_sums_causal_softmaxes_and_smooths_them_by_5():
    """Per query head as in its code; ours is the mean over the group, and over the window."""
    queries, keys = heads(0)
    window = queries[-WINDOW:]
    sums = causal_shares(window, keys)[..., :-WINDOW].sum(2)
    found = ours(pooled_attention(5, "mean"), window, keys)[:, :-WINDOW]
    assert_same(found, smoothed(sums, 5, np.mean).mean(1) / WINDOW)
    largest = ours(pooled_attention(5, "max"), window, keys)[:, :-WINDOW]
    assert_same(largest, smoothed(sums.mean(1), 5, np.max) / WINDOW)


@pytest.mark.parametrize("window", [WINDOW, SLOTS])
def test_h2o_starts_with_sums_of_causal_softmaxes(window):
    """With a window of the whole prompt these are the sums of H2O's code, else of its last part.

    A token of the window also receives its own attention and that of later queries.
    """
    queries, keys = heads(1)
    found = ours(SUMS.begin, queries[-window:], keys)
    assert_same(found, causal_shares(queries[-window:], keys).sum(2).mean(1))


def test_r_kv_weighs_attention_against_mean_cosines():
    """Its code with the two stated differences: only older keys, and no cosine with the first key
    is removed from a key without a similar one.
    """
    queries, keys = heads(3)
    window, older = queries[-WINDOW:], keys[:, :-WINDOW]
    largest = np.einsum("wkgh,ksh->kgws", window, older).max(1) / DIM**0.5
    importance = smoothed(softmax(largest).mean(1), 7, np.max)
    unit = older / np.linalg.norm(older, axis=-1, keepdims=True)
    cosines = unit @ unit.swapaxes(1, 2)
    alone = 0
    for head, key in np.ndindex(*cosines.shape[:2]):
        cosines[head, key, key] = 0
        similar = np.flatnonzero(cosines[head, key] > 0.5)
        alone += not similar.size
        cosines[head, key, similar[-1:]] = 0
    assert 0 < alone < cosines.shape[1]
    expected = 0.07 * importance - 0.93 * softmax(cosines.mean(1))
    assert_same(ours(important_and_rare(0.07), window, keys)[:, :-WINDOW], expected)
