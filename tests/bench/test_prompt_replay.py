"""Tests which blocks bench.lib.prompt_replay counts and draws."""

import json

import jax
import numpy as np
import pytest

from bench.lib.prompt_replay import reached, recorded_shares, recorder, replayed
from jsparse.hooks import ChunkView
from jsparse.policies.prefill_methods import as_method
from jsparse.runtime.capacity import spec_of
from jsparse.runtime.session import Session
from tests.kernels.cases.block_sparse_prefill import Case
from tests.support.tiny import random_prompts, tiny_params


def test_blocks_of_a_known_pattern_are_counted():
    params = tiny_params()
    spec = spec_of(params, 1, 1024, page_size=16)
    session = Session(params, recorder(as_method("streaming(sink=128, recent=1)")), spec)
    session.prefill(random_prompts([600]))
    counts = np.asarray(session.prefilled.state)
    # five blocks: the first, then each its own and the first
    heads = params.config.num_heads
    np.testing.assert_array_equal(counts, np.tile([[[9], [15]]], (spec.num_layers, 1, heads)))


def test_replayed_shares_are_those_recorded():
    q, kv, valid, _ = Case("replay", lengths=(4096,), valid=(1024,), tokens=1024, pages=260).build()
    view = ChunkView(q, kv, valid)
    shares = np.tile([0.1, 0.5, 1.0], (4, 1))
    method = replayed(as_method("xattention(threshold=0.9)"), shares)
    chosen = np.asarray(jax.jit(lambda view: method.choose(method.score(view), view))(view))
    within = np.asarray(reached(view))[:, None]
    assert not np.any(chosen & ~within)
    assert np.all(chosen[:, :, :, 0]) and np.all(chosen | ~np.asarray(view.own) | ~within)
    read = np.sum(chosen, axis=(0, 2, 3)) / within.sum()
    np.testing.assert_allclose(read, [0.1, 0.1, 0.5, 0.5, 1, 1], atol=0.15)  # of 228 blocks


def test_a_method_that_was_not_recorded_is_refused(tmp_path):
    report = tmp_path / "shares.json"
    results = [
        {"method": "streaming(sink=128, recent=4096)", "context": context, "shares": [[share]]}
        for context, share in ((1024, 1.0), (8192, 0.5))
    ]
    report.write_text(json.dumps({"results": results}), encoding="utf-8")
    assert recorded_shares(report, "streaming()").tolist() == [[0.5]]
    with pytest.raises(ValueError, match=r"has no shares of streaming\(sink=4"):
        recorded_shares(report, "streaming(sink=4)")
