"""Tests that a training interrupted anywhere ends as if it had not been, on any devices.

Also tests its refusals.
"""

import json
import math
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from jsparse.policies import head_gates
from jsparse.train import trainer as training
from jsparse.train.families import hardened
from jsparse.train.run_folder import Log, read_lines, read_log
from tests.support.small_training import HEADS, LAYERS, SEEDS, STEPS, left, model, timeless, trainer

KEPT = 3  # lines of the log with all gates


class CutOffError(Exception):
    """Marks a run interrupted by a report."""


@pytest.fixture(scope="module", autouse=True)
def few_lines_with_gates():
    """Makes a training log its gates less often than its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "KEPT", KEPT)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Trains in one piece; returns the folder and the record."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, trainer(folder).run(save_every=2)


# results


@pytest.mark.slow
def test_record_log_and_gates_agree(whole):
    folder, record = whole
    assert json.loads((folder / "record.json").read_text()) == record
    assert record["settings"] == json.loads((folder / "settings.json").read_text())["settings"]
    assert record["data"] == {
        "source": "random",
        "longest": 24,
        "buckets": [24],
        "target_tokens": 4,
    }
    assert (record["model"], record["dtype"], len(record["seeds"])) == ("tiny", "float32", SEEDS)
    steps = [line for line in read_log(folder) if "distance" in line]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert record["seconds"] == pytest.approx(sum(line["seconds"] for line in steps))
    assert all(
        math.isfinite(x)
        for line in steps
        for name in ("distance", "active", "multiplier")
        for x in line[name]
    )
    assert [seed["retrieval_heads"] for seed in record["seeds"]] == [6] * SEEDS
    harden = jax.jit(hardened, static_argnums=1)
    for i, seed in enumerate(record["seeds"]):
        gates = head_gates.load(str(folder / f"gates_{i}.safetensors"))
        np.testing.assert_array_equal(gates.retrieval, harden(np.asarray(gates.scores), 6))
        assert gates.record == {**record, "seeds": None, "seed": i, **seed}
        assert seed["above_half"] == np.sum(np.asarray(gates.scores) > 0.5)
    one, other = record["seeds"]
    assert one["distance_of_hard_gates"] > 1e-4
    assert one["distance_of_mean_gates"] != other["distance_of_mean_gates"]
    assert record["distance_of_layer_0_alone"] > 1e-4


def test_all_gates_are_logged_at_the_given_interval(whole):
    folder, record = whole
    lines = [line for line in read_log(folder) if "mean" in line]
    assert [line["step"] for line in lines] == [0, 2, 4, STEPS]
    means = np.array([line["mean"] for line in lines])
    assert means.shape == (1 + KEPT, SEEDS, LAYERS, HEADS)
    np.testing.assert_array_equal(means[:, :, 0], 1)
    np.testing.assert_allclose(means[0, :, 1:], 0.5, atol=1e-5)
    assert all(
        (one != two).any() for one, two in pairwise(means[1:, :, 1:])
    )  # the first step has rate 0
    assert {name: np.shape(x) for name, x in lines[0]["parameters"].items()} == dict.fromkeys(
        "ab", (SEEDS, LAYERS - 1, HEADS)
    )
    grey = (means[-1, :, 1:] > 0.1) & (means[-1, :, 1:] < 0.9)
    assert [seed["grey"] for seed in record["seeds"]] == grey.mean(axis=(1, 2)).tolist()
    assert grey.any()


# resuming


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """Kills a training while it writes its log, and resumes it; returns steps, folder, record."""
    folder = tmp_path_factory.mktemp("gone_on") / "run"

    def report(step, steps, line):
        if step == 3:
            raise CutOffError

    with pytest.raises(CutOffError):
        trainer(folder).run(report, save_every=2)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "dist')  # killed while it wrote
    steps = []
    record = trainer(folder, resume=True).run(lambda step, *_: steps.append(step))
    return steps, folder, record


def test_another_process_resumes_from_the_checkpoint(whole, gone_on):
    steps, folder, record = gone_on
    assert steps == [3, 4, 5, 6]
    assert timeless(record) == timeless(whole[1])
    assert left(folder) == left(whole[0])


def test_resumed_log_is_on_disk_at_once(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [{"step": 1}, {"step": 2}, {"step": 2, "mean": [0.5]}, {"step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    with Log(path, 2) as log:
        assert read_lines(path) == lines[:3]
        log.write({"step": 3, "again": True})
    assert read_lines(path) == [*lines[:3], {"step": 3, "again": True}]
    with Log(path, 0):
        assert read_lines(path) == []


def test_run_of_other_settings_is_not_resumed(whole):
    before = left(whole[0])
    with pytest.raises(
        ValueError, match=r"out='.*run': holds a training already; resume it or name another folder"
    ):
        trainer(whole[0])
    other = replace(model(), name="other")
    for changes, differing in (
        ({"rate": 0.02}, r"settings\.rate .* there, 0\.02 here"),
        ({"steps": STEPS + 1}, rf"settings\.steps {STEPS} there, {STEPS + 1} here"),
        ({"longest": 25}, "data.*25 here"),
        ({"params": other}, "model .* there, other here"),
        ({"longest": 25, "seeds": 3}, r"data.*25 here; settings\.seeds .* there, 3 here"),
    ):
        with pytest.raises(
            ValueError, match=rf"out='.*run': holds a training with other settings: .*{differing}"
        ):
            trainer(whole[0], resume=True, **changes)
    with pytest.raises(ValueError, match=r"out='.*nothing': holds no training to resume"):
        trainer(whole[0] / "nothing", resume=True)
    assert left(whole[0]) == before


# devices


@pytest.mark.slow
def test_two_devices_match_one(whole, tmp_path):
    assert trainer(tmp_path / "alone", devices=2, batch=1)._mesh.size == 1, "one sample: no share"
    record = trainer(tmp_path / "run", devices=2).run()
    one, two = left(whole[0]), left(tmp_path / "run")
    assert two["retrieval"] == one["retrieval"]
    np.testing.assert_allclose(two["scores"], one["scores"], rtol=1e-3)
    assert record["distance_of_layer_0_alone"] == pytest.approx(
        whole[1]["distance_of_layer_0_alone"], rel=1e-3
    )
    for mine, its in zip(one["log"], two["log"], strict=True):
        assert mine.keys() == its.keys()
        leaves = zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True)
        assert all(a == pytest.approx(b, rel=1e-3, abs=1e-4) for a, b in leaves), (mine, its)


# refusals

ABOVE_0 = r"must be a finite number above 0"
REFUSED = [
    ({"family": "kuma"}, "family='kuma': must be one of hard_kuma, hard_concrete, direct"),
    ({"penalty": "none"}, "penalty='none': must be one of ascent, exponential, fixed"),
    ({"match": "loss"}, "match='loss': must be one of logits, hidden"),
    *(
        ({name: 0}, f"{name}=0: must be at least 1")
        for name in ("steps", "batch", "seeds", "held_out")
    ),
    *(
        ({"target": n}, f"target={n}: must be from 4, layer 0's KV heads, to 8, all of them")
        for n in (3, 9)
    ),
    *(({"keep": x}, f"keep={x}: must be above 0 and at most 1") for x in (0, -0.5, 1.01, math.nan)),
    *(({"rate": x}, f"rate={x}: {ABOVE_0}") for x in (0, -0.5, math.inf, math.nan)),
    *(({"anneal": x}, f"anneal={x}: must be from 0 to 1") for x in (-0.1, 1.1, math.nan)),
    *(
        ({name: x}, f"{name}={x}: must be finite and at least 0")
        for name in ("penalty_rate", "penalty_start", "damping")
        for x in (-1, math.inf, math.nan)
    ),
]  # fmt: skip


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path):
    for changes, said in REFUSED:
        with pytest.raises(ValueError, match=f"^{said}$"):
            trainer(tmp_path / "run", **changes)
        assert not list(tmp_path.iterdir()), changes


def test_refused_run_leaves_no_files(tmp_path):
    with pytest.raises(ValueError, match="save_every=0: must be at least 1"):
        trainer(tmp_path / "run").run(save_every=0)
    assert not list(tmp_path.iterdir())
