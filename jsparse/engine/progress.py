"""Shows the progress of `LLM`: the number of finished prompts, and tokens per second."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# takes the number of tokens of a finished request
OnOutput = Callable[[int], None]


class _Speed(ProgressColumn):
    """The column of tokens per second, or of the work before decoding."""

    def __init__(self, doing: Callable[[], str]) -> None:
        super().__init__()
        self._doing = doing

    def render(self, task: Task) -> Text:
        return Text(self._doing() or task.fields["speed"])


@contextmanager
def progress(
    wanted: bool | Callable[..., Any],
    total: int,
    console: Console | None = None,
    doing: Callable[[], str] = lambda: "",
) -> Iterator[OnOutput]:
    """Shows a bar while the body runs, and yields the function that moves it.

    Args:
        wanted: whether to show a bar, if `console` is a terminal or a notebook; or a callable that
            makes one, as `tqdm.tqdm` does.
        total: the number of prompts.
        console: the console that shows it; None: standard error.
        doing: returns the name of the work before decoding, or "" after it; the bar polls it and
            shows the name in place of the speed.

    Raises:
        ValueError: `wanted` is neither a bool nor callable.
    """
    if callable(wanted):
        custom = wanted(total=total, desc="prompts", unit="prompt")
        try:
            yield lambda tokens: custom.update(1)
        finally:
            custom.close()
        return
    if not isinstance(wanted, bool):
        raise ValueError(f"use_tqdm={wanted!r}: must be true, false or a callable that makes a bar")
    console = Console(stderr=True) if console is None else console
    columns = (
        *(TextColumn("prompts"), BarColumn(), MofNCompleteColumn()),
        *(_Speed(doing), TimeRemainingColumn()),
    )
    shown = wanted and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task, began, new = bar.add_task("prompts", total=total, speed=""), time.monotonic(), 0

        def finished(tokens: int) -> None:
            nonlocal new
            new += tokens
            per_second = new / max(time.monotonic() - began, 1e-6)
            bar.update(task, advance=1, speed=f"{per_second:.0f} tokens/s")

        yield finished
