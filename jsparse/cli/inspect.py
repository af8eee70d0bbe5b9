"""The command `jsparse inspect`."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from jsparse.cli.console import Bars, print_wrote
from jsparse.cli.options import (
    LoadingOptions,
    ModelOption,
    PageSizeOption,
    PolicyOption,
    PromptArgument,
    PromptFileOption,
    read_prompt,
    takes_options,
)
from jsparse.text.short_names import short_name

if TYPE_CHECKING:
    from jsparse.evaluation.inspection import Inspection

# from an empty cell to a full one
SHADES = " ░▒▓█"
WIDTH = 100  # columns if standard output is not a terminal


@takes_options(LoadingOptions, "loading")
def inspect(
    loading: LoadingOptions,
    prompt: PromptArgument = None,
    file: PromptFileOption = None,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "dense",
    step: Annotated[int, Option(help="Decode step to show; the first follows the prompt.")] = 1,
    layer: Annotated[
        int | None,
        Option(help="Layer whose heads and text to show, from 0; the default shows all layers."),
    ] = None,
    html: Annotated[
        Path | None, Option(help="File to write a page to, for a browser; it needs no network.")
    ] = None,
    overlap: Annotated[
        int | None,
        Option(
            help="Also show the share of each head's n heaviest tokens that the next layer shares."
        ),
    ] = None,
    page_size: PageSizeOption = 16,
) -> None:
    """Show which tokens each layer and head attends to in one decode step.

    Example: jsparse inspect "Gravity is" --policy "streaming(sink=1, recent=2)" --html step.html
    """
    from jsparse.evaluation.inspection import inspect_step
    from jsparse.evaluation.report.inspect_page import page
    from jsparse.policies.own_code import resolve

    text, chosen = read_prompt(prompt, file), resolve(policy)
    with closing(Bars()) as bars:
        params = loading.load(model, bars.load)
        layers = params.config.num_layers
        if layer is not None and not 0 <= layer < layers:
            raise ValueError(f"layer={layer}: must be from 0 to {layers - 1}, the model's last")
        options: dict[str, Any] = {"step": step, "page_size": page_size}
        inspection = inspect_step(params, chosen, text, on_progress=bars.prefill, **options)
        shares = None if overlap is None else inspection.overlap(overlap)
    if html is not None:
        html.write_text(page(inspection), encoding="utf-8")
        print_wrote(html)
    show(inspection, layer)
    if shares is not None and overlap is not None:
        show_overlap(shares, overlap)


def show(inspection: "Inspection", layer: int | None) -> None:
    """Prints a heat map with a row per layer, or per head of one layer followed by its text."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    of_rows = inspection.attended.mean(axis=1) if layer is None else inspection.attended[layer]
    name = "layer" if layer is None else "head"
    length = of_rows.shape[1]
    columns = min(length, max(console.width - len(name) - 16, 8))
    edges = np.linspace(0, length, columns + 1).astype(int)
    cells = np.add.reduceat(of_rows.astype(float), edges[:-1], axis=1) / np.diff(edges)
    console.print(
        f"{short_name(inspection.policy)}, {length} tokens, {inspection.prompt_tokens} of them the "
        "prompt's"
    )
    console.print(f"attended to {inspection.description}; next token {inspection.next_token!r}")
    where = "" if layer is None else f" of layer {layer}"
    per_cell = "" if columns == length else f", about {length / columns:.1f} tokens per column"
    console.print(f"\n{name}s{where} by position, oldest first{per_cell}", style="bold")
    for nth, row in enumerate(cells):
        line = Text(f"{nth:>{len(name)}} │")
        for cell in row:
            # any attention is visible
            shade = int(np.ceil(cell * (len(SHADES) - 1)))
            line.append(SHADES[shade], style="cyan")
        line.append(f"│ {of_rows[nth].mean():6.1%}")
        if layer is None and nth in inspection.fell_back:
            line.append(" dense")
        console.print(line, no_wrap=True, overflow="crop")
    console.print(f"share of tokens attended: {SHADES[0]!r} 0, ░ to 25%, ▒ 50%, ▓ 75%, █ 100%")
    if layer is not None:
        _show_text(console, inspection, layer)


def show_overlap(shares: np.ndarray, count: int) -> None:
    """Prints the shares of Inspection.overlap: a row per pair of layers, a column per KV head."""
    table = Table(
        "layers",
        *(f"head {head}" for head in range(shares.shape[1])),
        "mean",
        box=None,
        pad_edge=False,
    )
    for nth, row in enumerate(shares):
        cells = ("dense" if np.isnan(share) else f"{share:.0%}" for share in (*row, row.mean()))
        table.add_row(f"{nth}-{nth + 1}", *cells)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(
        f"\nshare of a head's {count} heaviest tokens that are also the next layer's",
        style="bold",
    )
    console.print(table)


def _show_text(console: Console, inspection: "Inspection", layer: int) -> None:
    """Prints the text; tokens that more heads attend to are brighter."""
    shares = inspection.attended[layer].mean(axis=0)
    text = Text()
    for token, share in zip(inspection.tokens, shares, strict=True):
        style = "dim" if share == 0 else "reverse" if share == 1 else "underline"
        text.append("".join(c if c.isprintable() or c == "\n" else "·" for c in token), style=style)
    console.print(
        "\ntext: reversed, all heads attend to it; underlined, some; dim, none\n", style="bold"
    )
    console.print(text)
