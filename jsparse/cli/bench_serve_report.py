"""Saves and prints the results of `jsparse bench serve`."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jsparse.cli.console import print_wrote

if TYPE_CHECKING:
    from jsparse.benchmark.serve import RequestResult

SHOWN_ERRORS = 10
DELAYS = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "between pieces",
    "e2el": "whole answer",
    "client_queue_time": "waited to be sent",
}


def save_result(result: dict[str, Any], folder: Path, name: str | None) -> None:
    """Writes a result to a file in a folder; the default name describes the run."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (name or _file_name(result))
    file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print_wrote(file)


def without_details(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result without the entries that hold a value per request."""
    from jsparse.benchmark.latency import DETAILS

    return {name: value for name, value in result.items() if name not in DETAILS}


def _file_name(result: dict[str, Any]) -> str:
    """Returns the name that `vllm bench serve` would give a result's file."""
    limit = result["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = result["model_id"].rstrip("/").split("/")[-1]
    label = result["label"] or result["backend"]
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"


def print_result(result: dict[str, Any], percentiles: Sequence[float]) -> None:
    """Prints the tables of counts, rates and delays."""
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


def print_failures(answers: "Sequence[RequestResult]") -> None:
    """Prints the most frequent errors on standard error."""
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
