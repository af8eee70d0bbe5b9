"""How long does a decode step of SmolLM2 behind a long prompt take on this CPU, by policy?

Each policy reads the same prompt, the start of the text of `jsparse eval`, and generates greedily
in float32. They take turns, one step each, so that what else the machine does falls on all alike.
Milliseconds from the start of a step to its token, whole model, after a few steps that are not
timed, the first of which compiles:

    ms          median, least and greatest
    over dense  the first policy's median over this one's
    attended    share of the tokens that is attended to

    python -m bench.cpu_steps --json build/cpu_steps.json
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report
from bench.lib.text import text_tokens
from jsparse.models.checkpoint import Params, load
from jsparse.policies.expressions import parse
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import Session

PROMPT_TOKENS, STEPS, WARM_UPS, PAGE = 8000, 32, 3, 16
POLICIES = (
    "dense",
    "lfps(budget=0.04)",
    "quest(budget=320)",
    "lfps(budget=0.02, exact=True)",
    "quest(budget=160)",
)


def steps(
    params: Params, policy: str, prompt: Sequence[int], number: int
) -> Iterator[tuple[float, float]]:
    """Reads a prompt, then decodes; yields each step's milliseconds and its attended share."""
    spec = cache_spec(params, [prompt], number + 1, None, PAGE)
    session = Session(params, parse(policy), spec, steps_per_program=1)
    session.read([prompt])
    results = session.steps(greedy, (), limits=[number + 1])
    jax.block_until_ready(next(results))  # the token that follows the prompt
    for _ in range(number):
        began = time.perf_counter()
        result = jax.block_until_ready(next(results))
        ms = 1e3 * (time.perf_counter() - began)
        assert result.stats is not None
        yield ms, result.stats.attended.item()


def measure(
    params: Params, policies: Sequence[str], prompt: Sequence[int], number: int
) -> list[dict[str, Any]]:
    """Returns a row per policy, of `number` steps of each, which take turns."""
    turns = [steps(params, policy, prompt, WARM_UPS + number) for policy in policies]
    rounds = list(zip(*turns, strict=True))[WARM_UPS:]
    rows = []
    for policy, own in zip(policies, zip(*rounds, strict=True), strict=True):
        ms, attended = (list(values) for values in zip(*own, strict=True))
        rows.append({"policy": policy, "ms": spread(ms), "attended": sum(attended) / number})
    return [row | {"over_first": rows[0]["ms"]["median"] / row["ms"]["median"]} for row in rows]


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table, a row per policy."""
    table = Table("policy", "ms per step", f"over {rows[0]['policy']}", "attended")
    for r in rows:
        ms = f"{r['ms']['median']:.1f} ({r['ms']['min']:.1f}-{r['ms']['max']:.1f})"
        table.add_row(r["policy"], ms, f"{r['over_first']:.2f}x", f"{r['attended']:.1%}")
    return table


def main() -> None:
    """Times the policies and prints a table."""
    parser = report_parser("cpu_steps", "Time decode steps behind a long prompt on this CPU.")
    parser.add_argument(
        "--policy", nargs="+", default=POLICIES, help="policy expressions, compared with the first"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=PROMPT_TOKENS, help="prompt length (default 8000)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps (default 32)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    environment, params = (
        describe(allow_modified=args.allow_modified),
        load("smollm2", dtype="float32"),
    )
    text = text_tokens(params)
    max_length = min(len(text), params.config.max_position_embeddings - args.steps - WARM_UPS)
    if not 1 <= args.prompt_tokens <= max_length:
        parser.error(f"--prompt-tokens {args.prompt_tokens}: must be from 1 to {max_length}")
    rows = measure(params, args.policy, text[: args.prompt_tokens], args.steps)
    settings = vars(args) | {"json": None, "dtype": str(params.dtype), "warm_ups": WARM_UPS}
    report = {"benchmark": "cpu_steps", "environment": environment, "settings": settings}
    write_report(args.json, report | {"results": rows})
    Console(width=120).print(table_of(rows))


if __name__ == "__main__":
    main()
