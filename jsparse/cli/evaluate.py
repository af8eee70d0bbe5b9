"""`jsparse eval`, the command."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from jsparse.cli.console import Bars
from jsparse.cli.options import DtypeName, DtypeOption, ModelOption, RevisionOption

if TYPE_CHECKING:
    from jsparse.evaluation.plan import Plan

DEFAULT_TASKS = "kl,ppl,passkey"


def evaluate(
    model: ModelOption = "smollm2",
    policy: Annotated[
        list[str] | None,
        Option(help="What is compared with dense attention; see `jsparse policies`. Repeatable."),
    ] = None,
    tasks: Annotated[
        str,
        Option(
            help="With commas: kl, ppl, attention, passkey, niah_grid, RULER's (vt, cwe, …), longbench_…."
        ),
    ] = DEFAULT_TASKS,
    lengths: Annotated[
        str, Option(help="With commas: tokens of prompt and answer together.")
    ] = "1024",
    samples: Annotated[int, Option(help="Of each task and length.")] = 20,
    batch: Annotated[int, Option(help="Prompts side by side.")] = 4,
    steps: Annotated[int, Option(help="Decode steps of a sample of kl, ppl and attention.")] = 64,
    chat: Annotated[
        bool, Option("--chat", help="Put a task's prompt as a user's message to a chat model.")
    ] = False,
    text: Annotated[
        Path | None, Option(help="UTF-8 text for kl, ppl and attention, instead of the one here.")
    ] = None,
    files: Annotated[Path | None, Option(help="Folder of the files that some tasks need.")] = None,
    out: Annotated[
        Path | None, Option("--json", help="Write everything here; beside it what is done so far.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with what an unfinished run with --json left.")
    ] = False,
    plots: Annotated[Path | None, Option(help="Folder for plots: quality, needles, heads.")] = None,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Measures what policies cost in quality: their closeness to dense attention, and tasks of long
    context.

    Example: jsparse eval --policy "streaming(sink=4, recent=256)" --tasks kl,passkey --lengths
        1024,4096
    """
    from jsparse.evaluation.plan import plan

    if resume and out is None:
        raise ValueError("--resume needs --json, where the unfinished run is")
    names = [name.strip() for name in tasks.split(",")]
    more: dict[str, Any] = {
        "batch": batch,
        "steps": steps,
        "chat": chat,
        "text": text,
        "files": files,
    }
    wanted = plan(policy or [], names, _numbers(lengths), samples, **more)
    report = carry_out(
        wanted, model, out, _environment(), dtype=dtype, revision=revision, resume=resume
    )
    show(report)
    if plots is not None:
        draw(report, plots)


def carry_out(
    wanted: "Plan",
    model: str,
    out: Path | None,
    environment: dict[str, Any],
    *,
    dtype: DtypeName | None = None,
    revision: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Loads the model, measures what is not there yet, with a bar on standard error, and returns
    the report.

    Args:
        wanted: what to measure.
        model: as `jsparse.load` takes it.
        out: where the report and, before, its journal are written; None: nowhere.
        environment: of the report; its "versions" are part of the settings.
        dtype: as `jsparse.load` takes it.
        revision: the same.
        resume: go on with an unfinished run of the same settings.
    """
    from tempfile import TemporaryDirectory

    from jsparse.evaluation.plan import run
    from jsparse.evaluation.store import Store
    from jsparse.models.checkpoint import load

    bars = Bars()
    try:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
    finally:
        bars.close()
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in wanted._asdict().items()
    }
    settings |= {
        "model": model,
        "revision": revision,
        "dtype": str(params.dtype),
        "versions": environment["versions"],
    }
    with TemporaryDirectory() as folder, _progress() as progress:
        store = Store(out or Path(folder) / "report.json", settings, resume=resume)
        task = progress.add_task("", total=None)

        def update(done: int, total: int, now: str) -> None:
            progress.update(task, completed=done, total=total, description=now)

        run(params, wanted, store, update)
        return store.finish(environment)


def show(report: dict[str, Any]) -> None:
    """Prints the tables."""
    from jsparse.evaluation.report.table import tables

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables(report):
        console.print(table)


def draw(report: dict[str, Any], folder: Path) -> None:
    """Draws whatever was measured: quality over what is attended, needles found, what heads attend
    to.
    """
    from jsparse.evaluation.report import plots

    folder.mkdir(parents=True, exist_ok=True)
    tasks = report["settings"]["tasks"]
    plots.plot_quality(report, folder / "quality.png")
    if "niah_grid" in tasks:
        plots.plot_niah(report, folder / "niah.png")
    if "attention" in tasks:
        plots.plot_heads(report, folder / "heads.png")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"lengths={text!r}: must be whole numbers with commas between them"
        ) from None


def _environment() -> dict[str, Any]:
    import platform

    import jax

    from jsparse import __version__

    return {
        "device": jax.local_devices()[0].device_kind,
        "platform": platform.platform(),
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }


def _progress() -> Progress:
    """A bar of the samples of all policies, on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
