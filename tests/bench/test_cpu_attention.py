"""Tests bench.cpu_attention: what its contenders compute, its rows, and a run of the tiny layer."""

import json
import os
import sys
from functools import partial

import jax
import numpy as np
import pytest

from bench import cpu_attention
from bench.cpu_attention import (
    CONTENDERS,
    TINY,
    after_prompt,
    by_policy,
    distinct_first,
    main,
    on_cores,
    speedups,
    step,
    steps,
)
from jsparse.policies.expressions import parse

CONTEXT = 128


# lfps-paper attends to no more than its rule marks, however large the budget
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "lfps-paper"])
def test_a_contender_that_may_attend_to_everything_does(name):
    layer = after_prompt(TINY, CONTEXT, 2, None)
    held = layer.cache.layers[0]
    heads = TINY.num_kv_heads, -1, TINY.head_dim
    keys, values = (np.array(pool, np.float64).reshape(heads) for pool in (held.k, held.v))
    found = [out for out, _ in steps(name, TINY, CONTEXT, 1.0, 2)]
    for nth, out in enumerate(found):
        newest = CONTEXT - 2 + nth
        keys[:, newest], values[:, newest] = layer.k[nth, 0, 0], layer.v[nth, 0, 0]
        for head, q in enumerate(np.asarray(layer.q[nth, 0], np.float64)):
            own = head * TINY.num_kv_heads // TINY.num_heads
            logits = keys[own, : newest + 1] @ q / TINY.head_dim**0.5
            weights = np.exp(logits - logits.max())
            expected = weights @ values[own, : newest + 1] / weights.sum()
            np.testing.assert_allclose(out[0, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_attend_as_they_do_alone():
    """The second of two rows, brought into a layer of its own, as exact LFPS attends."""
    policy = parse("lfps(budget=0.25, exact=True)")
    layer = after_prompt(TINY, CONTEXT, 1, policy, batch=2)
    attend = partial(by_policy, policy)

    def second(tree):
        return jax.tree.map(lambda x: x[-(len(x) // 2) :], tree)

    new = layer.q[0], layer.k[0], layer.v[0]
    alone = step(attend, second(layer.cache), second(layer.state), *map(second, new))[0]
    both = step(attend, layer.cache, layer.state, *new)[0]
    np.testing.assert_allclose(both[1:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in ("full", "repeated")])
def test_a_small_share_leaves_something_out(name):
    (whole, _), (part, _) = (next(steps(kind, TINY, CONTEXT, 0.25, 1)) for kind in ("full", name))
    assert part.shape == whole.shape and not np.allclose(part, whole, atol=1e-3)


def test_times_are_compared_with_those_of_the_same_context_and_cores():
    rows = [
        {"cores": cores, "batch": 2, "context": 512, "name": name, "ms": {"median": cores * ms}}
        for cores in (1, 2)
        for name, ms in (("full", 30.0), ("top-k", 12.0), ("lfps", 3.0))
    ] + [
        {"cores": 1, "batch": batch, "context": 256, "name": name, "ms": {"median": 1.0}}
        for batch, name in ((1, "lfps"), (2, "full"))
    ]
    same = {"batch": 2, "context": 512, "name": "lfps", "full": 10.0, "top-k": 4.0}
    alone = {"cores": 1, "batch": 1, "context": 256, "name": "lfps"}
    assert speedups(rows) == [{"cores": 1, **same}, {"cores": 2, **same}, alone]


def test_children_are_bound_to_cores_that_are_given_back(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1 and os.environ["NPROC"] == "1"
    assert os.sched_getaffinity(0) == before and "NPROC" not in os.environ


def test_cores_that_share_a_physical_core_come_last(monkeypatch):
    """Cores 0 and 1 are threads of one physical core, and so are 2 and 3."""
    monkeypatch.setattr(cpu_attention.Path, "is_file", lambda path: True)
    monkeypatch.setattr(
        cpu_attention.Path, "read_text", lambda path: f"{int(path.parts[-3][3:]) // 2}"
    )
    assert distinct_first({0, 1, 2, 3}) == [3, 1, 2, 0]


@pytest.mark.slow
def test_a_run_writes_a_row_per_contender_and_context(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cpu_attention, "SECONDS", 0.0)
    monkeypatch.setattr(cpu_attention, "MAX_RUNS", 6)

    def run_child(module, arguments):
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(cpu_attention, "run_child", run_child)
    path = tmp_path / "report.json"
    given = ["--tiny", "--context", "128", "256", "--cores", "1", "--only", "full", "lfps"]
    given += ["--batch", "1", "3"]
    monkeypatch.setattr(sys, "argv", ["m", *given, "--allow-modified", "--json", str(path)])
    main()
    report = json.loads(path.read_text())
    rows = [(r["batch"], r["context"], r["name"], r["runs"]) for r in report["results"]]
    sizes = [(1, 128), (1, 256), (3, 128), (3, 256)]
    assert rows == [(*size, name, 5) for name in ("full", "lfps") for size in sizes]
    assert all(0 < r["ms"]["min"] <= r["ms"]["median"] <= r["ms"]["max"] for r in report["results"])
    assert report["settings"]["shape"] == TINY._asdict()
    assert "lfps ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "64"], "--context [64]: must be at least"),
        (["--batch", "0"], "--batch [0]: must be at least 1"),
        (["--share", "0"], "--share 0.0: must be above 0"),
        (["--cores", "0"], "--cores [0]: must be from 1"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["m", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
