"""The commands `jsparse calibrate-channels` and `jsparse calibrate-heads`."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Option

from jsparse.cli.console import Bars
from jsparse.cli.options import (
    DtypeOption,
    ModelOption,
    RevisionOption,
    read_text,
    require_writable,
    takes_model,
)


@takes_model
def calibrate_channels(
    text: Annotated[
        Path, Option(help="UTF-8 text file to calibrate on, similar to the model's later inputs.")
    ],
    model: ModelOption = "smollm2",
    out: Annotated[
        Path, Option(help="File to write the ranking to; an existing one is overwritten.")
    ] = Path("double_sparsity.safetensors"),
    tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens to read from the text.")
    ] = 2048,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Rank a model's channels for double_sparsity and print the policy expression to use.

    Example: jsparse calibrate-channels --text book.txt --out heavy.safetensors
    """
    require_writable("--out", out)
    from jsparse.evaluation import channel_calibration
    from jsparse.models.checkpoint import load
    from jsparse.policies import channel_ranking
    from jsparse.text import prompts

    read = read_text(text, "--text")
    if not read.strip():
        raise ValueError(f"--text {str(text)!r}: must not be empty")
    with closing(Bars()) as bars:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
        ids = prompts.encode(params, read)[0][0][:tokens]
        ranking = channel_calibration.calibrate_channels(params, ids, on_progress=bars.prefill)
    channel_ranking.save(ranking, out)
    print(f"double_sparsity(calibration={str(out)!r})")


@takes_model
def calibrate_heads(
    model: ModelOption = "smollm2",
    out: Annotated[
        Path, Option(help="File to write the heads to; an existing one is overwritten.")
    ] = Path("razor_attention.safetensors"),
    tokens: Annotated[
        int | None,
        Option(
            help="Number of random tokens, each read four times; the default is 2500, or the "
            "maximum that the model's context allows."
        ),
    ] = None,
    induction: Annotated[
        float, Option(help="Share of all KV heads to choose by induction score.")
    ] = 0.14,
    echo: Annotated[float, Option(help="Share of all KV heads to choose by echo score.")] = 0.01,
    first_layer: Annotated[
        bool,
        Option(
            "--first-layer", help="Also mark all heads of layer 0, which lychee_decode requires."
        ),
    ] = False,
    seed: Annotated[int, Option(help="Random seed of the tokens.")] = 0,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Find a model's retrieval heads without training and print the policy expression to use.

    The heads are those that attend to earlier occurrences of random tokens, as in RazorAttention.

    Example: jsparse calibrate-heads --model smollm2 --out heads.safetensors
    """
    require_writable("--out", out)
    from jsparse.evaluation import head_calibration
    from jsparse.models.checkpoint import load
    from jsparse.policies import head_gates

    with closing(Bars()) as bars:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
        gates = head_calibration.calibrate_heads(
            params,
            tokens=tokens,
            induction=induction,
            echo=echo,
            first_layer=first_layer,
            seed=seed,
            on_progress=bars.prefill,
        )
    head_gates.save(gates, out)
    print(f"{gates.retrieval.sum()} of {gates.retrieval.size} KV heads are retrieval heads:")
    print(f"razor_attention({str(out)!r})")
