"""Shows how many prompts have been answered, and how fast, while `LLM` answers them."""

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

# takes the number of tokens of an answer that is finished
OnOutput = Callable[[int], None]


class _Speed(ProgressColumn):
    """Shows the speed of answering, or the work before it."""

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
        wanted: whether there is one, if `console` is a terminal or a notebook; or a callable that
            makes one, as `tqdm.tqdm` does.
        total: the number of prompts.
        console: the console that shows it; None is standard error.
        doing: returns the name of the work before answering, if that is going on; the bar polls it
            and shows the name in place of the speed.

    Raises:
        ValueError: `wanted` is neither a bool nor callable.
    """
    if callable(wanted):
        made = wanted(total=total, desc="prompts", unit="prompt")
        try:
            yield lambda tokens: made.update(1)
        finally:
            made.close()
        return
    if not isinstance(wanted, bool):
        raise ValueError(f"use_tqdm={wanted!r}: must be true, false or what makes a bar")
    console = Console(stderr=True) if console is None else console
    columns = (
        *(TextColumn("prompts"), BarColumn(), MofNCompleteColumn()),
        *(_Speed(doing), TimeRemainingColumn()),
    )
    shown = wanted and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task, began, new = bar.add_task("prompts", total=total, speed=""), time.monotonic(), 0

        def answered(tokens: int) -> None:
            nonlocal new
            new += tokens
            per_second = new / max(time.monotonic() - began, 1e-6)
            bar.update(task, advance=1, speed=f"{per_second:.0f} tokens/s")

        yield answered
