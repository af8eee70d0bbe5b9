"""`jsparse info` and `jsparse policies`, the commands."""

import inspect
import json
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from jsparse.cli.options import MODEL_HELP, DtypeOption, RevisionOption


def info(
    model: Annotated[str, Argument(help=MODEL_HELP)],
    dtype: DtypeOption = None,
    policy: Annotated[
        str, Option(help="Count what it keeps beside the cache; see `jsparse policies`.")
    ] = "dense",
    context: Annotated[
        int | None, Option(help="Tell how many prompts of so many tokens fit.")
    ] = None,
    revision: RevisionOption = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Tells a model's sizes, what a policy keeps beside the cache, and how much context fits in the
    free memory.

    Example: jsparse info smollm2 --context 4096 --policy "twilight(quest(budget=1024), p=0.95)"
    """
    import jax

    from jsparse import model_info

    chosen = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    described = model_info.describe(
        model, dtype=chosen, policy=policy, context=context, revision=revision
    )
    if as_json:
        print(json.dumps(described))
        return
    table = Table(title=model, title_justify="left", show_header=False, box=None)
    for name, value in model_info.rows(described):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def policies() -> None:
    """Lists what --policy can name, with arguments and their defaults.

    Example: jsparse generate "Gravity is" --policy "keep(oracle_top_k(budget=256), sink=4,
        recent=64)"
    """
    from jsparse.policies import POLICIES

    table = Table("policy", "what it does")
    for name, build in POLICIES.items():
        parameters = inspect.signature(build).parameters.values()
        shown = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
        )
        summary = (inspect.getdoc(build) or "").partition("\n\n")[0].replace("\n", " ")
        table.add_row(f"{name}({shown})" if shown else name, summary)
    Console(highlight=False).print(table)
