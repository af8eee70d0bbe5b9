"""How much of the attention do tables of past attention find, and how many keys do they ask for?

SmolLM2 reads windows of the text of `jsparse eval`. Each policy takes in all but a window's last
tokens as a prompt and chooses for the queries of these one after the other, as if it decoded them.
Means over all KV heads, query heads and steps:

    mass        true softmax mass of what is attended to
    of best     the same relative to the tokens of largest weight, as many as the policy may list
    attended    share of the tokens that is attended to
    overlap     part of those tokens of largest weight that is attended to
    marked      of LFPS with candidates="threshold": share of the tokens that its rule marks

The paper's rule attends to as few tokens as it marks, where these are fewer than the budget allows,
and reads the keys of all that it marks, however many. So each of its forms with a = 0.2 is followed
by LFPS with exact weights alone at the share of the tokens that the form attended to, and by the
same choosing among at least as many keys.

    python -m bench.past_attention --json build/past_attention.json
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.head_replay import PAGE, RecordedHeads, replay
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from bench.page_ranking import recorded
from jsparse.attended import token_mask
from jsparse.cache import LayerCache
from jsparse.hooks import State
from jsparse.models.checkpoint import load
from jsparse.pallas_kernels.table_candidates import Kurtosis, table_candidates
from jsparse.policies.expressions import parse
from jsparse.policies.lfps import WINDOW, History, wanted
from jsparse.policies.lfps_variants import SINKS
from jsparse.policies.oracle import attention_logits
from jsparse.policy import Policy
from jsparse.selection import Selection
from jsparse.threshold import top_k_mask

LENGTHS, BUDGETS, STEPS = (4096, 8176), (0.02, 0.04), 160
RULE = "candidates='threshold', exact=True"
FACTORS = (0.1, 0.2, 0.3, 0.4)  # of Table 4; the second is the paper's for most lengths


class MeasuredPolicy(NamedTuple):
    """A policy that is measured.

    Attributes:
        a: the factor of its threshold, if it has one.
        matched: whether exact weights alone are measured at its shares, too.
    """

    a: float | None = None
    matched: bool = False


def forms(budget: float, length: int) -> dict[str, MeasuredPolicy]:
    """Returns the policies for a budget; of the paper's rule, no candidate is cut off.

    Between LFPS with exact weights and the paper's form, one thing changes at a time: the penalty,
    the rule, both, and the alignment of the slash table besides. Those that count tokens get the
    share of the whole window, Quest rounded up to whole pages.
    """
    tokens = int(budget * length)
    pages = -(-tokens // PAGE) * PAGE
    rule = f"{RULE}, wider={math.ceil(1 / budget)}"
    own = f"lfps(budget={budget}"
    return {
        f"{own})": MeasuredPolicy(),
        f"{own}, aligned=False)": MeasuredPolicy(),
        f"{own}, penalty=0.5)": MeasuredPolicy(),
        f"{own}, exact=True)": MeasuredPolicy(),
        f"{own}, exact=True, aligned=False)": MeasuredPolicy(),
        f"{own}, exact=True, penalty=0.5)": MeasuredPolicy(),
        f"{own}, {rule}, a=0.2)": MeasuredPolicy(0.2, matched=True),
        **{
            f"{own}, {rule}, a={a}, penalty=0.5)": MeasuredPolicy(a, matched=a == 0.2)
            for a in FACTORS
        },
        f"{own}, {rule}, a=0.2, penalty=0.5, aligned=False)": MeasuredPolicy(0.2, matched=True),
        f"oracle_top_k(budget={tokens})": MeasuredPolicy(),
        f"quest(budget={pages})": MeasuredPolicy(),
        f"quest(budget={pages}, slack=1.0, group='max')": MeasuredPolicy(),
        f"streaming(sink=4, recent={tokens - 4})": MeasuredPolicy(),
    }


class PolicyMeasures(NamedTuple):
    """Measures of one policy, each a mean over heads, by step."""

    mass: Float32[Array, "steps"]
    best: Float32[Array, "steps"]
    attended: Float32[Array, "steps"]
    overlap: Float32[Array, "steps"]
    marked: Float32[Array, "steps"]


@partial(jax.jit, static_argnames=("policy", "steps", "budget", "a"))
def replayed(
    policy: Policy, heads: RecordedHeads, steps: int, budget: float, a: float | None
) -> PolicyMeasures:
    """Lets a policy choose for the last `steps` queries of heads, all in one layer of one row."""
    slots = heads.keys.shape[1]

    def look(q: Array, held: LayerCache, chosen: Selection, state: State) -> PolicyMeasures:
        true = jax.nn.softmax(attention_logits(q, held), axis=-1)
        attended = token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=PAGE)
        top = top_k_mask(jnp.max(true, axis=2), wanted(budget, held.lengths))
        measures = (
            jnp.sum(jnp.where(attended[:, :, None], true, 0.0), -1),
            jnp.sum(jnp.where(top[:, :, None], true, 0.0), -1),
            jnp.sum(attended, -1) / held.lengths,
            jnp.sum(attended & top, -1) / jnp.sum(top, -1),
            marks(state, held.lengths) / held.lengths,
        )
        return PolicyMeasures(*map(jnp.mean, measures))

    def marks(state: State, lengths: Array) -> Array:
        """Returns how many slots the paper's rule marks, the sinks and the newest left out."""
        if a is None or not isinstance(state, History):
            return jnp.zeros(lengths.shape)
        rule = Kurtosis(a, jnp.zeros_like(lengths), jnp.full_like(lengths, slots))
        found = table_candidates(*state.tables[0], lengths, rule, capacity=slots, sink=SINKS)
        return found.count - SINKS - 1

    return replay(policy, heads, steps, look)


def measure(sources: Sequence[RecordedHeads], steps: int, budget: float) -> list[dict[str, Any]]:
    """Returns a row per policy, its figures the mean over equally long sources."""

    def row(expression: str, budget: float, a: float | None) -> dict[str, Any]:
        found = [replayed(parse(expression), heads, steps, budget, a) for heads in sources]
        mean = jax.tree.map(lambda *each: float(jnp.mean(jnp.stack(each))), *found)
        of_all = {"tokens": tokens, "budget": budget, "policy": expression, **mean._asdict()}
        return of_all | {"marked": mean.marked if a else None}

    tokens, rows = sources[0].keys.shape[1], []
    for expression, form in forms(budget, tokens).items():
        rows.append(row(expression, budget, form.a))
        if form.matched:
            attended, marked = (rows[-1][name] for name in ("attended", "marked"))
            share, wider = round(attended, 5), max(math.ceil(marked / attended), 1)
            for more in ("", f", wider={wider}"):
                rows.append(row(f"lfps(budget={share}, exact=True{more})", share, None))
    return rows


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table of all rows."""
    table = Table("tokens", "policy", "mass", "of best", "attended", "overlap", "marked")
    for r in rows:
        marked = "" if r["marked"] is None else f"{r['marked']:.1%}"
        table.add_row(
            *(str(r["tokens"]), r["policy"], f"{r['mass']:.3f}", f"{r['mass'] / r['best']:.3f}"),
            *(f"{r['attended']:.2%}", f"{r['overlap']:.3f}", marked),
        )
    return table


def main() -> None:
    """Measures the policies and prints a table."""
    parser = report_parser("past_attention", "Measure what tables of past attention find.")
    parser.add_argument(
        "--length", nargs="+", type=int, default=LENGTHS, help="tokens per window, in whole pages"
    )
    parser.add_argument("--prompts", type=int, default=2, help="windows per length (default 2)")
    parser.add_argument("--steps", type=int, default=STEPS, help="decoded tokens (default 160)")
    parser.add_argument(
        "--budget", nargs="+", type=float, default=BUDGETS, help="shares of the tokens"
    )
    args = parser.parse_args()
    if args.steps < 1 or any(n % PAGE or n <= args.steps + WINDOW for n in args.length):
        parser.error(
            f"--length {args.length}: must be multiples of {PAGE} above --steps + {WINDOW}"
        )
    environment = describe(allow_modified=args.allow_modified)
    params = load("smollm2")
    tokens = text_tokens(params)
    if len(tokens) < args.prompts * max(args.length):
        parser.error(f"--prompts {args.prompts}: the text has {len(tokens)} tokens")
    report = {"benchmark": "past_attention", "environment": environment}
    report["settings"] = vars(args) | {"json": None}
    report["results"] = rows = []
    for length in args.length:
        windows = [tokens[i * length : (i + 1) * length] for i in range(args.prompts)]
        sources = [recorded(params, ids, args.steps + WINDOW) for ids in windows]
        for budget in args.budget:
            rows += measure(sources, args.steps, budget)
            write_report(args.json, report)
    Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
