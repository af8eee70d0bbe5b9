"""Defines `jsparse bench serve`: measures a server that runs."""

import asyncio
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from jsparse.cli.console import Bars, print_wrote
from jsparse.cli.options import takes_model
from jsparse.machine.extras import install

if TYPE_CHECKING:
    from jsparse.benchmark.serve import RequestResult

RANDOM_PROMPTS = 100
SHOWN_ERRORS = 10
DELAYS = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "between pieces",
    "e2el": "whole answer",
    "client_queue_time": "waited to be sent",
}


@takes_model
def serve(
    base_url: Annotated[str, Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, Option(help="Model to ask for; the default is the first that the server lists.")
    ] = None,
    endpoint: Annotated[
        Literal["/v1/completions", "/v1/chat/completions"], Option(help="Path of the API.")
    ] = "/v1/completions",
    dataset_name: Annotated[
        Literal["random", "prefix_repetition", "custom"],
        Option(help="Prompts: random tokens, such with shared beginnings, or those of a file."),
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        Option(help='JSONL file for custom: {"prompt": …, "output_tokens": …} per line.'),
    ] = None,
    num_prompts: Annotated[
        int | None,
        Option(help=f"Number of requests; the default is {RANDOM_PROMPTS}, or all of a file."),
    ] = None,
    random_input_len: Annotated[int, Option(help="random: tokens per prompt.")] = 1024,
    random_output_len: Annotated[int, Option(help="random: tokens per answer.")] = 128,
    random_range_ratio: Annotated[
        float, Option(help="random: lengths vary by up to this share, from 0 to below 1.")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, Option(help="random: tokens with which all prompts begin, beside --random-input-len.")
    ] = 0,
    prefix_repetition_num_prefixes: Annotated[
        int, Option(help="prefix_repetition: number of different beginnings.")
    ] = 10,
    prefix_repetition_prefix_len: Annotated[
        int, Option(help="prefix_repetition: tokens per beginning.")
    ] = 256,
    prefix_repetition_suffix_len: Annotated[
        int, Option(help="prefix_repetition: tokens of a prompt behind its beginning.")
    ] = 256,
    prefix_repetition_output_len: Annotated[
        int, Option(help="prefix_repetition: tokens per answer.")
    ] = 128,
    custom_output_len: Annotated[
        int, Option(help="custom: tokens per answer where a line does not say.")
    ] = 256,
    tokenizer: Annotated[
        str | None,
        Option(help="Model whose tokenizer draws random prompts; the default is --model."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        Option(help="Draw token ids below this, without a tokenizer; for /v1/completions."),
    ] = None,
    request_rate: Annotated[
        float, Option(help="Requests per second, at random times; inf is all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        Option(help="1 is a Poisson process; below 1 requests come in bursts, above more evenly."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, Option(help="Most requests under way; the default is no limit.")
    ] = None,
    num_warmups: Annotated[
        int, Option(help="Requests that are sent before, and not measured.")
    ] = 0,
    ignore_eos: Annotated[
        bool | None,
        Option(help="Whether answers go on to their length; by default only of random prompts."),
    ] = None,
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; the default is the server's.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        Option(
            metavar="<name:ms>",
            help="Longest delay in ms, as ttft:500, tpot:50 or e2el:10000. Repeatable.",
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, Option(help="Percentiles of each delay, separated by commas.")
    ] = "90,99",
    api_key: Annotated[
        str | None, Option(envvar="JSPARSE_API_KEY", help="Key that the server asks for.")
    ] = None,
    timeout: Annotated[
        float, Option(help="Seconds without a byte from the server after which a request fails.")
    ] = 600.0,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    label: Annotated[str | None, Option(help="Name of the run in the saved result.")] = None,
    save_result: Annotated[
        bool, Option("--save-result", help="Write a JSON file with the keys of `vllm bench serve`.")
    ] = False,
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="Save what came of each request too.")
    ] = False,
    result_dir: Annotated[Path, Option(help="Folder of the saved result.")] = Path(),
    result_filename: Annotated[
        str | None, Option(help="Name of the saved result; the default says what was run.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Send requests to a server with OpenAI's API and report its rates and delays.

    Example: jsparse bench serve --random-input-len 4096 --request-rate 2 --goodput ttft:500
    """
    try:
        from jsparse.benchmark import questions as made
        from jsparse.benchmark.serve import ENDPOINTS, body_of, client, first_model, measure
    except ModuleNotFoundError as error:
        raise ValueError(
            f"jsparse bench serve needs the package {error.name}: {install('server')}"
        ) from None
    import numpy as np

    from jsparse.benchmark.latency import figures
    from jsparse.benchmark.workload import arrivals
    from jsparse.hyper_parameters import whole_number

    address, goals = _address(base_url), _goals(goodput or [])
    percentiles = _percentiles(metric_percentiles)
    for option, value in (("--num-prompts", num_prompts), ("--max-concurrency", max_concurrency)):
        if value is not None:
            whole_number(option, value, 1)
    whole_number("--num-warmups", num_warmups, 0)
    whole_number("--seed", seed, 0)
    _above_zero("--timeout", timeout)
    _above_zero("--request-rate", request_rate)
    _above_zero("--burstiness", burstiness)
    if math.isinf(burstiness):
        raise ValueError(f"--burstiness {burstiness!r}: must be finite")
    if (dataset_path is not None) != (dataset_name == "custom"):
        raise ValueError("--dataset-path and --dataset-name custom belong together: give both")
    as_text = endpoint != ENDPOINTS[0]
    if vocab_size is not None and (as_text or tokenizer is not None):
        raise ValueError("--vocab-size goes with /v1/completions and without --tokenizer")

    # prompts and times are drawn apart, so that neither depends on the other's options
    of_prompts, of_times = (np.random.default_rng([seed, nth]) for nth in range(2))
    count = num_prompts or RANDOM_PROMPTS
    draw = functools.partial(
        made.random_questions,
        of_prompts,
        count=count,
        input_len=random_input_len,
        output_len=random_output_len,
        range_ratio=random_range_ratio,
        prefix_len=random_prefix_len,
    )
    if dataset_name == "prefix_repetition":
        draw = functools.partial(
            made.prefix_questions,
            of_prompts,
            count=count,
            num_prefixes=prefix_repetition_num_prefixes,
            prefix_len=prefix_repetition_prefix_len,
            suffix_len=prefix_repetition_suffix_len,
            output_len=prefix_repetition_output_len,
        )
    to_the_end = dataset_path is None if ignore_eos is None else ignore_eos
    options = {} if temperature is None else {"temperature": temperature}
    bars = Bars()

    async def run() -> "tuple[str, list[RequestResult]]":
        async with client(address, api_key=api_key, timeout=timeout) as server:
            name = model or await first_model(server)
            if dataset_path is not None:
                asked = made.questions_of(dataset_path, num_prompts, custom_output_len)
            elif vocab_size is not None:
                asked = draw(made.words_below(vocab_size))
            else:
                asked = made.drawn_with(made.tokenizer_of(tokenizer or name), draw, as_text)
            answers = await measure(
                server,
                endpoint,
                [
                    body_of(each, endpoint, name, ignore_eos=to_the_end, options=options)
                    for each in asked
                ],
                arrivals(of_times, len(asked), request_rate, burstiness),
                num_warmups=num_warmups,
                max_concurrency=max_concurrency,
                on_progress=functools.partial(bars.generate, "answers"),
            )
            return name, answers

    try:
        name, answers = asyncio.run(run())
    finally:
        bars.close()
    backend = "openai-chat" if as_text else "openai"
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": label,
        "model_id": name,
        "tokenizer_id": None if dataset_path or vocab_size is not None else tokenizer or name,
        "num_prompts": len(answers),
        "request_rate": "inf" if math.isinf(request_rate) else request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
    }
    queued = max_concurrency is not None
    result |= figures(answers, percentiles=percentiles, goodput=goals, queued=queued)
    if not save_detailed:
        result = _without_details(result)
    if save_result or save_detailed or result_filename is not None:
        result_dir.mkdir(parents=True, exist_ok=True)
        file = result_dir / (result_filename or _file_name(result))
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")
        print_wrote(file)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result, percentiles)
    _print_failures(answers)
    if not result["completed"]:
        raise typer.Exit(1)


def _without_details(result: dict[str, Any]) -> dict[str, Any]:
    from jsparse.benchmark.latency import DETAILS

    return {name: value for name, value in result.items() if name not in DETAILS}


def _file_name(result: dict[str, Any]) -> str:
    """Returns the name that `vllm bench serve` would give a result's file."""
    limit = result["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = result["model_id"].rstrip("/").split("/")[-1]
    label = result["label"] or result["backend"]
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"


def _above_zero(option: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{option} {value!r}: must be a number above 0")


def _print(result: dict[str, Any], percentiles: Sequence[float]) -> None:
    console = Console(highlight=False)
    counts = Table(title=result["model_id"], title_justify="left", show_header=False, box=None)
    for label, name in {
        "requests completed": "completed",
        "requests failed": "failed",
        "seconds": "duration",
        "prompt tokens": "total_input_tokens",
        "generated tokens": "total_output_tokens",
        "requests per second": "request_throughput",
        "of these within the goals": "request_goodput",
        "generated tokens per second": "output_throughput",
        "the busiest second": "max_output_tokens_per_s",
        "all tokens per second": "total_token_throughput",
        "most requests at once": "max_concurrent_requests",
    }.items():
        if name != "request_goodput" or result[name] is not None:
            style = "bold red" if name == "failed" and result[name] else None
            counts.add_row(label, _number(result[name]), style=style)
    console.print(counts)
    figures = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    delays = Table("milliseconds", *figures, box=None, pad_edge=False)
    for name, label in DELAYS.items():
        if f"mean_{name}_ms" in result:
            values = [_number(result[f"{figure}_{name}_ms"]) for figure in figures]
            delays.add_row(label if "_" in name else f"{name.upper()}, {label}", *values)
    console.print()
    console.print(delays)


def _print_failures(answers: "Sequence[RequestResult]") -> None:
    errors = Counter(answer.error for answer in answers if answer.error)
    console = Console(stderr=True, highlight=False)
    for error, count in errors.most_common(SHOWN_ERRORS):
        console.print(f"{count} of {len(answers)} failed: {error}", style="red", markup=False)
    if len(errors) > SHOWN_ERRORS:
        console.print(f"and {len(errors) - SHOWN_ERRORS} other errors", style="red")


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _address(given: str) -> str:
    """Returns the server's address without the /v1 that OpenAI's clients put at its end."""
    if not given.startswith(("http://", "https://")):
        raise ValueError(f"--base-url {given!r}: must begin with http:// or https://")
    return given.rstrip("/").removesuffix("/v1")


def _goals(given: Sequence[str]) -> dict[str, float]:
    from jsparse.benchmark.latency import GOALS

    goals = {}
    for pair in (part for each in given for part in each.split()):
        name, _, value = pair.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not 0 <= goals[name] < math.inf:
            raise ValueError(
                f"--goodput {pair!r}: must be one of {', '.join(GOALS)}, a colon, and milliseconds"
            )
    return goals


def _percentiles(given: str) -> list[float]:
    try:
        values = [float(part) for part in given.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles {given!r}: must be numbers from 0 to 100")
    return values
