"""The command `jsparse eval`."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import TimeRemainingColumn

from jsparse.cli.console import Bars, print_wrote, progress_bar
from jsparse.cli.evaluate_options import EvaluateOptions, OutOption, ReportOption, ResumeOption
from jsparse.cli.options import (
    LoadingOptions,
    ModelOption,
    PolicyListOption,
    PrefillOption,
    takes_model,
    takes_options,
    whole_numbers,
)
from jsparse.machine.extras import install

if TYPE_CHECKING:
    from jsparse.evaluation.plan import Plan, Progress

SHORT_WAIT = 20.0  # seconds that need no estimate


@takes_model
@takes_options(LoadingOptions, "loading")
@takes_options(EvaluateOptions)
def evaluate(
    options: EvaluateOptions,
    loading: LoadingOptions,
    model: ModelOption = "smollm2",
    policy: PolicyListOption = None,
    prefill: PrefillOption = "dense",
    out: OutOption = None,
    resume: ResumeOption = False,
    report: ReportOption = None,
) -> None:
    """Measure the quality of policies: closeness to dense attention and long-context tasks.

    Example: jsparse eval --policy "streaming(sink=4, recent=256)" --lengths 1024,4096
    """
    from importlib.util import find_spec

    from jsparse.evaluation.plan import plan
    from jsparse.policies.own_code import resolve
    from jsparse.policies.sparse_prefill import with_prefill

    if resume and out is None:
        raise ValueError("--resume needs --json, where the unfinished run is")
    more: dict[str, Any] = dict(vars(options))
    names = [name.strip() for name in more.pop("tasks").split(",")]
    lengths = whole_numbers("lengths", more.pop("lengths"))
    policies = [with_prefill(resolve(text), prefill).name for text in policy or ["dense"]]
    wanted = plan(policies, names, lengths, **more)
    if report is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--report needs matplotlib: {install('eval')}")
    result = carry_out(wanted, model, out, _environment(), resume=resume, **vars(loading))
    # a pipe that closes while tables are printed ends the process: write files first
    if out is not None:
        print_wrote(out)
    if report is not None:
        write_page(result, report)
        print_wrote(report)
    show(result)


def carry_out(
    wanted: "Plan",
    model: str,
    out: Path | None,
    environment: dict[str, Any],
    *,
    resume: bool = False,
    **loading: Any,
) -> dict[str, Any]:
    """Loads the model, takes the missing measurements, and returns the report.

    Progress goes to standard error: a bar on a terminal, otherwise lines. `out` is the file for the
    report and, until then, its journal; None: neither is written. The environment's "versions" are
    settings.
    """
    from tempfile import TemporaryDirectory

    from jsparse.evaluation.plan import run
    from jsparse.evaluation.store import ResultStore
    from jsparse.models.checkpoint import load

    with closing(Bars()) as bars:
        params = load(model, on_progress=bars.load, **loading)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in wanted._asdict().items()
    }
    settings |= {
        "model": model,
        "revision": loading.get("revision"),
        "dtype": params.types,
        **({} if params.mesh is None else {"devices": params.mesh.size}),
        "versions": environment["versions"],
    }
    with TemporaryDirectory() as folder, _shown_progress() as report:
        store = ResultStore(out or Path(folder) / "report.json", settings, resume=resume)
        run(params, wanted, store, report)
        return store.finish(environment)


def show(report: dict[str, Any]) -> None:
    """Prints the tables of a report."""
    from jsparse.evaluation.report.table import tables

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables(report):
        console.print(table)


def write_page(report: dict[str, Any], file: Path) -> None:
    """Writes the report as one page, including its plots."""
    from jsparse.evaluation.report.eval_page import page
    from jsparse.evaluation.report.plots import pictures

    file.write_text(page(report, pictures(report)), encoding="utf-8")


def _environment() -> dict[str, Any]:
    import platform

    import jax

    from jsparse import __version__

    return {
        "device": jax.local_devices()[0].device_kind,
        "platform": platform.platform(),
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }


@contextmanager
def _shown_progress() -> "Iterator[Callable[[Progress], None]]":
    """Yields a function that shows progress on standard error: a bar on a terminal, else lines."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with progress_bar(TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)

        def update(now: "Progress") -> None:
            name = f"{now.part.tasks[0]} {now.part.length}"
            bar.update(task, completed=now.done, total=now.total, description=name)

        yield update


class _Lines:
    """A printer of a line per finished task and length, and an estimate after its first batch."""

    def __init__(self) -> None:
        self._began = 0.0
        self._estimated = False

    def __call__(self, now: "Progress") -> None:
        if now.part_done == 0:
            self._began, self._estimated = time.monotonic(), False
            return
        seconds = time.monotonic() - self._began
        name = f"{', '.join(now.part.tasks)} at {now.part.length} tokens"
        if now.part_done == now.part_total:
            self._print(f"{name}: {now.part_total} samples in {_duration(seconds)}", now)
        elif not self._estimated:
            self._estimated = True
            left = seconds * (now.part_total / now.part_done - 1)
            if left > SHORT_WAIT:
                self._print(
                    f"{name}: {now.part_done} of {now.part_total} samples in "
                    f"{_duration(seconds)}, compilation included; the rest in at most about "
                    f"{_duration(left)}",
                    now,
                )

    def _print(self, text: str, now: "Progress") -> None:
        print(f"{text} ({now.done} of {now.total} in all)", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Returns a duration as one number: 42 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
