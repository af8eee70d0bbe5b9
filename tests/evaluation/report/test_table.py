"""Tests tables for the terminal and for Markdown: all numbers, marks, and 120 columns."""

import io

from rich.console import Console

from jsparse.evaluation.report.table import (
    BESIDE,
    MARKED,
    NOTE,
    grids,
    number,
    tables,
)
from jsparse.evaluation.statistics import YARDSTICK, averages, summarize
from tests.support.made_up_report import DENSE, SHORT, TOP_K, entry, report


def of(entries, model="made-up"):
    cells = summarize(entries)
    return {"settings": {"model": model}, "cells": cells, "averages": averages(cells)}


def printed(table, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table)
    return console.file.getvalue()


def value(mean, difference=None, interval=None):
    return {"mean": mean, "difference": difference, "interval": interval}


def test_number_is_printed_with_its_difference_and_interval():
    for metric, found, text in [
        ("score", value(0.93, -0.021, [-0.04, -0.003]), "93.0 (-2.1\n[-4.0, -0.3])"),
        ("score", value(1.0), "100.0"),
        *((name, value(0.9), "90.0") for name in ("agreement", "cut_off", "accepted")),
        *((name, value(0.9), "90.0") for name in ("recall", "mass")),
        ("new_tokens", value(12.4), "12"),
        ("tokens_per_round", value(1.234), "1.23"),
        ("score", value(0.5, 0.0, None), "50.0 (+0.0)"),
        ("score", value(0.5, -1e-9, [-1e-9, 1e-9]), "50.0 (+0.0\n[0.0, 0.0])"),
        ("kl", value(0.01234, 0.01234, [0.01, 0.02]), "0.012 (+0.012\n[0.01, 0.02])"),
        ("perplexity", value(12.345, 1.2, [1.0, 1.4]), "12.35 (+1.20\n[1.00, 1.40])"),
        ("lse_error", value(0.98765), "0.988"),
        ("score", None, "-"),
        ("kl", {**value(0.01234), "ratio": {"mean": 3.456, "interval": None}}, "0.012 (×3.46)"),
        ("kl", {**value(0.1), "ratio": {"mean": 2, "interval": [1, 4.5]}}, "0.1 (×2\n[1, 4.5])"),
        ("kl", {**value(0.01234), "ratio": None}, "0.012"),
    ]:
        assert number(found, metric) == text, metric


def test_table_matches_hand_written_text():
    scores = {DENSE: [1, 1], "streaming(sink=4, recent=8)": [0, 0]}
    made = of(
        entry(policy, "a", 1024, i, score=score, attended=attended)
        for (policy, column), attended in zip(scores.items(), (1, 0.125), strict=True)
        for i, score in enumerate(column)
    )
    (grid,) = grids(made)
    assert grid.title == "made-up, 1K tokens" and grid.note == NOTE
    assert grid.header == ["policy", "a\nscore %", "attended %"]
    assert grid.rows == [
        [DENSE, "100.0", "100.0"],
        ["streaming(recent=8)", "0.0 (-100.0\n[-100.0, -100.0])", "12.5"],
    ]


def test_wide_tables_are_split_by_length_then_by_four_columns():
    made = grids(report())
    titles = [f"made-up, {at} tokens" for at in ("1K", "1K", "4K", "4K")]
    assert [grid.title for grid in made] == titles
    heads = ["drift\nKL", "\nagreement %", "\nperplexity", "niah_grid\nscore %"]
    assert [grid.header[1:-1] for grid in made] == [heads, ["vt\nscore %†"]] * 2
    assert all([row[0] for row in grid.rows] == list(SHORT) for grid in made)
    assert [grid.note for grid in made] == ["", MARKED, "", f"{MARKED} {NOTE}"]
    of_length, again = ([row[-1] for row in grid.rows] for grid in made[:2])
    assert again == of_length, "the share attended"
    assert [len(grid.header) - 2 for grid in grids(report(), columns=10)] == [10]


def test_tasks_that_dense_fails_are_marked_and_not_averaged():
    (grid,) = grids(report(tasks=("a", "b", "vt"), lengths=(1024,)), metrics=["score"])
    names = ["a\nscore %", "b\nscore %", "vt\nscore %†", "average\nscore %"]
    assert grid.header[1:-1] == names
    for _, a, b, vt, average, _ in grid.rows:
        assert a == b == average and vt.startswith("0.0")
    assert MARKED in grid.note
    (grid,) = grids(report(tasks=("a", "b"), lengths=(1024,)), metrics=["score"])
    assert MARKED not in grid.note and not any("†" in name for name in grid.header)


def test_yardstick_is_shown_beside_the_policy():
    policy = "quest(budget=16)"
    made = of(
        [
            *(entry(policy, "kl", 64, i, kl=0.6, attended=0.25) for i in range(2)),
            *(entry(DENSE, YARDSTICK, 64, i) for i in range(2)),
            *(entry(policy, YARDSTICK, 64, i, kl=0.2) for i in range(2)),
            *(entry(DENSE, "kl", 64, i, kl=0, attended=1) for i in range(2)),
        ]
    )
    (grid,) = grids(made)
    assert grid.header == ["policy", "kl\nKL", "yardstick\nKL", "attended %"]
    assert grid.rows == [
        [policy, "0.6 (+0.6\n[0.6, 0.6])", "0.2 (×3\n[3, 3])", "25.0"],
        [DENSE, "0", "-", "100.0"],
    ]
    assert grid.note == f"{BESIDE} {NOTE}"


def test_unmeasured_values_are_dashes():
    made = of([entry(DENSE, "a", 64, 0, score=1), entry(TOP_K, "b", 64, 0, score=1)])
    (grid,) = grids(made)
    assert grid.rows == [[DENSE, "100.0", "-", "-"], ["oracle_top_k(budget={})", "-", "100.0", "-"]]
    assert grids(of([])) == grids(made, metrics=["kl"]) == tables(of([])) == []


def test_four_columns_fit_into_120_characters_without_rounding():
    made = report(tasks=("niah_multikey_2", "niah_multikey_3"), lengths=(1024, 131072))
    metrics = ("score", "kl", "agreement", "perplexity")
    for grid, table in zip(grids(made, metrics), tables(made, metrics), strict=True):
        lines = printed(table).split("\n")
        assert all(len(line) <= 120 for line in lines)
        words = " ".join(lines).split()
        texts = [text for row in [grid.header, *grid.rows] for text in row]
        assert all(word in words for text in texts for word in text.split()), "no word is cut"
