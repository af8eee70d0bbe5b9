"""The options of `jsparse train-gates`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from jsparse.cli.options import DtypeOption, ModelOption, RevisionOption

# options of every command that trains on texts
HeldOutOption = Annotated[
    int, Option(help="Number of held-out batches on which the result is measured.")
]
TextOption = Annotated[
    Path | None,
    Option(help="UTF-8 text file to hide pass keys in, instead of the built-in text."),
]
QuestionsOption = Annotated[
    Path | None,
    Option(
        help='File to train on instead of pass keys, with lines of {"context": …, '
        '"question": …, "answer": …}.'
    ),
]
NeedlesOption = Annotated[int | None, Option(help="Pass keys per text; the default is 10.")]
WordsOption = Annotated[int | None, Option(help="Words per pass key; the default is 32.")]
AskedOption = Annotated[int | None, Option(help="Pass keys to recite; the default is 2.")]


@dataclass(frozen=True)
class TrainGatesOptions:
    """The model, the samples and the settings of a training run."""

    out: Annotated[
        Path, Option(help="Folder for the run: settings, log, checkpoints, gates, record, plots.")
    ]
    model: ModelOption = "smollm2"
    target: Annotated[
        int | None,
        Option(
            help="Number of retrieval heads to find, including layer 0's KV heads; the default is "
            "one in eight."
        ),
    ] = None
    family: Annotated[str, Option(help="Family of gates: hard_kuma, hard_concrete or direct.")] = (
        "hard_kuma"
    )
    penalty: Annotated[
        str | None,
        Option(
            help="Penalty on retrieval heads: ascent, exponential or fixed; the default is ascent, "
            "or fixed with --family direct."
        ),
    ] = None
    penalty_rate: Annotated[
        float | None, Option(help="Rate at which the penalty's multiplier ascends.")
    ] = None
    penalty_start: Annotated[
        float | None, Option(help="Initial value of the penalty's multiplier.")
    ] = None
    damping: Annotated[
        float | None,
        Option(help="Weight of the squared surplus of retrieval heads in the penalty."),
    ] = None
    anneal: Annotated[
        float,
        Option(
            help="Fraction of the steps over which the wanted number of retrieval heads falls from "
            "all to --target."
        ),
    ] = 0.5
    steps: Annotated[int, Option(help="Number of training steps.")] = 3000
    batch: Annotated[
        int, Option(help="Samples per step, split equally over as many devices as possible.")
    ] = 1
    rate: Annotated[float, Option(help="AdamW learning rate.")] = 0.01
    keep: Annotated[
        float, Option(help="Fraction of the context that a sparse head inherits during training.")
    ] = 0.3
    sets: Annotated[
        str,
        Option(
            help="Tokens of the sparse heads: handed_on (as lychee_decode, heads below one half "
            "pass on their set), refreshed (all heads select), or streaming (the first 64 and the "
            "newest 256, for duo_attention)."
        ),
    ] = "handed_on"
    match: Annotated[
        str, Option(help="Output to match with the dense model: logits or hidden.")
    ] = "logits"
    seeds: Annotated[
        int, Option(help="Number of training runs side by side, on the same samples.")
    ] = 1
    held_out: HeldOutOption = 16
    text: TextOption = None
    questions: QuestionsOption = None
    min_length: Annotated[
        int | None, Option(help="Shortest context of pass keys, in tokens; the default is 1024.")
    ] = None
    max_length: Annotated[int, Option(help="Longest context, in tokens.")] = 7680
    needles: NeedlesOption = None
    words: WordsOption = None
    asked: AskedOption = None
    seed: Annotated[int, Option(help="Random seed of the samples.")] = 0
    save_every: Annotated[int, Option(help="Number of steps between checkpoints.")] = 200
    resume: Annotated[
        bool, Option("--resume", help="Continue the unfinished run in the folder.")
    ] = False
    dtype: DtypeOption = None
    revision: RevisionOption = None
