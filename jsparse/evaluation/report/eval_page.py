"""Makes the page of `jsparse eval --report`: tables, plots and samples of a run, from its JSON."""

from collections.abc import Mapping
from typing import Any

from jsparse.evaluation.report.pages import fill
from jsparse.evaluation.report.table import (
    BESIDE,
    FORMATS,
    MARKED,
    NOTE,
    YARDSTICK,
    Column,
    not_averaged,
    number,
    table_values,
    tokens,
)
from jsparse.text.short_names import short_name

# titles of plots in the page
PLOTS = {
    "quality": "Quality over the share of tokens attended to",
    "by_step": "Quality over decode steps",
    "niah": "Needles found over depth and length",
    "heads": "Share attended to, by layer and KV head",
}
SETTINGS = ("model", "revision", "dtype", "samples", "steps", "batch", "chat")


def page(report: Mapping[str, Any], plots: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the page, which is self-contained.

    Args:
        report: the result of a run, as written by `--json`.
        plots: SVGs by name, among those of PLOTS, and by title.
    """
    policies = list(dict.fromkeys(cell["policy"] for cell in report["cells"]))
    columns = _columns(report)
    settings = report["settings"]
    shown = {name: settings[name] for name in SETTINGS if settings.get(name) not in (None, False)}
    environment = report["environment"]
    shown |= {name: environment[name] for name in ("device", "platform") if name in environment}
    tasks = {column["task"] for column in columns}
    marked = any(column["left_out"] for column in columns)
    data = {
        "timestamp": report["timestamp"],
        "settings": {name: str(value) for name, value in shown.items()},
        "note": " ".join([MARKED] * marked + [BESIDE] * (YARDSTICK in tasks) + [NOTE]),
        "columns": columns,
        "rows": [
            {
                "policy": short_name(policy),
                "values": [column["values"].pop(policy, None) for column in columns],
            }
            for policy in policies
        ],
        "plots": [
            {"title": PLOTS[name], "panels": [[*panel] for panel in panels.items()]}
            for name, panels in plots.items()
        ],
        "cells": [
            {
                "policy": short_name(cell["policy"]),
                "task": cell["task"],
                "length": cell["length"],
                "samples": [_sample(sample) for sample in cell["samples"]],
            }
            for cell in report["cells"]
        ],
    }
    for column in columns:
        del column["values"]
    return fill("report", data)


def _columns(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the columns of the table: a metric of a task, or the average score, at a length."""
    shown = {
        key: value
        for key, value in table_values(report).items()
        if key[1].metric in FORMATS or key[1].metric == "attended"
    }
    left_out, several = not_averaged(report), len({key.length for _, key in shown}) > 1
    columns: dict[Column, dict[str, Any]] = {}
    for (policy, key), value in shown.items():
        label = FORMATS[key.metric][0] if key.metric in FORMATS else "attended %"
        at = f", {tokens(key.length)}" if several else ""
        made = {"task": key.task, "label": f"{label}{at}", "left_out": key in left_out}
        column = columns.setdefault(key, {**made, "values": {}})
        if value["mean"] is not None:
            mean = f"{100 * value['mean']:.1f}"
            text = number(value, key.metric) if key.metric in FORMATS else mean
            column["values"][policy] = {"value": value["mean"], "text": text}
    return list(columns.values())


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample's numbers and texts, without values drawn by head or step."""
    facts = {
        name: value
        for name, value in sample["meta"].items()
        if isinstance(value, str | int | float | bool)
        or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    }
    return {"index": sample["index"], "values": sample["values"], "meta": facts}
