"""The options of `jsparse train-indexer`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from jsparse.cli.options import DtypeOption, ModelOption, RevisionOption, WeightsOption
from jsparse.cli.train_gates_options import (
    AskedOption,
    HeldOutOption,
    NeedlesOption,
    QuestionsOption,
    TextOption,
    WordsOption,
)


@dataclass(frozen=True)
class TrainIndexerOptions:
    """The model, the texts and the settings of a training run."""

    out: Annotated[Path, Option(help="File to write the gates to; an existing one is overwritten.")]
    model: ModelOption = "smollm2"
    steps: Annotated[int, Option(help="Number of training steps.")] = 800
    batch: Annotated[int, Option(help="Texts per step.")] = 1
    rate: Annotated[float, Option(help="AdamW learning rate.")] = 1e-3
    block: Annotated[int, Option(help="Tokens per block, a multiple of the page size.")] = 64
    norm: Annotated[bool, Option(help="Normalise gate queries and gate keys.")] = True
    held_out: HeldOutOption = 4
    text: TextOption = None
    questions: QuestionsOption = None
    min_length: Annotated[
        int | None,
        Option(help="Shortest text with pass keys, in tokens; the default is --max-length."),
    ] = None
    max_length: Annotated[int, Option(help="Longest text, in tokens.")] = 4096
    needles: NeedlesOption = None
    words: WordsOption = None
    asked: AskedOption = None
    seed: Annotated[int, Option(help="Random seed of the texts and of the gates.")] = 0
    dtype: DtypeOption = None
    weights: WeightsOption = None
    revision: RevisionOption = None
