"""The command `jsparse recommend`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.table import Table
from typer import Option

from jsparse.cli.console import Bars, progress_bar
from jsparse.cli.options import (
    POLICY_FORMS,
    DtypeOption,
    JsonOption,
    KVCacheDtypeOption,
    ModelOption,
    RevisionOption,
    WeightsOption,
    complete_policy,
    takes_model,
)
from jsparse.text.short_names import short_name

# seconds between two progress lines
LINE_SECONDS = 10
STAYS_DENSE = 1
"""The exit status if nothing faster than dense attention is close enough to it."""


@takes_model
def recommend(
    model: ModelOption = "smollm2",
    context: Annotated[
        int | None,
        Option(
            help="Tokens in the cache of each sequence; the default is 32768 on a GPU and 4096 "
            "elsewhere, at most the model's maximum."
        ),
    ] = None,
    batch: Annotated[int, Option(help="Number of sequences that decode together.")] = 1,
    kl: Annotated[
        float,
        Option("--kl", help="Maximum mean KL divergence from dense attention, in nats per token."),
    ] = 0.02,
    exact: Annotated[
        bool,
        Option(
            "--exact",
            help="Accept only policies that choose dense attention's token at every position.",
        ),
    ] = False,
    policy: Annotated[
        list[str] | None,
        Option(
            metavar="<policy>",
            autocompletion=complete_policy,
            help=f"Policy to try in addition to the default ones: {POLICY_FORMS} Repeatable.",
        ),
    ] = None,
    only: Annotated[
        bool, Option("--only", help="Try only the policies of --policy, not the default ones.")
    ] = False,
    samples: Annotated[int, Option(help="Number of texts, and of pass keys of each kind.")] = 8,
    keep: Annotated[bool, Option(help="Whether to save the result for policy=auto.")] = True,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    revision: RevisionOption = None,
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find the fastest policy for a model on this device that stays close to dense attention.

    Times decode steps of ten policies, then compares those that are faster than dense attention
    with it: KL divergence, and pass keys that the prompt's end or a later turn asks for. An
    interrupted run resumes where it stopped. The exit status is 0 if a policy is recommended, 1 if
    dense attention is best.

    Example: jsparse recommend Qwen/Qwen3-8B --context 32768 --kl 0.01
    """
    import jax

    from jsparse.benchmark.recommend import recommend as measure
    from jsparse.benchmark.requirements import Requirements, candidates, checked
    from jsparse.models.checkpoint import load
    from jsparse.models.config_files import read_config
    from jsparse.policies.own_code import resolve

    longest = read_config(model, revision=revision).max_position_embeddings
    usual = 32768 if jax.default_backend() == "gpu" else 4096
    tokens = min(usual, longest) if context is None else context
    named = [resolve(text).name for text in policy or []]
    tried = (*named, *(() if only else candidates(tokens)))
    requirements = Requirements(model, tokens, batch, tried, kl=kl, exact=exact, samples=samples)
    checked(requirements, longest)
    with closing(Bars()) as bars:
        params = load(
            model,
            dtype=dtype,
            weights=weights,
            revision=revision,
            kv_cache_dtype=kv_cache_dtype,
            on_progress=bars.load,
        )
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with _shown() as report:
        measured = measure(params, requirements, report=report, notify=notes.print)
    if as_json:
        print(json.dumps(measured))
    else:
        _print(measured)
    if keep:
        notes.print(_kept(measured))
    if measured["best"]["policy"] == "dense()":
        raise typer.Exit(STAYS_DENSE)


def _kept(measured: dict[str, Any]) -> str:
    """Saves the policy for `auto`, and returns a line about it."""
    from jsparse.benchmark.recommend import choice
    from jsparse.policies import choices
    from jsparse.policies.expressions import is_own

    best, requirements = measured["best"]["policy"], measured["wanted"]
    if is_own(best):
        return f"policy=auto is unchanged: it cannot use your own code, {best}"
    made = choice(measured)
    choices.keep([made])
    min_context, max_context = (
        int(part * requirements["context"]) for part in (choices.MIN_SHARE, choices.MAX_SHARE)
    )
    return (
        f"policy=auto is {short_name(best)} from now on for {requirements['model']} on "
        f"{measured['device']}, with caches of {min_context + 1} to {max_context} tokens and "
        f"batches of {requirements['batch']} or more ({choices.file()})."
    )


def _print(measured: dict[str, Any]) -> None:
    """Prints the table, and lines that explain it."""
    requirements = measured["wanted"]
    table = Table(
        title="{model}, {batch} x {context} tokens, ".format(**requirements)
        + "{dtype}, {device}".format(**measured),
        title_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=20)
    for name in ("ms per step", "speed-up", "KL", "agreement", "pass keys", "asked later"):
        table.add_column(name, justify="right")
    table.add_column("")
    for place, row in enumerate(measured["rows"]):
        verdict = row["verdict"] or ("recommended" if place == 0 else "close enough")
        table.add_row(*_cells(row), verdict, style="bold" if place == 0 else None)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    best = measured["best"]["policy"]
    if best == "dense()":
        lines = ["No policy is both faster and close enough: dense attention is best."]
    else:
        lines = [f'Take it with --policy "{short_name(best)}"']
    dense = next(row for row in measured["rows"] if row["policy"] == "dense()")
    if measured["length"]:
        lines.append(
            f"KL and agreement: {requirements['samples']} texts of {measured['length']} tokens, "
            f"{requirements['steps']} steps each. Pass keys: found, of {dense['of']}, asked for by "
            "the prompt's end and by a later turn."
        )
        for task, words in zip(dense["found"], ("", " of a later turn"), strict=True):
            found = dense["found"][task]
            if found is not None and found < dense["of"] / 2:
                lines.append(
                    f"Dense attention itself finds {found} of {dense['of']} pass "
                    f"keys{words}, so they give little information about this model."
                )
    console.print(*lines, sep="\n", soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    name = short_name(row["policy"])
    speed = ["-", "-"] if row["ms"] is None else [f"{row['ms']:.3g}", f"{row['over_dense']:.2f}x"]
    if row["kl"] is None:
        return [name, *speed, *["-"] * 4]
    found = ["-" if count is None else f"{count}/{row['of']}" for count in row["found"].values()]
    return [name, *speed, f"{row['kl']:.2g}", f"{row['agreement']:.1%}", *found]


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Shows the progress on standard error: a bar on a terminal, else a line every ten seconds."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    ended, on_terminal = Event(), sys.stderr.isatty()
    with progress_bar(TimeElapsedColumn()) as progress:
        task = progress.add_task("loading", total=None)

        def report(now: str, done: int, total: int) -> None:
            progress.update(task, description=now, completed=done, total=total)

        def notify() -> None:
            while not ended.wait(LINE_SECONDS):
                now = progress.tasks[task]
                of = "" if now.total is None else f", {now.completed:.0f} of {now.total:.0f}"
                console.print(f"{now.description}{of}, {now.elapsed or 0:.0f} s")

        lines = Thread(target=notify, daemon=True)
        if not on_terminal:
            lines.start()
        try:
            yield report
        finally:
            ended.set()
            if not on_terminal:
                lines.join()
