"""The command `jsparse compare`."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from jsparse.cli.console import Bars, print_wrote
from jsparse.cli.options import (
    MODEL_HELP,
    POLICY_FORMS,
    LoadingOptions,
    PageSizeOption,
    complete_policy,
    read_text,
    require,
    require_writable,
    takes_options,
)
from jsparse.machine.extras import install

WIDTH = 120  # columns if standard output is not a terminal
PLOTS = (".png", ".svg", ".pdf")
USUAL = "streaming,quest,double_sparsity,snapkv,twilight(all_pages()),oracle_top_k"


@takes_options(LoadingOptions, "loading")
def compare(
    loading: LoadingOptions,
    model: Annotated[
        str,
        Argument(metavar="<model>", help=MODEL_HELP),
    ],
    file: Annotated[
        Path, Argument(metavar="<text>", help="UTF-8 text file; - reads standard input.")
    ],
    policies: Annotated[
        str,
        Option(
            metavar="<policies>",
            autocompletion=complete_policy,
            help=f"Comma-separated policies, each {POLICY_FORMS} Those without a size, such as "
            "quest, get it from --bytes.",
        ),
    ] = USUAL,
    bytes: Annotated[
        str | None,
        Option(
            help="Comma-separated bytes that a step reads to select and attend: shares of dense "
            "attention's, such as 0.1,0.25, or numbers. The default is the policies' own sizes."
        ),
    ] = None,
    length: Annotated[
        int | None,
        Option(help="Tokens per window; the default is the whole text, up to the model's maximum."),
    ] = None,
    samples: Annotated[int, Option(help="Maximum number of windows.")] = 8,
    steps: Annotated[int, Option(help="Last tokens of each window that are scored.")] = 64,
    batch: Annotated[int, Option(help="Number of windows per batch.")] = 4,
    out: Annotated[
        Path | None, Option("--json", help="File to write the result to, as one JSON object.")
    ] = None,
    plot: Annotated[
        Path | None,
        Option(help="File to draw KL over the bytes read to: .png, .svg or .pdf."),
    ] = None,
    page_size: PageSizeOption = 16,
) -> None:
    """Compare policies on your text where their decode steps read the same number of bytes.

    Shows KL divergence from dense attention, top-1 agreement and perplexity, by the bytes that a
    step reads.

    Example: jsparse compare smollm2 book.txt --policies "quest,streaming,snapkv" --bytes 0.1,0.25
    """
    from importlib.util import find_spec

    numbers = None if bytes is None else _numbers(bytes)
    names = split(policies)
    text = read_text(None if str(file) == "-" else file, "TEXT")
    for option, written in (("--json", out), ("--plot", plot)):
        require_writable(option, written)
    if plot is not None:
        require("--plot", repr(str(plot)), plot.suffix in PLOTS, f"a {' or '.join(PLOTS)} file")
        if find_spec("matplotlib") is None:
            raise ValueError(f"--plot needs matplotlib: {install('eval')}")
    from jsparse.evaluation.comparison.compare import compare as measure
    from jsparse.evaluation.comparison.result import table
    from jsparse.policies.own_code import resolve

    for name in names:
        resolve(name)
    with closing(Bars()) as bars:
        params = loading.load(model, bars.load)
        result = measure(
            params,
            text,
            names,
            bytes=numbers,
            length=length,
            samples=samples,
            steps=steps,
            batch=batch,
            page_size=page_size,
            on_progress=bars.generate,
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(result))
    if out is not None:
        result.save(out)
        print_wrote(out)
    if plot is not None:
        result.plot(plot)
        print_wrote(plot)


def split(policies: str) -> list[str]:
    """Returns the policies of a list with commas between them, none of them in a bracket."""
    names, depth = [""], 0
    for letter in policies:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names]


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"bytes={text!r}: must be numbers with commas between them") from None
