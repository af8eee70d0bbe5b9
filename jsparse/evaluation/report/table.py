"""Renders a run's result as tables for the terminal, from its JSON alone."""

from collections.abc import Mapping, Sequence
from itertools import batched, chain, pairwise
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from jsparse.evaluation.statistics import YARDSTICK
from jsparse.text.short_names import short_name

# metric: its name, the factor and the format of its numbers
FORMATS = {
    "score": ("score %", 100, ".1f"),
    "agreement": ("agreement %", 100, ".1f"),
    "new_tokens": ("new tokens", 1, ".0f"),
    "cut_off": ("cut off %", 100, ".1f"),
    "kl": ("KL", 1, ".2g"),
    "perplexity": ("perplexity", 1, ".2f"),
    "recall": ("recall %", 100, ".1f"),
    "mass": ("mass %", 100, ".1f"),
    "output_error": ("output error", 1, ".2g"),
    "accepted": ("accepted %", 100, ".1f"),
    "tokens_per_round": ("tokens a round", 1, ".2f"),
}
METRICS = tuple(FORMATS)
AVERAGE = "average"
NOTE = (
    "In brackets: difference to dense and its 95 % interval (paired bootstrap). "
    "KL in nats per token."
)
BESIDE = (
    "yardstick: the KL of oracle_top_k where it reads as many bytes of K and V; behind ×: how many "
    "times as large the policy's is."
)
MARKED = "† dense scores under 30 %: listed, not averaged."
KIB = 1024


class Column(NamedTuple):
    """A metric of a task, or of the average over tasks, at one length."""

    task: str
    metric: str
    length: int


TableValues = Mapping[tuple[str, Column], Mapping[str, Any]]  # by policy and column


class Grid(NamedTuple):
    """One table's texts; a text may have several lines."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str


def tables(
    report: Mapping[str, Any], metrics: Sequence[str] = METRICS, columns: int = 4
) -> list[Table]:
    """Returns the result as rich tables with one row per policy; see `grids`."""
    return [_rich(grid) for grid in grids(report, metrics, columns)]


def grids(
    report: Mapping[str, Any], metrics: Sequence[str] = METRICS, columns: int = 4
) -> list[Grid]:
    """Returns the texts of the tables.

    There is a column for each task, length and measured metric, and for the average score over
    several tasks. With more than `columns` (four fit in 120 characters), each table has one length.
    A number is followed by its difference from dense and the 95 % interval of that, as in "93.0
    (-2.1 [-4.0, -0.3])". The last column is the attended fraction, mean over all tasks.
    """
    measured = table_values(report)
    shown = dict.fromkeys(column for _, column in measured if column.metric in metrics)
    lengths = sorted({column.length for column in shown})
    at_length = [[column for column in shown if column.length == length] for length in lengths]
    wholes = at_length if len(shown) > columns else [list(chain.from_iterable(at_length))]
    groups = [list(group) for whole in wholes for group in batched(whole, columns)]
    return [_grid(report, measured, group, NOTE if group is groups[-1] else "") for group in groups]


def table_values(report: Mapping[str, Any]) -> TableValues:
    """Returns all metrics, and the average score over tasks if there are several."""
    return {
        (cell["policy"], Column(cell["task"], metric, cell["length"])): value
        for cell in report["cells"]
        for metric, value in cell["metrics"].items()
    } | {
        (row["policy"], Column(AVERAGE, "score", row["length"])): row
        for row in report["averages"]
        if len(row["tasks"]) > 1
    }


def not_averaged(report: Mapping[str, Any]) -> set[Column]:
    """Returns the scores of tasks that dense attention itself fails."""
    return {
        Column(task, "score", row["length"])
        for row in report["averages"]
        for task in row["left_out"]
    }


def tokens(length: int) -> str:
    """Returns a number of tokens in short form: 4K, 1500."""
    return str(length) if length % KIB else f"{length // KIB}K"


def number(value: Mapping[str, Any] | None, metric: str) -> str:
    """Returns a metric's mean, with its difference from dense, or a yardstick's ratio."""
    if value is None:
        return "-"
    _, factor, form = FORMATS.get(metric, (metric, 1, ".3g"))
    text = f"{factor * value['mean']:{form}}"
    if ratio := value.get("ratio"):
        return text + _bracket(f"×{ratio['mean']:.3g}", ratio["interval"], 1, ".3g")
    if value["difference"] is None:
        return text
    return text + _bracket(
        f"{factor * value['difference']:+z{form}}", value["interval"], factor, form
    )


def _bracket(compared: str, interval: Sequence[float] | None, factor: float, form: str) -> str:
    if interval is None:
        return f" ({compared})"
    low, high = (f"{factor * bound:z{form}}" for bound in interval)
    return f" ({compared}\n[{low}, {high}])"


def _grid(
    report: Mapping[str, Any], measured: TableValues, columns: list[Column], note: str
) -> Grid:
    left_out = not_averaged(report)
    lengths = list(dict.fromkeys(column.length for column in columns))
    where = ", {}" if len(lengths) > 1 else ""
    # a task is named only above the first of its columns
    follows = [False, *(a[::2] == b[::2] for a, b in pairwise(columns))]
    header = [
        f"{'' if again else column.task}\n{FORMATS.get(column.metric, (column.metric,))[0]}"
        f"{where.format(tokens(column.length))}{'†' * (column in left_out)}"
        for column, again in zip(columns, follows, strict=True)
    ]
    rows = [
        [
            short_name(policy),
            *(number(measured.get((policy, column)), column.metric) for column in columns),
            ", ".join(_attended(report, policy, length) for length in lengths),
        ]
        for policy in dict.fromkeys(policy for policy, _ in measured)
    ]
    title = f"{report['settings']['model']}, {' and '.join(map(tokens, lengths))} tokens"
    has_yardstick = any(column.task == YARDSTICK for column in columns)
    notes = (
        [MARKED] * (not left_out.isdisjoint(columns))
        + [BESIDE] * has_yardstick
        + [note] * bool(note)
    )
    return Grid(title, ["policy", *header, "attended %"], rows, " ".join(notes))


def _attended(report: Mapping[str, Any], policy: str, length: int) -> str:
    cells = [
        cell["metrics"]
        for cell in report["cells"]
        if (cell["policy"], cell["length"]) == (policy, length)
    ]
    means = [metrics["attended"]["mean"] for metrics in cells if "attended" in metrics]
    return f"{100 * sum(means) / len(means):.1f}" if means else "-"


def _rich(grid: Grid) -> Table:
    table = Table(title=Text(grid.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption, table.caption_justify = Text(grid.note), "left"
    policy, *numbers, attended = grid.header
    table.add_column(policy, overflow="fold")
    for header in numbers:
        table.add_column(Text(header), justify="right", no_wrap=True)
    table.add_column(Text(attended), justify="right")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
