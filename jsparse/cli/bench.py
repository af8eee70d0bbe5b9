"""The commands `jsparse bench …`."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from jsparse.cli.options import (
    Command,
    CommandGroup,
    JsonOption,
    LoadingOptions,
    ModelOption,
    PolicyListOption,
    PolicyOption,
    PrefillOption,
    takes_model,
    takes_options,
    whole_numbers,
)
from jsparse.text.short_names import short_name

bench = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False)
LENGTH = "a number, or MIN:MAX to draw from log-uniformly"


@bench.callback()
def _only_a_group() -> None:
    """Measure decode steps or the engine."""


@bench.command(cls=Command)
@takes_model
@takes_options(LoadingOptions, "loading")
def throughput(
    loading: LoadingOptions,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "dense",
    prefill: PrefillOption = "dense",
    num_prompts: Annotated[int, Option(help="Number of requests.")] = 32,
    input_len: Annotated[str, Option(help=f"Tokens per prompt: {LENGTH}.")] = "512",
    output_len: Annotated[str, Option(help=f"Tokens per output: {LENGTH}.")] = "64",
    shared_prefix: Annotated[
        int, Option(help="Tokens of a prefix that all prompts share, in addition to --input-len.")
    ] = 0,
    request_rate: Annotated[
        float | None,
        Option(help="Requests per second, at random times; the default is all at once."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        Option(help="Maximum decode batch size; the default is 64 on a GPU, else 8."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        Option(help="Maximum tokens of prompt and output; the default fits the longest request."),
    ] = None,
    prefix_caching: Annotated[
        bool, Option(help="Whether requests reuse the KV cache of shared prefixes.")
    ] = True,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Serve random prompts and report throughput and latency.

    Example: jsparse bench throughput smollm2 --policy "quest(budget=256)" --input-len 512:2048
    """
    from jsparse.benchmark.throughput import measure
    from jsparse.benchmark.workload import random_workload
    from jsparse.engine.core import Engine
    from jsparse.engine.options import EngineOptions
    from jsparse.policies.own_code import resolve
    from jsparse.policies.sparse_prefill import with_prefill

    inputs, outputs = _length("--input-len", input_len), _length("--output-len", output_len)
    chosen = with_prefill(resolve(policy), prefill)
    params = loading.load(model)
    workload = random_workload(
        params.config.vocab_size,
        num_prompts=num_prompts,
        input_len=inputs,
        output_len=outputs,
        shared_prefix=shared_prefix,
        request_rate=request_rate,
        seed=seed,
    )
    longest = max(len(each.ids) + each.tokens for each in workload)
    options = EngineOptions(
        max_num_seqs=max_num_seqs,
        max_model_len=longest if max_model_len is None else max_model_len,
        enable_prefix_caching=prefix_caching,
    )
    engine = Engine(params, chosen, options)
    engine.prepare(["sampled"])
    measured = {"model": model, "policy": engine.policy.name} | measure(engine, workload)
    if as_json:
        print(json.dumps(measured))
        return
    table = Table(title=model, title_justify="left", show_header=False, box=None)
    for name, value in (measured | {"policy": short_name(engine.policy)}).items():
        table.add_row(name.replace("_", " "), _shown(value))
    Console(highlight=False).print(table)


@bench.command(cls=Command)
@takes_model
@takes_options(LoadingOptions, "loading")
def latency(
    loading: LoadingOptions,
    model: ModelOption = "smollm2",
    policy: PolicyListOption = None,
    context: Annotated[
        str, Option(help="Comma-separated numbers of tokens in the cache of each row.")
    ] = "4096",
    batch: Annotated[str, Option(help="Comma-separated batch sizes.")] = "1",
    num_iters: Annotated[
        int, Option(help="Iterations to time, each of 104 steps on a GPU and 4 elsewhere.")
    ] = 5,
    num_iters_warmup: Annotated[int, Option(help="Warm-up iterations, not timed.")] = 1,
    bandwidth: Annotated[
        float | None,
        Option(help="Memory bandwidth for the floor, in GB/s; the default measures it."),
    ] = None,
    random_weights: Annotated[
        bool, Option("--random-weights", help="Read only the config, and use random weights.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time a decode step, compared with dense attention and with a memory-bandwidth bound.

    The cache is full of random K and V, so there is no prefill.

    Example: jsparse bench latency smollm2 --policy "quest(budget=256)" --context 1024,4096
    """
    import jax

    from jsparse import __version__
    from jsparse.benchmark.steps import measure, shaped
    from jsparse.policies.own_code import resolve

    chosen = [resolve(text) for text in policy or []]
    contexts, batches = whole_numbers("context", context), whole_numbers("batch", batch)
    params = shaped(model, **vars(loading)) if random_weights else loading.load(model)
    with Console(stderr=True).status("decode steps"):
        measured = measure(
            params,
            chosen,
            contexts=contexts,
            batches=batches,
            num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
            bandwidth=None if bandwidth is None else 1e9 * bandwidth,
        )
    about = {
        "model": model,
        "random_weights": random_weights,
        "tensor_parallel_size": loading.tensor_parallel_size,
        "dtype": params.types,
        "device": jax.local_devices()[0].device_kind,
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }
    if as_json:
        print(json.dumps(about | measured))
        return
    _print_steps(about | measured)


def _print_steps(measured: dict[str, Any]) -> None:
    """Prints the result of jsparse.benchmark.steps.measure."""
    title = "{model}, {dtype}, {device}".format(**measured)
    right: Any = {"justify": "right", "no_wrap": True}
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold", min_width=12)
    for name in ("batch", "context", "ms per step", "range", "over dense", "attended", "floor ms"):
        table.add_column(name, **right)
    table.add_column("over floor", **right)
    for row in measured["results"]:
        ms = row["ms"]
        table.add_row(
            short_name(row["policy_that_runs"]),
            f"{row['batch']}",
            f"{row['context']}",
            f"{ms['median']:.3g}",
            f"{ms['min']:.3g}-{ms['max']:.3g}",
            f"{row['over_dense']:.2f}x",
            f"{row['attended']:.1%}",
            f"{row['floor_ms']:.3g}",
            f"{row['over_floor']:.2f}x",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    source = "measured" if measured["bandwidth_measured"] else "as given"
    console.print(
        f"ms per step: median, minimum and maximum of {measured['num_iters']} iterations of "
        f"{measured['steps_per_iteration']} steps. Floor: weights, and K and V attended to, at "
        f"{measured['bandwidth'] / 1e9:.4g} GB/s, {source}.",
        soft_wrap=True,
    )
    ran = {
        f"{short_name(row['policy_that_runs'])}: "
        + ", ".join(f"{op} ({_backends(names)})" for op, names in row["kernels"].items()): None
        for row in measured["results"]
    }
    console.print("Kernels:", *ran, sep="\n  ", soft_wrap=True)


def _backends(names: Sequence[str]) -> str:
    return "/".join("plain JAX" if name == "reference" else name for name in names)


def _length(option: str, given: str) -> int | tuple[int, int]:
    """Returns a length, or a pair of lengths."""
    try:
        numbers = [int(part) for part in given.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"{option} {given!r}: must be {LENGTH}")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value}"
