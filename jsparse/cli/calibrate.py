"""The command `jsparse calibrate-channels`."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Option

from jsparse.cli.console import Bars
from jsparse.cli.options import DtypeOption, ModelOption, RevisionOption, read_text, takes_model


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
    if not out.parent.is_dir():
        raise ValueError(f"--out {str(out)!r}: must be in an existing folder")
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
