"""`jsparse eval`, the command."""

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from jsparse.console import Bars
from jsparse.generation_options import DtypeName

DEFAULT_TASKS = "kl,ppl,passkey"


def evaluate(
    model: Annotated[
        str, Option("--model", "-m", help="smollm2, a folder, a .gguf file, or a Hub id such as org/name.")
    ] = "smollm2",
    policy: Annotated[
        list[str] | None, Option(help="What is compared with dense attention; see `jsparse policies`. Repeatable.")
    ] = None,
    tasks: Annotated[
        str, Option(help="With commas: kl, ppl, attention, passkey, niah_grid, RULER's (vt, cwe, …), longbench_….")
    ] = DEFAULT_TASKS,
    lengths: Annotated[str, Option(help="With commas: tokens of prompt and answer together.")] = "1024",
    samples: Annotated[int, Option(help="Of each task and length.")] = 20,
    batch: Annotated[int, Option(help="Prompts side by side.")] = 4,
    steps: Annotated[int, Option(help="Decode steps of a sample of kl, ppl and attention.")] = 64,
    chat: Annotated[bool, Option("--chat", help="Put a task's prompt as a user's message to a chat model.")] = False,
    text: Annotated[Path | None, Option(help="UTF-8 text for kl, ppl and attention, instead of the one here.")] = None,
    files: Annotated[Path | None, Option(help="Folder of the files that some tasks need.")] = None,
    out: Annotated[Path | None, Option("--json", help="Write everything here; beside it what is done so far.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with what an unfinished run with --json left.")] = False,
    plots: Annotated[Path | None, Option(help="Folder for plots: quality, needles, heads.")] = None,
    dtype: Annotated[DtypeName | None, Option(help="The default is bfloat16 on a GPU, float32 elsewhere.")] = None,
    revision: Annotated[str | None, Option(help="A branch, tag or commit of a Hub id.")] = None,
) -> None:
    """Measures what policies cost in quality: their closeness to dense attention, and tasks of long context.

    Example: jsparse eval --policy "streaming(sink=4, recent=256)" --tasks kl,passkey --lengths 1024,4096
    """
    from tempfile import TemporaryDirectory

    from jsparse.evaluation import plots as drawing
    from jsparse.evaluation.results import Store
    from jsparse.evaluation.runner import plan, run
    from jsparse.evaluation.table import tables
    from jsparse.models.checkpoint import load

    if resume and out is None:
        raise ValueError("--resume needs --json, where the unfinished run is")
    names = [name.strip() for name in tasks.split(",")]
    more: dict[str, Any] = {"batch": batch, "steps": steps, "chat": chat, "text": text, "files": files}
    wanted = plan(policy or [], names, _numbers(lengths), samples, **more)
    bars = Bars()
    try:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
    finally:
        bars.close()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in wanted._asdict().items()}
    environment = _environment()
    settings |= {"model": model, "revision": revision, "dtype": str(params.dtype), **environment["versions"]}
    with TemporaryDirectory() as folder, _progress() as progress:
        store = Store(out or Path(folder) / "report.json", settings, resume=resume)
        task = progress.add_task("", total=None)
        run(
            params,
            wanted,
            store,
            lambda done, total, now: progress.update(task, completed=done, total=total, description=now),
        )
        report = store.finish(environment)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables(report):
        console.print(table)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        drawing.plot_quality(report, plots / "quality.png")
        if "niah_grid" in names:
            drawing.plot_niah(report, plots / "niah.png")
        if "attention" in names:
            drawing.plot_heads(report, plots / "heads.png")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"lengths={text!r}: must be whole numbers with commas between them") from None


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
