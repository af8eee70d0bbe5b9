"""Declares the options of `jsparse bench serve`, and reads and checks their values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

RANDOM_PROMPTS = 100


@dataclass(frozen=True)
class BenchServeOptions:
    """Holds the server to measure, the requests to send and how to report them."""

    base_url: Annotated[str, Option(help="Address of the server.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, Option(help="Model to ask for; the default is the first that the server lists.")
    ] = None
    endpoint: Annotated[
        Literal["/v1/completions", "/v1/chat/completions"], Option(help="Path of the API.")
    ] = "/v1/completions"
    dataset_name: Annotated[
        Literal["random", "prefix_repetition", "custom"],
        Option(help="Prompts: random tokens, such with shared beginnings, or those of a file."),
    ] = "random"
    dataset_path: Annotated[
        Path | None,
        Option(help='JSONL file for custom: {"prompt": …, "output_tokens": …} per line.'),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option(help=f"Number of requests; the default is {RANDOM_PROMPTS}, or all of a file."),
    ] = None
    random_input_len: Annotated[int, Option(help="random: tokens per prompt.")] = 1024
    random_output_len: Annotated[int, Option(help="random: tokens per answer.")] = 128
    random_range_ratio: Annotated[
        float, Option(help="random: lengths vary by up to this share, from 0 to below 1.")
    ] = 0.0
    random_prefix_len: Annotated[
        int, Option(help="random: tokens with which all prompts begin, beside --random-input-len.")
    ] = 0
    prefix_repetition_num_prefixes: Annotated[
        int, Option(help="prefix_repetition: number of different beginnings.")
    ] = 10
    prefix_repetition_prefix_len: Annotated[
        int, Option(help="prefix_repetition: tokens per beginning.")
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        int, Option(help="prefix_repetition: tokens of a prompt behind its beginning.")
    ] = 256
    prefix_repetition_output_len: Annotated[
        int, Option(help="prefix_repetition: tokens per answer.")
    ] = 128
    custom_output_len: Annotated[
        int, Option(help="custom: tokens per answer where a line does not say.")
    ] = 256
    tokenizer: Annotated[
        str | None,
        Option(help="Model whose tokenizer draws random prompts; the default is --model."),
    ] = None
    vocab_size: Annotated[
        int | None,
        Option(help="Draw token ids below this, without a tokenizer; for /v1/completions."),
    ] = None
    request_rate: Annotated[
        float, Option(help="Requests per second, at random times; inf is all at once.")
    ] = math.inf
    burstiness: Annotated[
        float,
        Option(help="1 is a Poisson process; below 1 requests come in bursts, above more evenly."),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, Option(help="Most requests under way; the default is no limit.")
    ] = None
    num_warmups: Annotated[int, Option(help="Requests that are sent before, and not measured.")] = 0
    ignore_eos: Annotated[
        bool | None,
        Option(help="Whether answers go on to their length; by default only of random prompts."),
    ] = None
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; the default is the server's.")
    ] = None
    goodput: Annotated[
        list[str] | None,
        Option(
            metavar="<name:ms>",
            help="Longest delay in ms, as ttft:500, tpot:50 or e2el:10000. Repeatable.",
        ),
    ] = None
    metric_percentiles: Annotated[
        str, Option(help="Percentiles of each delay, separated by commas.")
    ] = "90,99"
    api_key: Annotated[
        str | None, Option(envvar="JSPARSE_API_KEY", help="Key that the server asks for.")
    ] = None
    timeout: Annotated[
        float, Option(help="Seconds without a byte from the server after which a request fails.")
    ] = 600.0
    seed: Annotated[int, Option(help="Random seed.")] = 0
    label: Annotated[str | None, Option(help="Name of the run in the saved result.")] = None
    save_result: Annotated[
        bool, Option("--save-result", help="Write a JSON file with the keys of `vllm bench serve`.")
    ] = False
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="Save what came of each request too.")
    ] = False
    result_dir: Annotated[Path, Option(help="Folder of the saved result.")] = Path()
    result_filename: Annotated[
        str | None, Option(help="Name of the saved result; the default says what was run.")
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of a table.")] = (
        False
    )

    @property
    def as_text(self) -> bool:
        """Returns whether prompts are sent as text, not as token ids."""
        from jsparse.benchmark.serve import ENDPOINTS

        return self.endpoint != ENDPOINTS[0]

    def check(self) -> None:
        """Raises ValueError if a number is out of range, or options contradict each other."""
        from jsparse.hyper_parameters import whole_number

        counts = (("--num-prompts", self.num_prompts), ("--max-concurrency", self.max_concurrency))
        for option, value in counts:
            if value is not None:
                whole_number(option, value, 1)
        whole_number("--num-warmups", self.num_warmups, 0)
        whole_number("--seed", self.seed, 0)
        require_positive("--timeout", self.timeout)
        require_positive("--request-rate", self.request_rate)
        require_positive("--burstiness", self.burstiness)
        if math.isinf(self.burstiness):
            raise ValueError(f"--burstiness {self.burstiness!r}: must be finite")
        if (self.dataset_path is not None) != (self.dataset_name == "custom"):
            raise ValueError("--dataset-path and --dataset-name custom belong together: give both")
        if self.vocab_size is not None and (self.as_text or self.tokenizer is not None):
            raise ValueError("--vocab-size goes with /v1/completions and without --tokenizer")


def address_of(given: str) -> str:
    """Returns the server's address without the /v1 that OpenAI's clients put at its end."""
    if not given.startswith(("http://", "https://")):
        raise ValueError(f"--base-url {given!r}: must begin with http:// or https://")
    return given.rstrip("/").removesuffix("/v1")


def goals_of(given: Sequence[str]) -> dict[str, float]:
    """Returns the longest delay of each name, in milliseconds."""
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


def percentiles_of(given: str) -> list[float]:
    """Returns the percentiles to report."""
    try:
        values = [float(part) for part in given.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles {given!r}: must be numbers from 0 to 100")
    return values


def require_positive(option: str, value: float) -> None:
    """Raises ValueError if the value of an option is not above 0."""
    if not value > 0:
        raise ValueError(f"{option} {value!r}: must be a number above 0")
