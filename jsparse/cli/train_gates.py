"""The command `jsparse train-gates`."""

import dataclasses
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from jsparse.cli.console import Bars, progress_bar
from jsparse.cli.options import takes_model, takes_options
from jsparse.cli.train_gates_options import TrainGatesOptions
from jsparse.machine.extras import install

if TYPE_CHECKING:
    from jsparse.cli.train_indexer_options import TrainIndexerOptions
    from jsparse.models.config import ModelConfig
    from jsparse.models.tokenizer import Tokenizer
    from jsparse.train.data import Source
    from jsparse.train.settings import Settings


LEGEND = """\
E[L0]: expected number of retrieval heads, layer 0's included; training moves it to the target.
E[s] > 0.5: heads whose gate is above one half. Grey gates: the share that is still undecided,
between 0.1 and 0.9; 0 is best.
Distance: of the outputs from the dense model's on held-out contexts, as a share of their variance;
0 is the dense model. With mean gates each head mixes its two roles, as in training; with hard gates
the best heads are retrieval heads and the others sparse, as in decoding."""
# fraction of the distance with only layer 0's retrieval heads: SmolLM2's gates, after 1000 steps of
# hard_kuma, have 0.21 of it
TOO_FAR = 0.5


@takes_model
@takes_options(TrainGatesOptions)
def train_gates(options: TrainGatesOptions) -> None:
    """Train gates that find a model's retrieval heads, for lychee_decode and duo_attention.

    The model with gated heads is distilled from itself with dense attention.

    Example: jsparse train-gates --model smollm2 --out gates/ --steps 1000
    """
    from jsparse.models.checkpoint import load
    from jsparse.runtime.compilation import keep_compilations
    from jsparse.text.prompts import tokenizer_of
    from jsparse.train.data import require_room
    from jsparse.train.trainer import Trainer

    out = options.out
    with closing(Bars()) as bars:
        params = load(
            options.model,
            dtype=options.dtype,
            weights="plain",
            revision=options.revision,
            on_progress=bars.load,
        )
    tokenizer, config = tokenizer_of(params, "the training"), params.config
    source = source_of(tokenizer, options)
    require_room(source, options.max_length, config.max_position_embeddings)
    settings = _settings(options, config)
    keep_compilations()
    trainer = Trainer(params, source, settings, out, resume=options.resume)
    values = TextColumn("{task.fields[values]}")
    with progress_bar(TimeRemainingColumn(), values, transient=False) as shown:
        task = shown.add_task(options.family, total=options.steps, values="")

        def report(done: int, total: int, line: dict[str, Any]) -> None:
            names = {"distance": "loss", "active": "E[L0]", "multiplier": "λ"}
            values = "  ".join(
                f"{short} {' '.join(f'{x:.3g}' for x in line[name])}"
                for name, short in names.items()
            )
            shown.update(task, completed=done, values=values)

        record = trainer.run(report, save_every=options.save_every)
    _draw(out)
    _show(record)
    seeds = range(options.seeds)
    best = min(seeds, key=lambda i: record["seeds"][i]["distance_of_hard_gates"])
    policy = "duo_attention" if options.sets == "streaming" else "lychee_decode"
    print(f"{policy}({str(out / f'gates_{best}.safetensors')!r})")


def _settings(options: TrainGatesOptions, config: "ModelConfig") -> "Settings":
    """Returns the settings; two of the defaults depend on the model and the family."""
    from jsparse.train.families import one_in_eight
    from jsparse.train.settings import Settings

    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    if options.target is None:
        given["target"] = one_in_eight(config.num_layers, config.num_kv_heads)
    if options.penalty is None:
        given["penalty"] = "fixed" if options.family == "direct" else "ascent"
    return Settings(**given)


def source_of(
    tokenizer: "Tokenizer",
    options: "TrainGatesOptions | TrainIndexerOptions",
    min_length: int | None = None,
) -> "Source":
    """Returns the training samples that the options specify.

    `min_length` is the default of the option of this name; None: that of pass keys.
    """
    from jsparse.evaluation.texts import read
    from jsparse.train.passkey import passkeys
    from jsparse.train.questions import questions

    shared: dict[str, Any] = {"max_length": options.max_length, "seed": options.seed}
    names = ("min_length", "needles", "words", "asked")
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    if values["min_length"] is None:
        values["min_length"] = min_length
    given = {name: value for name, value in values.items() if value is not None}
    if options.questions is None:
        return passkeys(tokenizer, read(options.text), **shared, **given)
    if options.text is not None:
        raise ValueError("--text is the filler of pass keys: must not be given with --questions")
    for name, value in given.items():
        raise ValueError(
            f"--{name.replace('_', '-')} {value}: is of pass keys, must not be given with "
            "--questions"
        )
    return questions(tokenizer, options.questions, **shared)


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
    print(LEGEND)
    print(
        "With layer 0's retrieval heads alone the distance is "
        f"{record['distance_of_layer_0_alone']:.4g}. "
        f"{record['seconds']:.0f} s of training."
    )
    alone = record["distance_of_layer_0_alone"]
    least = min(row["distance_of_hard_gates"] for row in record["seeds"])
    if least > TOO_FAR * alone:
        print(
            f"These gates find little: at {least:.4g} they leave more than half of that distance. "
            "Train with more --steps or a higher --target."
        )


def _draw(folder: Path) -> None:
    """Draws the plots of every seed, if matplotlib is installed."""
    from importlib.util import find_spec

    from jsparse.train.plots import densities, heat_map
    from jsparse.train.run_folder import read_log

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
