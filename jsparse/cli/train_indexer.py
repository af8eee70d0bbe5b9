"""The command `jsparse train-indexer`."""

from contextlib import closing
from dataclasses import fields

from rich.progress import TextColumn, TimeRemainingColumn

from jsparse.cli.console import Bars, progress_bar
from jsparse.cli.options import require_writable, takes_model, takes_options
from jsparse.cli.train_gates import source_of
from jsparse.cli.train_indexer_options import TrainIndexerOptions

LEGEND = """\
KL: of the gates' scores from the dense model's weights, per query, KV head and layer, in nats.
Overlap: the share of the best quarter of a query's blocks that the gates rank in their best
quarter; 25 % by chance. Both on held-out texts."""


@takes_model
@takes_options(TrainIndexerOptions)
def train_indexer(options: TrainIndexerOptions) -> None:
    """Train gates that find the blocks a model attends to, for seer_attention.

    The gates are distilled from the model's dense attention. Its weights do not change.

    Example: jsparse train-indexer --model smollm2 --out gates.safetensors
    """
    out = options.out
    require_writable("--out", out)
    from jsparse.models.checkpoint import load
    from jsparse.models.indexer import save_indexer
    from jsparse.runtime.compilation import keep_compilations
    from jsparse.text.prompts import tokenizer_of
    from jsparse.train import indexer
    from jsparse.train.data import require_room

    settings = indexer.Settings(
        **{field.name: getattr(options, field.name) for field in fields(indexer.Settings)}
    )
    with closing(Bars()) as bars:
        params = load(
            options.model,
            dtype=options.dtype,
            weights=options.weights,
            revision=options.revision,
            on_progress=bars.load,
        )
    min_length = options.max_length if options.questions is None else None
    source = source_of(tokenizer_of(params, "the training"), options, min_length)
    require_room(source, options.max_length, params.config.max_position_embeddings)
    keep_compilations()
    values = TextColumn("{task.fields[values]}")
    with progress_bar(TimeRemainingColumn(), values, transient=False) as shown:
        task = shown.add_task("gates", total=options.steps, values="")

        def report(done: int, total: int, loss: float) -> None:
            shown.update(task, completed=done, values=f"KL {loss:.3g}")

        made = indexer.train_indexer(params, source, settings, report)
    save_indexer(made, out)
    for name in ("untrained", "trained"):
        measured = made.record[name]
        print(f"{name}: KL {measured['loss']:.3f}, overlap {measured['overlap']:.0%}")
    print(f"{LEGEND}\n{made.record['seconds']:.0f} s of training.")
    lines = source.settings.get("questions")
    read = (options.steps + options.held_out) * options.batch
    if lines is not None and read > lines:
        print(f"Held-out texts are among those of training: {read} were read, of {lines}.")
    print(f"seer_attention({str(out)!r})")
