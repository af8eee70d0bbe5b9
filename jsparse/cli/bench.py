"""Defines the commands `jsparse bench …`."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from jsparse.cli.bench_serve import serve
from jsparse.cli.options import MODEL_HELP, DtypeOption, RevisionOption

bench = typer.Typer(no_args_is_help=True, add_completion=False)
LENGTH = "a number, or LEAST:MOST to draw from log-uniformly"


@bench.callback()
def _only_a_group() -> None:
    """Measure the engine, or a server."""


bench.command()(serve)


@bench.command()
def throughput(
    model: Annotated[str, Argument(help=MODEL_HELP)],
    policy: Annotated[
        str, Option(help="Policy that chooses the tokens each step reads (see `jsparse policies`).")
    ] = "dense",
    num_prompts: Annotated[int, Option(help="Number of requests.")] = 32,
    input_len: Annotated[str, Option(help=f"Tokens per prompt: {LENGTH}.")] = "512",
    output_len: Annotated[str, Option(help=f"Tokens per answer: {LENGTH}.")] = "64",
    shared_prefix: Annotated[
        int, Option(help="Tokens with which all prompts begin, beside --input-len.")
    ] = 0,
    request_rate: Annotated[
        float | None,
        Option(help="Requests per second, at random times; the default is all at once."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        Option(help="Most requests that decode together; the default is 64 on a GPU, else 8."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        Option(help="Most tokens of prompt and answer; the default fits the longest request."),
    ] = None,
    prefix_caching: Annotated[
        bool, Option(help="Whether requests share what others have read of the same prompt.")
    ] = True,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Serve random prompts and report tokens per second and delays.

    Example: jsparse bench throughput smollm2 --policy "quest(budget=256)" --input-len 512:2048
    """
    from jsparse.benchmark.throughput import measure
    from jsparse.benchmark.workload import random_workload
    from jsparse.engine.core import Engine
    from jsparse.models.checkpoint import load
    from jsparse.policies.own_code import resolve

    inputs, outputs = _length("--input-len", input_len), _length("--output-len", output_len)
    chosen = resolve(policy)
    params = load(model, dtype=dtype, revision=revision)
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
    engine = Engine(
        params,
        chosen,
        max_num_seqs=max_num_seqs,
        max_model_len=longest if max_model_len is None else max_model_len,
        enable_prefix_caching=prefix_caching,
        prepare=True,
    )
    measured = {"model": model, "policy": engine.policy.name} | measure(engine, workload)
    if as_json:
        print(json.dumps(measured))
        return
    table = Table(title=model, title_justify="left", show_header=False, box=None)
    for name, value in measured.items():
        table.add_row(name.replace("_", " "), _shown(value))
    Console(highlight=False).print(table)


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
