"""Makes up a result, for tables and plots to draw."""

from jsparse.evaluation.statistics import averages, summarize

DENSE, TOP_K = "dense()", "oracle_top_k(budget={}, granularity='token')"
POLICIES = (DENSE, "streaming(sink=4, recent=512)", TOP_K.format(128), TOP_K.format(2048))
# the same as users see them
SHORT = (DENSE, "streaming()", "oracle_top_k(budget=128)", "oracle_top_k(budget=2048)")


def entry(policy, task, length, index, meta=None, **values):
    return {
        "policy": policy,
        "task": task,
        "length": length,
        "index": index,
        "values": values,
        "meta": meta or {},
    }


def entries(tasks=("niah_grid", "vt"), lengths=(1024, 4096), samples=8):
    """Makes dense right in every sample of all tasks except vt, where it never is.

    The policies miss an increasing number.
    """
    for at, policy in enumerate(POLICIES):
        for length in lengths:
            attended = 1.0 if policy == DENSE else at * 64 / length
            for index in range(samples):
                heads = {"attended_heads": [[attended, None], [0.5, 0.0], [1.0, attended]]}
                drift = {
                    "kl": 0.01 * at * (index + 1),
                    "agreement": 1 - 0.1 * at,
                    "logprob": -2 - 0.1 * at,
                }
                yield entry(policy, "drift", length, index, heads, attended=attended, **drift)
                for task in tasks:
                    score = float(index >= at) if task != "vt" else 0.0
                    depth = {"depth": index / (samples - 1)}
                    yield entry(policy, task, length, index, depth, score=score, attended=attended)


def report(**kwargs):
    cells = summarize(entries(**kwargs))
    return {
        "timestamp": "2026-01-02T03:04:05+00:00",
        "environment": {"gpus": [], "git_revision": None},
        "settings": {"model": "made-up", "dtype": "float32"},
        "cells": cells,
        "averages": averages(cells),
    }
