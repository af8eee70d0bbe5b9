"""`jsparse train-gates`, the command; also `python -m jsparse.train.run`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Option

from jsparse.cli.console import Bars
from jsparse.cli.options import DtypeOption, ModelOption, RevisionOption

if TYPE_CHECKING:
    from jsparse.models.tokenizer import Tokenizer
    from jsparse.train.data import Source


def train_gates(
    out: Annotated[
        Path, Option(help="Folder of the run: settings, log, checkpoints, gates, record, plots.")
    ],
    model: ModelOption = "smollm2",
    target: Annotated[
        int | None,
        Option(
            help="Retrieval heads wanted, layer 0's KV heads counted; the default is one in eight."
        ),
    ] = None,
    family: Annotated[str, Option(help="hard_kuma, hard_concrete or direct.")] = "hard_kuma",
    penalty: Annotated[
        str | None,
        Option(help="ascent, exponential or fixed; the default is ascent, for direct fixed."),
    ] = None,
    penalty_rate: Annotated[float | None, Option(help="The multiplier's rate.")] = None,
    penalty_start: Annotated[float | None, Option(help="What the multiplier starts from.")] = None,
    damping: Annotated[
        float | None, Option(help="Weight of the squared surplus of retrieval heads.")
    ] = None,
    anneal: Annotated[
        float,
        Option(
            help="Share of the steps over which the number wanted falls from all heads to --target."
        ),
    ] = 0.5,
    steps: Annotated[int, Option(help="Of the whole training.")] = 3000,
    batch: Annotated[
        int, Option(help="Samples a step; as many devices share them as divide them.")
    ] = 1,
    rate: Annotated[float, Option(help="AdamW's.")] = 0.01,
    keep: Annotated[
        float, Option(help="Share of the context that a sparse head inherits while training.")
    ] = 0.3,
    sets: Annotated[
        str,
        Option(
            help="handed_on: as in decoding, heads below one half pass on their set; refreshed: all heads pick."
        ),
    ] = "handed_on",
    match: Annotated[
        str, Option(help="What is compared with the dense model: logits or hidden.")
    ] = "logits",
    seeds: Annotated[int, Option(help="Trainings side by side, on the same samples.")] = 1,
    held_out: Annotated[int, Option(help="Batches that the result is measured on.")] = 16,
    text: Annotated[
        Path | None, Option(help="UTF-8 filler of the pass keys, instead of the one here.")
    ] = None,
    questions: Annotated[
        Path | None,
        Option(help='Instead of pass keys, lines of {"context": …, "question": …, "answer": …}.'),
    ] = None,
    min_length: Annotated[
        int | None, Option(help="Tokens of the shortest context of pass keys; the default is 1024.")
    ] = None,
    max_length: Annotated[int, Option(help="Tokens of the longest context.")] = 7680,
    needles: Annotated[
        int | None, Option(help="Pass keys in a context; the default is 10.")
    ] = None,
    words: Annotated[int | None, Option(help="Words of a pass key; the default is 32.")] = None,
    asked: Annotated[int | None, Option(help="Pass keys to be recited; the default is 2.")] = None,
    seed: Annotated[int, Option(help="Of the samples.")] = 0,
    save_every: Annotated[int, Option(help="Steps between checkpoints.")] = 200,
    resume: Annotated[
        bool, Option("--resume", help="Go on with what an unfinished run left in the folder.")
    ] = False,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Finds a model's retrieval heads, for the policies lychee_decode and duo_attention, by
    distillation from itself.

    Example: jsparse train-gates --model smollm2 --out gates/ --steps 1000
    """
    from jsparse.models.checkpoint import load
    from jsparse.prompts import tokenizer_of
    from jsparse.runtime.compilation import keep_compilations
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
    _show(record)
    _draw(out)
    best = min(range(seeds), key=lambda i: record["seeds"][i]["distance_of_hard_gates"])
    print(f"lychee_decode({str(out / f'gates_{best}.safetensors')!r})")


def _source(
    tokenizer: "Tokenizer",
    text: Path | None,
    file: Path | None,
    shared: dict[str, Any],
    of_keys: dict[str, int | None],
) -> "Source":
    """What the options ask to train on."""
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
    """A bar with loss, expected number and multiplier of every seed, on standard error if that is a
    terminal.
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
    """The table of what came out, by seed."""
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
    """The plots of every seed, as far as matplotlib is there."""
    from importlib.util import find_spec

    from jsparse.train.plots import densities, heat_map
    from jsparse.train.trainer import read_log

    if find_spec("matplotlib") is None:
        print("no plots: they need matplotlib, run `pip install 'jsparse[eval]'`", file=sys.stderr)
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


if __name__ == "__main__":
    from jsparse.cli.app import main

    sys.argv.insert(1, "train-gates")
    main()
