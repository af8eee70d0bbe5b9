"""The result of `compare`: its rows, a table of them, and a plot of KL over the bytes read."""

import io
import json
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jsparse.evaluation.report.drawings import Point, quality_curves
from jsparse.evaluation.report.table import FORMATS, tokens
from jsparse.machine.extras import install
from jsparse.text.short_names import short_name

WIDTH = 120  # columns of the text
SIZE, DPI = (9.0, 5.0), 120  # of the plot, in inches
NOTE = (
    "bytes: those that a decode step reads of K and V and to select; held: those in memory of K, V "
    "and what is stored to select; both over dense attention's. KL in nats per token"
)


class ComparedPolicy(NamedTuple):
    """A policy's scores, means over all scored tokens.

    Attributes:
        policy: the policy's expression.
        form: the policy as it was given; the same for all sizes of one policy.
        wanted: the wanted bytes over those of dense attention; None: its size was not set.
        bytes_share: the bytes that a step reads of K and V and, unless the policy is an oracle, to
            select, over those of dense attention.
        bytes_read: the same in bytes per step and sequence.
        held: the bytes in memory of K, V and the policy's state, over dense attention's; of a
            method that evicts, after the prompt.
        read, attended: the shares of tokens whose K and V are read, and that have a weight.
        kl: KL(dense ‖ policy) in nats per token.
        kl_interval: its 95 % interval over windows (bootstrap); None for a single window.
        agreement: the share of tokens at which both have the same most likely next token.
        perplexity: the policy's perplexity of the text.
        note: how the size differs from what was wanted, and why; "" if it does not.
    """

    policy: str
    form: str
    wanted: float | None
    bytes_share: float
    bytes_read: int
    held: float
    read: float
    attended: float
    kl: float
    kl_interval: tuple[float, float] | None
    agreement: float
    perplexity: float
    note: str = ""


class PolicyComparison(NamedTuple):
    """The result of `compare`; printing it shows a table.

    Attributes:
        model: the model's name.
        types: the types of its weights.
        length, windows, steps: the tokens per window, the windows, and the scored tokens of each.
        rows: dense() first, then the policies in their order, each by its bytes.
    """

    model: str
    types: str
    length: int
    windows: int
    steps: int
    rows: tuple[ComparedPolicy, ...]

    def __str__(self) -> str:
        return as_text(self)

    def save(self, path: Path | str) -> None:
        """Writes everything as one JSON object."""
        saved = self._asdict() | {"rows": [row._asdict() for row in self.rows]}
        Path(path).write_text(json.dumps(saved, ensure_ascii=False) + "\n", encoding="utf-8")

    def plot(self, path: Path | str) -> None:
        """Draws the KL divergence over the bytes read, a line per policy, in the path's format.

        Raises:
            ValueError: matplotlib is not installed.
        """
        plot(self, path)


def table(result: PolicyComparison) -> Table:
    """Returns the result as a rich table with a row per policy and size."""
    where = f"{result.windows} x {tokens(result.length)} tokens, {result.steps} scored in each"
    made = Table(
        title=Text(f"{result.model}, {where}, {result.types}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    bracket = ", with its 95 % interval." if result.rows[-1].kl_interval else "."
    made.caption, made.caption_justify = Text(NOTE + bracket), "left"
    made.add_column("policy", overflow="fold")
    for name in ("bytes %", "held %", "attended %", "KL", "agreement %", "perplexity"):
        made.add_column(name, justify="right")
    for row in result.rows:
        policy = "\n".join(filter(None, (short_name(row.policy), _note(row))))
        made.add_row(*map(Text, [policy, *_numbers(row)]))
    return made


def _numbers(row: ComparedPolicy) -> list[str]:
    shares = [f"{100 * share:.1f}" for share in (row.bytes_share, row.held, row.attended)]
    kl = _formatted("kl", row.kl)
    if row.kl_interval:
        kl += "\n[{}, {}]".format(*(_formatted("kl", bound) for bound in row.kl_interval))
    rest = (_formatted(name, getattr(row, name)) for name in ("agreement", "perplexity"))
    return [*shares, kl, *rest]


def _formatted(metric: str, value: float) -> str:
    _, factor, form = FORMATS[metric]
    return f"{factor * value:z{form}}"


def _note(row: ComparedPolicy) -> str:
    if row.wanted is None or not row.note:
        return row.note
    return f"not {100 * row.wanted:.3g} %: {row.note}"


def as_text(result: PolicyComparison) -> str:
    """Returns the table as plain text."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, highlight=False).print(table(result))
    return file.getvalue()


def plot(result: PolicyComparison, path: Path | str) -> None:
    """Draws the KL divergence over the share of bytes read, a line per policy as it was given.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"plots need {error.name}: {install('eval')}") from None
    lines: dict[str, list[Point]] = {}
    for row in result.rows[1:]:  # dense attention has no distance to itself
        point = Point(row.policy, row.bytes_share, row.kl)
        lines.setdefault(short_name(row.form), []).append(point)
    figure = Figure(SIZE, layout="constrained")
    axis = figure.subplots()
    quality_curves("kl", lines, list(lines))(axis)
    axis.set(xlabel="bytes read per step, of dense attention's", ylabel="KL, nats per token")
    axis.set_title(f"{result.model}, {result.windows} x {tokens(result.length)} tokens")
    if lines:
        figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=DPI)
