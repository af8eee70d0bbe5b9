"""Defines the command `jsparse train-gates`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Option

from jsparse.cli.console import Bars
from jsparse.cli.options import DtypeOption, ModelOption, RevisionOption, takes_model
from jsparse.machine.extras import install

if TYPE_CHECKING:
    from jsparse.models.tokenizer import Tokenizer
    from jsparse.train.data import Source


@takes_model
def train_gates(
    out: Annotated[
        Path, Option(help="Folder for the run: settings, log, checkpoints, gates, record, plots.")
    ],
    model: ModelOption = "smollm2",
    target: Annotated[
        int | None,
        Option(
            help="Number of retrieval heads to find, layer 0's KV heads included; the default is "
            "one in eight."
        ),
    ] = None,
    family: Annotated[
        str, Option(help="Family of gates: hard_kuma, hard_concrete or direct.")
    ] = "hard_kuma",
    penalty: Annotated[
        str | None,
        Option(
            help="Penalty on retrieval heads: ascent, exponential or fixed; the default is ascent, "
            "or fixed with --family direct."
        ),
    ] = None,
    penalty_rate: Annotated[
        float | None, Option(help="Rate at which the penalty's multiplier ascends.")
    ] = None,
    penalty_start: Annotated[
        float | None, Option(help="Initial value of the penalty's multiplier.")
    ] = None,
    damping: Annotated[
        float | None,
        Option(help="Weight of the squared surplus of retrieval heads in the penalty."),
    ] = None,
    anneal: Annotated[
        float,
        Option(
            help="Fraction of the steps over which the wanted number of retrieval heads falls from "
            "all to --target."
        ),
    ] = 0.5,
    steps: Annotated[int, Option(help="Number of training steps.")] = 3000,
    batch: Annotated[
        int, Option(help="Samples per step, split equally over as many devices as possible.")
    ] = 1,
    rate: Annotated[float, Option(help="AdamW learning rate.")] = 0.01,
    keep: Annotated[
        float, Option(help="Fraction of the context that a sparse head inherits during training.")
    ] = 0.3,
    sets: Annotated[
        str,
        Option(
            help="Tokens of the sparse heads: handed_on (as in decoding, heads below one half pass "
            "on their set) or refreshed (all heads pick)."
        ),
    ] = "handed_on",
    match: Annotated[
        str, Option(help="Output to match with the dense model: logits or hidden.")
    ] = "logits",
    seeds: Annotated[
        int, Option(help="Number of trainings to run side by side, on the same samples.")
    ] = 1,
    held_out: Annotated[
        int, Option(help="Number of held-out batches to measure the result on.")
    ] = 16,
    text: Annotated[
        Path | None,
        Option(help="UTF-8 text file to hide pass keys in, instead of the built-in text."),
    ] = None,
    questions: Annotated[
        Path | None,
        Option(
            help='File to train on instead of pass keys, with lines of {"context": …, '
            '"question": …, "answer": …}.'
        ),
    ] = None,
    min_length: Annotated[
        int | None, Option(help="Shortest context of pass keys, in tokens; the default is 1024.")
    ] = None,
    max_length: Annotated[int, Option(help="Longest context, in tokens.")] = 7680,
    needles: Annotated[int | None, Option(help="Pass keys per context; the default is 10.")] = None,
    words: Annotated[int | None, Option(help="Words per pass key; the default is 32.")] = None,
    asked: Annotated[int | None, Option(help="Pass keys to recite; the default is 2.")] = None,
    seed: Annotated[int, Option(help="Random seed of the samples.")] = 0,
    save_every: Annotated[int, Option(help="Number of steps between checkpoints.")] = 200,
    resume: Annotated[
        bool, Option("--resume", help="Continue the unfinished run in the folder.")
    ] = False,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Train gates that find a model's retrieval heads, for lychee_decode and duo_attention.

    The model with gated heads is distilled from itself with dense attention.

    Example: jsparse train-gates --model smollm2 --out gates/ --steps 1000
    """
    from jsparse.models.checkpoint import load
    from jsparse.runtime.compilation import keep_compilations
    from jsparse.text.prompts import tokenizer_of
    from jsparse.train.families import one_in_eight
    from jsparse.train.trainer import Settings, Trainer

    bars = Bars()
    try:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
    finally:
        bars.close()
    tokenizer, config = tokenizer_of(params, "the training"), params.config
    of_keys = {"min_length": min_length, "needles": needles, "words": words, "asked": asked}
    source = _source(tokenizer, text, questions, {"max_length": max_length, "seed": seed}, of_keys)
    if source.buckets[-1] + source.target_tokens > config.max_position_embeddings:
        raise ValueError(
            f"max_length={max_length} and {source.target_tokens} tokens of answers: "
            f"must be at most {config.max_position_embeddings} together, the model's maximum"
        )
    given: Any = {
        "target": one_in_eight(config.num_layers, config.num_kv_heads)
        if target is None
        else target,
        "family": family,
        "penalty": penalty or ("fixed" if family == "direct" else "ascent"),
        "match": match,
        "sets": sets,
    }
    settings = Settings(
        **given,
        penalty_rate=penalty_rate,
        penalty_start=penalty_start,
        damping=damping,
        anneal=anneal,
        steps=steps,
        batch=batch,
        rate=rate,
        keep=keep,
        seeds=seeds,
        held_out=held_out,
    )
    keep_compilations()
    trainer = Trainer(params, source, settings, out, resume=resume)
    with _progress() as shown:
        task = shown.add_task(family, total=steps, told="")

        def report(done: int, total: int, line: dict[str, Any]) -> None:
            names = {"distance": "loss", "active": "E[L0]", "multiplier": "λ"}
            told = "  ".join(
                f"{short} {' '.join(f'{x:.3g}' for x in line[name])}"
                for name, short in names.items()
            )
            shown.update(task, completed=done, told=told)

        record = trainer.run(report, save_every=save_every)
    _draw(out)
    _show(record)
    best = min(range(seeds), key=lambda i: record["seeds"][i]["distance_of_hard_gates"])
    print(f"lychee_decode({str(out / f'gates_{best}.safetensors')!r})")


def _source(
    tokenizer: "Tokenizer",
    text: Path | None,
    file: Path | None,
    shared: dict[str, Any],
    of_keys: dict[str, int | None],
) -> "Source":
    """Returns the training samples that the options ask for."""
    from jsparse.evaluation.texts import read
    from jsparse.train.passkey import passkeys
    from jsparse.train.questions import questions

    given: dict[str, Any] = {name: value for name, value in of_keys.items() if value is not None}
    if file is None:
        return passkeys(tokenizer, read(text), **shared, **given)
    if text is not None:
        raise ValueError("--text is the filler of pass keys: must not be given with --questions")
    for name, value in given.items():
        raise ValueError(
            f"--{name.replace('_', '-')} {value}: is of pass keys, must not be given with "
            "--questions"
        )
    return questions(tokenizer, file, **shared)


def _progress() -> Progress:
    """Returns a bar with every seed's loss, expected number and multiplier.

    It is shown on standard error, if that is a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(
        *columns,
        TextColumn("{task.fields[told]}"),
        console=console,
        disable=not sys.stderr.isatty(),
    )


def _show(record: dict[str, Any]) -> None:
    """Prints a table of the results, by seed."""
    columns = {
        "active": "E[L0]",
        "retrieval_heads": "retrieval heads",
        "above_half": "E[s] > 0.5",
        "grey": "grey gates",
        "distance_of_mean_gates": "distance, mean gates",
        "distance_of_hard_gates": "distance, hard gates",
    }
    table = Table("seed", *map(escape, columns.values()))
    for i, row in enumerate(record["seeds"]):
        table.add_row(str(i), *(f"{row[name]:.4g}" for name in columns))
    Console().print(table)
    print(
        "With layer 0's retrieval heads alone the distance is "
        f"{record['distance_of_layer_0_alone']:.4g}. "
        f"{record['seconds']:.0f} s of training."
    )


def _draw(folder: Path) -> None:
    """Draws the plots of every seed, if matplotlib is installed."""
    from importlib.util import find_spec

    from jsparse.train.plots import densities, heat_map
    from jsparse.train.trainer import read_log

    if find_spec("matplotlib") is None:
        print(f"no plots, which need matplotlib: {install('eval')}", file=sys.stderr)
        return
    import numpy as np

    kept = [line for line in read_log(folder) if "mean" in line]
    steps, means = [line["step"] for line in kept], np.array([line["mean"] for line in kept])
    shapes = {
        name: np.array([line["parameters"][name] for line in kept])
        for name in kept[0]["parameters"]
    }
    for i in range(means.shape[1]):
        heat_map(folder / f"gates_{i}.png", steps, means[:, i])
        if shapes.keys() == {"a", "b"}:
            layers, heads = means.shape[2:]
            names = [
                f"layer {layer}, head {head}" for layer in range(1, layers) for head in range(heads)
            ]
            densities(
                folder / f"densities_{i}.png", steps, shapes["a"][:, i], shapes["b"][:, i], names
            )
