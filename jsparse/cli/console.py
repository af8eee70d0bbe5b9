"""Prints progress bars, errors and statistics of commands."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
)

from jsparse.text.short_names import short_name

if TYPE_CHECKING:
    from jsparse.runtime.host_reader import Generation


def quiet_jax() -> None:
    """Hides jax's log messages unless the user wants them; call it before importing jax."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("jax").setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def write_any_text() -> None:
    """Makes standard output replace characters that its encoding lacks, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def print_error(error: BaseException | str) -> None:
    """Prints `error: …` on standard error, as one line."""
    print("error:", " ".join(str(error).split("\n")), file=sys.stderr, flush=True)


def print_note(text: str) -> None:
    """Prints `note: …` on standard error, as one line."""
    print("note:", " ".join(text.split("\n")), file=sys.stderr, flush=True)


def print_wrote(path: Path) -> None:
    """Prints the path of a result on standard error."""
    print("wrote", path, file=sys.stderr, flush=True)


def progress_bar(*further: ProgressColumn, transient: bool = True) -> Progress:
    """Returns a progress bar of counts on standard error, visible if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *further
    console, disable = Console(stderr=True), not sys.stderr.isatty()
    return Progress(*columns, console=console, transient=transient, disable=disable)


class Bars:
    """Progress bars of loading and generation on standard error, one at a time.

    They are visible only if both standard output and standard error are terminals.
    """

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty() and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._phase = ""

    def load(self, done: int, total: int) -> None:
        """Shows the progress of `jsparse.load`, in bytes."""
        self._update("load", done, total)

    def generate(self, phase: str, done: int, total: int) -> None:
        """Shows the progress of `jsparse.generate`, in tokens."""
        self._update(phase, done, total)

    def prefill(self, phase: str, done: int, total: int) -> None:
        """Shows the progress until the first token, for commands that stream the text."""
        if phase != "decode":
            self._update(phase, done, total)

    def close(self) -> None:
        """Removes the bar; call it before anything else is written."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._phase = None, ""

    def _update(self, phase: str, done: int, total: int | None) -> None:
        if not self._shown:
            return
        if done == total and phase != "decode":
            # the next phase first waits for its programs, and reports nothing until it runs
            phase, done, total = "compile", 0, None
        if phase != self._phase:
            self.close()
            count = DownloadColumn(binary_units=True) if phase == "load" else MofNCompleteColumn()
            columns = [TextColumn(phase), BarColumn(), *([] if total is None else [count])]
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task, self._phase = self._progress.add_task(phase, total=total), phase
            self._progress.start()
        if self._progress is not None:
            self._progress.update(self._task, completed=done)


class TextOutput:
    """A writer of text pieces to standard output as they arrive, with a line break at the end.

    On a terminal the dimmed prompt precedes the first piece.
    """

    def __init__(self, bars: Bars, prompt: str = "") -> None:
        self.text = ""
        self._bars = bars
        self._prompt = prompt if sys.stdout.isatty() else ""

    def __call__(self, piece: str) -> None:
        self._begin()
        self.text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()

    def close(self) -> None:
        """Ends the text, complete or not, with a line break."""
        self._begin()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _begin(self) -> None:
        self._bars.close()
        if self._prompt:
            Console().print(
                self._prompt,
                style="dim",
                end="",
                markup=False,
                highlight=False,
                emoji=False,
                soft_wrap=True,
            )
            self._prompt = ""


def print_stats(generation: "Generation") -> None:
    """Prints counts and speed, dimmed, if standard error is a terminal; parts stay on one line."""
    if not sys.stderr.isatty():
        return
    stats = generation.stats
    parts = [
        f"{stats.new_tokens} tokens"
        + {
            "length": ", cut at --max-new-tokens",
            "overflow": ", cut since the policy left no room in the cache",
        }.get(generation.finish_reason, "")
    ]
    if stats.decode_tokens_per_second is not None:
        parts.append(f"{stats.decode_tokens_per_second:.1f} tok/s")
    if stats.attended_fraction is not None:
        parts.append(f"attended {stats.attended_fraction:.1%}")
    if stats.drafted_tokens:
        kept = stats.accepted_tokens / stats.drafted_tokens
        parts.append(f"kept {kept:.1%} of {stats.drafted_tokens} drafts")
    parts.append(f"first token after {stats.prefill_seconds:.2f} s")
    if stats.compile_seconds >= 0.1:
        parts.append(f"compiled for {stats.compile_seconds:.1f} s")
    parts.append(f"policy {short_name(stats.policy)}")
    console = Console(stderr=True, highlight=False)
    for line in in_lines(parts, " · ", console.width):
        console.print(line, style="dim", markup=False, soft_wrap=True)


def in_lines(parts: Sequence[str], between: str, width: int) -> list[str]:
    """Joins parts to lines of at most `width` characters; a longer part has its own line."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = lines[-1] + between + part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines
