"""Tests that compared policies read the wanted bytes, and that the result is what was measured."""

import io
import json
from functools import cache

import numpy as np
import pytest
from rich.console import Console

import jsparse
from jsparse.evaluation.closeness import closeness, perplexity, windows
from jsparse.evaluation.comparison.compare import compare
from jsparse.evaluation.comparison.result import NOTE, table
from jsparse.evaluation.teacher_forcing import force
from jsparse.policies import REGISTRY
from jsparse.policies.sizes import has_open_size
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params

LENGTH, STEPS, PAGE = 64, 4, 8
TOKENS = LENGTH - (STEPS + 1) / 2
TEXT = random_prompts([3 * LENGTH + 10])[0]
FIXED = "streaming(sink=0, recent=1)"
OPTIONS = {"length": LENGTH, "samples": 2, "steps": STEPS, "batch": 3, "page_size": PAGE}


def params():
    return tiny_params(num_layers=1)


@shared
def made():
    return compare(params(), TEXT, ["quest", FIXED, "dense"], bytes=(0.5, 1), **OPTIONS)


def test_rows_are_dense_attention_and_each_policy_by_its_bytes():
    result = made()
    assert [(row.form, row.wanted) for row in result.rows] == [
        ("dense()", None),
        ("quest", 0.5),
        ("quest", 1),
        (FIXED, None),
    ]
    assert (result.length, result.windows, result.steps) == (LENGTH, 2, STEPS)
    assert [row.note for row in result.rows] == ["", "", "", "own size"]


def test_policies_read_the_wanted_bytes():
    _, half, _, fixed = made().rows
    assert abs(half.bytes_share - 0.5) * TOKENS <= PAGE
    # two vectors per page, where a token has two
    assert half.bytes_share == pytest.approx(half.read + LENGTH / PAGE / TOKENS, rel=0.01)
    whole = TOKENS * 2 * 2 * 16 * 4
    assert half.bytes_read == pytest.approx(half.bytes_share * whole, abs=1)
    assert fixed.bytes_share == fixed.read < 0.2
    assert half.held == pytest.approx(1 + 1 / PAGE)
    assert fixed.held == 1


def test_all_bytes_are_dense_attention():
    dense, _, whole, fixed = made().rows
    assert (dense.kl, dense.agreement, dense.bytes_share, dense.held) == (0, 1, 1, 1)
    assert whole.read == 1 and abs(whole.kl) < 1e-5 and whole.agreement == 1
    assert whole.perplexity == pytest.approx(dense.perplexity, rel=1e-4)
    assert fixed.kl > 0.1


def test_scores_are_those_of_closeness():
    """Means over both windows, whose batch is filled up to two here."""
    prompts, ends = (part[:2] for part in windows(TEXT, LENGTH, STEPS))
    arguments = {"max_new_tokens": STEPS, "continuation": ends, "max_length": LENGTH}
    found = closeness(force(params(), [FIXED], prompts, page_size=PAGE, **arguments))
    row = made().rows[-1]
    assert row.kl == pytest.approx(found.kl[1].mean(), rel=1e-4)
    assert row.agreement == pytest.approx(found.agreement[1].mean())
    assert row.perplexity == pytest.approx(perplexity(found.logprob)[1], rel=1e-4)
    assert row.kl_interval is not None
    assert row.kl_interval == pytest.approx(np.sort(found.kl[1].mean(axis=-1)), rel=0.05)


def test_result_is_printed_and_saved(tmp_path):
    made().save(tmp_path / "out.json")
    saved = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert saved["rows"] == json.loads(json.dumps([row._asdict() for row in made().rows]))
    assert saved["model"] == "tiny"
    lines = str(made()).splitlines()
    assert lines[0].startswith("tiny, 2 x 64 tokens, 4 scored in each, float32")
    assert any(line.split()[:2] == ["dense()", "100.0"] for line in lines)
    assert sum("own size" in line for line in lines) == 1


def test_table_is_complete_in_its_width():
    dense, row, *_ = made().rows
    policy = "seer_attention(budget=14, threshold=0.1, block=8)"
    row = row._replace(policy=policy, wanted=0.3, note="nearest size", perplexity=1628.9)
    for width in (80, 120):
        file = io.StringIO()
        Console(file=file, width=width).print(table(made()._replace(rows=(dense, row))))
        shown = " ".join(file.getvalue().split())
        assert NOTE in shown and "1628.90" in shown
    assert "not 30 %: nearest size" in shown


def test_plot_has_a_line_per_policy(tmp_path, figures):
    pytest.importorskip("matplotlib")
    made().plot(tmp_path / "out.png")
    [axis] = figures[0].axes
    shares = {line.get_label(): line.get_xdata().tolist() for line in axis.lines}
    rows = made().rows
    assert shares["quest"] == [row.bytes_share for row in rows[1:3]]
    assert len(shares) == 2
    assert (tmp_path / "out.png").stat().st_size > 0


def test_plot_names_the_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        made().plot(tmp_path / "out.png")


def test_wrong_arguments_are_named():
    for changed, message in (
        ({"policies": []}, r"policies=\[\]: must be a list"),
        ({"policies": "quest"}, "policies='quest': must be a list"),
        ({"policies": ["qest"]}, "unknown policy 'qest', did you mean quest"),
        ({"bytes": 0}, "bytes=0: must be above 0"),
        ({"bytes": (0.5, -1)}, "bytes=-1: must be above 0"),
        ({"bytes": 10**9}, "bytes=1000000000: .* at most 15744, the bytes of dense"),
        ({"bytes": True}, "bytes=True: must be a number"),
        ({"bytes": "0.5"}, "bytes='0.5': must be a number"),
        ({"bytes": ()}, r"bytes=\(\): must hold at least one"),
        ({"length": 513}, "length=513: must be at most 512"),
        ({"length": 300}, "tokens: 202 of them must fill .* length=300"),
        ({"steps": 63}, "steps=63: must be at most length - 2 = 62"),
        ({"length": 2}, "length=2: must be an integer of at least 3"),
        ({"steps": 0}, "steps=0: must be an integer of at least 1"),
        ({"samples": 0}, "samples=0: must be"),
        ({"text": [[1, 2], [3]]}, "text: must be one text"),
        ({"page_size": 7}, "page_size=7"),
    ):
        given = {"text": TEXT, "policies": ["quest"], **OPTIONS, **changed}
        with pytest.raises(ValueError, match=message):
            compare(params(), given.pop("text"), given.pop("policies"), **given)


def test_two_policies_of_one_name_are_refused():
    twins = [jsparse.quest(8)._replace(name="mine"), jsparse.quest(16)._replace(name="mine")]
    with pytest.raises(ValueError, match="two are called 'mine'"):
        compare(params(), TEXT, twins, **OPTIONS)


# two of three layers of tidal are dense, and raas keeps the prompt
OUT_OF_REACH = {"tidal", "raas"}
GATES = ((1, 1), (0, 0), (0, 1))
ARGUMENTS = {
    "lychee_decode": f"({GATES}, sink=1, recent=6)",
    "duo_attention": f"({GATES}, sink=1)",
    "razor_attention": f"({GATES}, sink=1, share=0)",
    "seer_attention": f"(block={PAGE})",
    "quest_chunks": "(recent=3, lengths=(1, 3), period=2)",
    "lychee_cluster": "(sink=1, recent=3, lengths=(1, 3), period=2)",
    "cluster_kv": "(cluster_size=4, sink=1, recent=3, period=3)",
    "hard_kv": "(window=4)",
    "ada_kv": "(window=4)",
    "expected_attention": "(sink=1, recent=2, window=6)",
    "kvzip": "(sink=1, recent=2, chunk=32)",
    "shadow_kv": "(rank=8, outliers=1, recent=2)",
    "verified": "(recent=3)",
}
WRAPPED = ("keep(quest, recent=8)", "dense_layers(quest, n=1)", "twilight(quest, p=0.99)")
FORMS = [
    f"{name}{ARGUMENTS.get(name, '')}"
    for method in REGISTRY
    for name in [method.build.__name__]
    if method.kind != "wraps" and name not in {*OUT_OF_REACH, "twilight"}
]
OPEN = [*filter(has_open_size, FORMS), *WRAPPED]


@cache
def every():
    options = {**OPTIONS, "length": 160, "samples": 1}
    return compare(tiny_params(num_layers=3), TEXT, OPEN, bytes=0.65, **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", OPEN)
def test_every_policy_with_a_size_reads_the_wanted_bytes(form):
    [row] = [row for row in every().rows if row.form == form]
    assert row.note == ""
    assert abs(row.bytes_share - 0.65) * (160 - (STEPS + 1) / 2) <= PAGE
