"""The commands `jsparse info` and `jsparse policies`."""

import inspect
import json
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from jsparse.cli.options import (
    JsonOption,
    LoadingOptions,
    ModelOption,
    PolicyOption,
    takes_model,
    takes_options,
)


@takes_model
@takes_options(LoadingOptions, "loading")
def info(
    loading: LoadingOptions,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "dense",
    context: Annotated[
        int | None,
        Option(
            help="Length in tokens of the prompts counted for the largest batch; the default is "
            "the model's maximum."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's sizes, a policy's memory, and how much context fits in the free memory.

    Example: jsparse info smollm2 --context 4096 --policy "twilight(quest(budget=1024), p=0.95)"
    """
    import jax

    from jsparse.cli.info_table import rows
    from jsparse.evaluation.info import describe
    from jsparse.policies.own_code import resolve

    options = dict(vars(loading))
    options["dtype"] = loading.dtype or (
        "bfloat16" if jax.default_backend() == "gpu" else "float32"
    )
    described = describe(model, policy=resolve(policy), context=context, **options)
    if as_json:
        print(json.dumps(described))
        return
    table = Table(title=model, title_justify="left", show_header=False, box=None)
    for name, value in rows(described):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def policies() -> None:
    """List the policies for --policy, with their arguments and defaults.

    Name a policy of your own as path.py:function or module:function.

    Example: jsparse chat --policy "keep(oracle_top_k(budget=256), sink=4, recent=64)"
    """
    from jsparse.policies import POLICIES

    table = Table("policy", "what it does")
    for name, build in POLICIES.items():
        shown = ", ".join(
            parameter.name
            if parameter.default is parameter.empty
            else f"{parameter.name}={parameter.default!r}"
            for parameter in inspect.signature(build).parameters.values()
        )
        summary = str(inspect.getdoc(build)).partition("\n\n")[0].replace("\n", " ")
        table.add_row(f"{name}({shown})" if shown else name, summary)
    Console(highlight=False).print(table)
