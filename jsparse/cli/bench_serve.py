"""Defines `jsparse bench serve`: measures a server that runs."""

import asyncio
import functools
import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from jsparse.cli import bench_serve_report as report
from jsparse.cli.bench_serve_options import (
    RANDOM_PROMPTS,
    BenchServeOptions,
    address_of,
    goals_of,
    percentiles_of,
)
from jsparse.cli.console import Bars
from jsparse.cli.options import takes_model, takes_options
from jsparse.machine.extras import install

if TYPE_CHECKING:
    import numpy as np

    from jsparse.benchmark.serve import BenchRequest, RequestResult


@takes_model
@takes_options(BenchServeOptions)
def serve(options: BenchServeOptions) -> None:
    """Send requests to a server with OpenAI's API and report its rates and delays.

    Example: jsparse bench serve --random-input-len 4096 --request-rate 2 --goodput ttft:500
    """
    _require_packages()
    from jsparse.benchmark.latency import figures

    address, goals = address_of(options.base_url), goals_of(options.goodput or [])
    percentiles = percentiles_of(options.metric_percentiles)
    options.check()
    bars = Bars()
    try:
        name, answers = asyncio.run(_measure(options, address, bars))
    finally:
        bars.close()
    queued = options.max_concurrency is not None
    result = _description(options, name, len(answers))
    result |= figures(answers, percentiles=percentiles, goodput=goals, queued=queued)
    if not options.save_detailed:
        result = report.without_details(result)
    if options.save_result or options.save_detailed or options.result_filename is not None:
        report.save_result(result, options.result_dir, options.result_filename)
    if options.as_json:
        print(json.dumps(result))
    else:
        report.print_result(result, percentiles)
    report.print_failures(answers)
    if not result["completed"]:
        raise typer.Exit(1)


def _require_packages() -> None:
    """Raises ValueError if a package of the client is not installed."""
    try:
        import jsparse.benchmark.questions
        import jsparse.benchmark.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"jsparse bench serve needs the package {error.name}: {install('server')}"
        ) from None


async def _measure(
    options: BenchServeOptions, address: str, bars: Bars
) -> "tuple[str, list[RequestResult]]":
    """Sends all requests to the server; returns the model's name and the results."""
    import numpy as np

    from jsparse.benchmark.serve import body_of, client, first_model, measure
    from jsparse.benchmark.workload import arrivals

    # prompts and times are drawn apart, so that neither depends on the other's options
    prompt_rng, time_rng = (np.random.default_rng([options.seed, nth]) for nth in range(2))
    to_the_end = options.dataset_path is None if options.ignore_eos is None else options.ignore_eos
    fields = {} if options.temperature is None else {"temperature": options.temperature}
    async with client(address, api_key=options.api_key, timeout=options.timeout) as server:
        name = options.model or await first_model(server)
        requests = _requests(options, name, prompt_rng)
        answers = await measure(
            server,
            options.endpoint,
            [
                body_of(each, options.endpoint, name, ignore_eos=to_the_end, options=fields)
                for each in requests
            ],
            arrivals(time_rng, len(requests), options.request_rate, options.burstiness),
            num_warmups=options.num_warmups,
            max_concurrency=options.max_concurrency,
            on_progress=functools.partial(bars.generate, "answers"),
        )
        return name, answers


def _requests(
    options: BenchServeOptions, model: str, rng: "np.random.Generator"
) -> "list[BenchRequest]":
    """Returns the requests of a file, or random ones."""
    from jsparse.benchmark import questions

    if options.dataset_path is not None:
        return questions.questions_of(
            options.dataset_path, options.num_prompts, options.custom_output_len
        )
    draw = _random_requests(options, rng)
    if options.vocab_size is not None:
        return draw(questions.words_below(options.vocab_size))
    tokenizer = questions.tokenizer_of(options.tokenizer or model)
    return questions.drawn_with(tokenizer, draw, options.as_text)


def _random_requests(
    options: BenchServeOptions, rng: "np.random.Generator"
) -> "Callable[..., list[BenchRequest]]":
    """Returns the function that draws requests from the words of a tokenizer."""
    from jsparse.benchmark import questions

    count = options.num_prompts or RANDOM_PROMPTS
    if options.dataset_name == "prefix_repetition":
        return functools.partial(
            questions.prefix_questions,
            rng,
            count=count,
            num_prefixes=options.prefix_repetition_num_prefixes,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            output_len=options.prefix_repetition_output_len,
        )
    return functools.partial(
        questions.random_questions,
        rng,
        count=count,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )


def _description(options: BenchServeOptions, model: str, num_prompts: int) -> dict[str, Any]:
    """Returns the entries of a result that describe the run."""
    backend = "openai-chat" if options.as_text else "openai"
    no_tokenizer = options.dataset_path or options.vocab_size is not None
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": None if no_tokenizer else options.tokenizer or model,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
