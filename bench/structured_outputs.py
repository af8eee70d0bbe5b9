"""How much slower does the engine decode rows that follow a JSON schema?

Llama 3.1 8B's shape, random bf16 weights, random prompts of 512 tokens, 64 rows, dense attention.
Milliseconds per token of all rows while all decode, of programs of up to 8 steps:

    greedy      rows without options
    sampled     temperature 1
    one         one row follows the schema, the others are sampled
    all         all rows follow it

The tokens are SmolLM2's, 49,152 of the 128,256. The schema is an array that is longer than the
output. `masks` is the time to find the tokens that may follow, in microseconds per row.

    python -m bench.structured_outputs --json build/structured_outputs.json
"""

import dataclasses
import itertools
import statistics
import time
from typing import Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report

ROWS, PROMPT, NEW, RUNS = 64, 512, 320, 3
SETTLED = 32  # tokens before the timing
SCHEMA = {
    "type": "array",
    "minItems": NEW,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["a", "b", "c"]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}


def timed(engine: Any, limited: int, **options: Any) -> float:
    """Returns the seconds per token; the first `limited` rows follow the schema."""
    from jsparse import SamplingParams
    from jsparse.runtime.request import requests

    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 49_000, size=(ROWS, PROMPT)).tolist()
    own = [
        SamplingParams(
            max_tokens=NEW,
            ignore_eos=True,
            seed=row,
            structured_outputs={"json": SCHEMA} if row < limited else None,
            **options,
        )
        for row in range(ROWS)
    ]
    states = [engine.add(each) for each in requests(engine.params, prompts, own, engine.policy)]

    def made() -> list[int]:
        return [len(state.metrics.token_times) for state in states]

    while min(made()) < SETTLED:
        engine.step()
    began, before = time.perf_counter(), made()
    while max(made()) < NEW:
        engine.step()
    took, tokens = time.perf_counter() - began, np.subtract(made(), before)
    while not engine.idle:
        engine.step()
    return took / float(np.mean(tokens))


def mask_times(params: Any) -> list[float]:
    """Returns the seconds to find the tokens that may follow, over one random output."""
    from jsparse.runtime.constraint import constraint
    from jsparse.runtime.structured_outputs import StructuredOutputsParams

    wanted, rng, times = StructuredOutputsParams(json=SCHEMA), np.random.default_rng(0), []
    size = params.config.vocab_size
    state = constraint(params.tokenizer, wanted, frozenset(), size, np.zeros(0, np.int32))
    for _ in range(NEW):
        began = time.perf_counter()
        words = state.allowed()
        times.append(time.perf_counter() - began)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        state.take([int(rng.choice(ids))])
    return times


def main() -> None:
    """Times each kind of rows in turn, RUNS times, and writes the report."""
    parser = report_parser("structured_outputs", (__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", metavar="FOLDER", help="SmolLM2's, with tokenizer.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    from bench.engine_speed import random_model
    from jsparse.engine.core import Engine
    from jsparse.engine.options import EngineOptions
    from jsparse.models.tokenizer import Tokenizer

    if args.tokenizer is None:
        import jsparse

        tokenizer = jsparse.load("smollm2").tokenizer
    else:
        tokenizer = Tokenizer.from_folder(args.tokenizer)
    params = dataclasses.replace(random_model(), tokenizer=tokenizer)
    options = EngineOptions(
        max_model_len=PROMPT + NEW + 64, max_num_seqs=ROWS, decode_rows=[ROWS], prepare=True
    )
    engine = Engine(params, "dense", options)
    engine.prepare(["greedy", "sampled"], all_rows=True)
    hot = {"temperature": 1.0}
    kinds: dict[str, tuple[int, dict[str, float]]] = {
        "greedy": (0, {"temperature": 0.0}),
        "sampled": (0, hot),
        "one": (1, hot),
        "all": (ROWS, hot),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _, (kind, (limited, own)) in itertools.product(range(RUNS + 1), kinds.items()):
        times[kind].append(1e3 * timed(engine, limited, **own))
    report |= {"rows": ROWS, "prompt": PROMPT, "new": NEW, "unit": "ms per token"}
    # the first run warms up
    report["results"] = {kind: spread(each[1:]) for kind, each in times.items()}
    masks = [1e6 * each for each in mask_times(params)]
    report["masks"] = spread(masks) | {"p99": float(np.quantile(masks, 0.99))}
    write_report(args.json, report)
    for kind, each in report["results"].items():
        print(f"{kind:10} {each['median']:.2f} ms ({each['min']:.2f}-{each['max']:.2f})")
    print(f"masks      {statistics.median(masks):.0f} µs, p99 {report['masks']['p99']:.0f} µs")


if __name__ == "__main__":
    main()
