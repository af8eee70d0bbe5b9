"""Tests methods of sparse prefill against slow models of their papers, and their expressions."""

from importlib import import_module

import jax
import numpy as np
import pytest

import jsparse
from jsparse.cache import read_heads
from jsparse.hooks import ChunkView
from jsparse.policies.prefill_methods import as_method
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.runtime import fingerprint
from tests.kernels.cases.block_sparse_prefill import BLOCK, Case

# rows of several blocks: one starts anywhere, one at 0, one has no tokens and one few
RAGGED = Case("ragged", lengths=(700, 380, 40, 7), valid=(172, 380, 0, 7), tokens=380, pages=45)


@jax.jit(static_argnames="method")
def run(method, view):
    scores = method.score(view)
    return scores, method.choose(scores, view)


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of 4 blocks, so that the longest row of `RAGGED` has a second one, not full."""
    for name in ("masses", "vertical_slash"):
        module = import_module(f"jsparse.policies.prefill_methods.{name}")
        monkeypatch.setattr(module, "blocks_per_segment", lambda *_: 4)
    yield
    run.clear_cache()


def chosen_by(expression, case=RAGGED):
    """Returns the view of a case, and a method's scores and choice."""
    q, kv, valid, _ = case.build()
    view = ChunkView(q, kv, valid)
    scores, chosen = run(as_method(expression), view)
    return view, jax.tree.map(np.asarray, scores), np.asarray(chosen)


def tokens_of(view):
    """Yields (b, n, q[t, H], k[s, H]) in float64 for each row and query head."""
    q, keys = (np.asarray(x, np.float64) for x in (view.q, read_heads(view.kv.k, view.kv)))
    group = q.shape[2] // keys.shape[1]
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        valid, length = int(view.valid[b]), int(view.kv.lengths[b, 0])
        if valid:
            yield b, n, q[b, :valid, n], keys[b, n // group, :length]


def own_blocks(first, block):
    """The key blocks of a query block's own tokens."""
    start = first + block * BLOCK
    return set(range(start // BLOCK, (start + BLOCK - 1) // BLOCK + 1))


@pytest.mark.parametrize("stride", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short_segments")
def test_antidiagonals_of_tiles_score_blocks(stride):
    """The mean of q·k/√H along each tile's antidiagonal, a softmax over tiles, a sum by block."""
    view, scores, chosen = chosen_by(f"xattention(threshold=0.8, stride={stride})")
    for b, n, q, k in tokens_of(view):
        first, wanted = len(k) - len(q), np.zeros(scores.shape[2:])
        for tile in range(0, len(q), stride):
            columns = range(0, first + tile + 1, stride)
            logits = []
            for column in columns:
                pairs = [(tile + stride - 1 - i, column + i) for i in range(stride)]
                along = [q[t] @ k[s] for t, s in pairs if t < len(q) and s < len(k)]
                logits.append(sum(along) / stride / np.sqrt(q.shape[1]))
            weights = np.exp(np.array(logits) - max(logits))
            for column, weight in zip(columns, weights / weights.sum(), strict=True):
                wanted[tile // BLOCK, column // BLOCK] += weight
        np.testing.assert_allclose(scores[b, n], wanted, rtol=1e-4, atol=1e-6)
        for block in range(-(-len(q) // BLOCK)):
            every = {*range(scores.shape[3])}
            kept = {0, *own_blocks(first, block)} & every
            order = sorted(every - kept, key=lambda j: -wanted[block, j])
            while sum(wanted[block, [*kept]]) < 0.8 * wanted[block].sum():
                kept.add(order.pop(0))
            assert set(np.flatnonzero(chosen[b, n, block])) == kept


@pytest.mark.usefixtures("short_segments")
def test_lines_are_the_strongest_columns_and_diagonals_of_each_block():
    expression = "vertical_slash(sink=0, recent=1, vertical=128, slash=128, queries=40)"
    view, scores, chosen = chosen_by(expression)
    for b, n, q, k in tokens_of(view):
        first = len(k) - len(q)
        for block in range(-(-len(q) // BLOCK)):
            newest = min((block + 1) * BLOCK, len(q)) - 1
            columns, diagonals = {}, {}
            for t in range(max(newest - 39, block * BLOCK), newest + 1):
                logits = k[: first + t + 1] @ q[t] / np.sqrt(q.shape[1])
                weights = np.exp(logits - logits.max())
                for s, weight in enumerate(weights / weights.sum()):
                    columns[s] = columns.get(s, 0) + weight
                    met = s + newest - t
                    diagonals[met] = diagonals.get(met, 0) + weight
            for line, got in ((columns, scores.vertical), (diagonals, scores.slash)):
                for j in range(scores.vertical.shape[3]):
                    most = max(line.get(s, 0) for s in range(j * BLOCK, (j + 1) * BLOCK))
                    np.testing.assert_allclose(got[b, n, block, j], most, rtol=1e-4, atol=1e-6)
            column, end = (max(line, key=line.get) // BLOCK for line in (columns, diagonals))
            kept = {column, end, max(end - 1, 0), (first + block * BLOCK) // BLOCK}
            assert set(np.flatnonzero(chosen[b, n, block])) == kept


def test_streaming_keeps_the_first_and_newest_tokens_of_every_query():
    view, _, chosen = chosen_by("streaming(130, 200)")
    for b, n, q, k in tokens_of(view):
        first = len(k) - len(q)
        for t in range(len(q)):
            newest = range(max(first + t - 199, 0), first + t + 1)
            needed = {s // BLOCK for s in [*range(130), *newest] if s <= first + t}
            assert needed <= {
                *np.flatnonzero(chosen[b, n, t // BLOCK]),
                *own_blocks(first, t // 128),
            }
        assert not chosen[b, n, 0, 2 : (first - 199) // BLOCK].any()


@pytest.mark.parametrize("start", [256, 1024])
def test_auto_chooses_from_a_position_on(monkeypatch, start):
    monkeypatch.setattr(import_module("jsparse.policies.prefill_methods.auto"), "START", start)
    run.clear_cache()
    view, _, chosen = chosen_by("auto")
    run.clear_cache()
    _, _, wanted = chosen_by("xattention(threshold=0.9, stride=16)")
    late = np.asarray(view.starts) >= start
    assert (late.any(), late.all()) == (start == 256, False)
    np.testing.assert_array_equal(chosen, wanted | ~late[:, None, :, None])


def test_expressions_build_equal_methods_and_policies():
    assert as_method("xattention") is as_method("xattention(0.9, stride=16)")
    assert as_method("dense") is None
    joined = with_prefill("quest(budget=64)", "streaming(128, 512)")
    assert joined is jsparse.sparse_prefill(jsparse.quest(64), "streaming(sink=128, recent=512)")
    assert fingerprint.of(joined) != fingerprint.of(jsparse.quest(64))
    assert with_prefill("quest", "dense") is jsparse.quest()
    assert str(joined).startswith("sparse_prefill(policy=quest(budget=64")
    assert with_prefill("auto", "streaming") is with_prefill("auto", "streaming()")


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ("xatention", r"prefill='xatention': unknown method 'xatention', did you mean xattention"),
        ("quest(64)", "must be one of dense, auto, xattention, vertical_slash, streaming"),
        ("xattention(threshold=0)", r"prefill='xattention\(threshold=0\)': threshold=0: must be"),
        ("xattention(stride=5)", "stride=5: must be one of"),
        ("xattention(p=1)", "unexpected keyword argument 'p'"),
        ("streaming(recent=0)", "recent=0: must be an integer of at least 1"),
        ("vertical_slash(queries=129)", "queries=129: must be at most 128"),
        ("dense(1)", "dense takes no arguments"),
        ("streaming(open('x'))", "must be 'dense' or a call with literals"),
        ("streaming(", "must be 'dense' or a call with literals"),
        (None, "prefill=None: must be a PrefillMethod or an expression"),
    ],
)
def test_other_expressions_are_refused(prefill, message):
    with pytest.raises(ValueError, match=message):
        with_prefill("dense", prefill)


def test_second_method_is_refused():
    with pytest.raises(ValueError, match="must have no prefill method yet"):
        with_prefill(jsparse.sparse_prefill(jsparse.dense()), "streaming")
