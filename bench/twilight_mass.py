"""How much of the true attention mass does Twilight keep, and for how many bytes?

SmolLM2 decodes dense attention's continuation of the text of `jsparse eval`. For each base, way of
pruning and p, shares:

    mass        attended mass of the exact softmax, mean over query heads and steps of the layers
                that prune
    of base     the same relative to the mass that the base alone covers, and how often this is at
                least p - 0.02
    recall      found share of the tokens that exact weights would have kept of the base's, by KV
                head
    tokens, pages, read   attended tokens, the pages they lie in, and the tokens whose K and V are
                read, relative to the whole cache

    python -m bench.twilight_mass --length 2048 --json build/twilight_mass.json
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.attended import count_tokens, token_mask
from jsparse.cache import LayerCache, StepView
from jsparse.evaluation.teacher_forcing import force
from jsparse.models.checkpoint import Params, load
from jsparse.pallas_kernels.threshold_select import TopP, threshold_select
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.expressions import parse
from jsparse.policies.oracle import attention_logits
from jsparse.policies.twilight import Prune, twilight
from jsparse.policy import Policy, at_layer
from jsparse.selection import Selection

BASES = ("all_pages()", "quest(budget=512)", "streaming(sink=4, recent=508)", "tidal(budget=512)")
PRUNES: tuple[Prune, ...] = ("page_mass", "token")
THRESHOLDS = (0.8, 0.9, 0.95, 0.99)


class MassMeasures(NamedTuple):
    """Measures of one layer's selections, by step; K and N as in jsparse.shapes."""

    mass: Float32[Array, "steps B N"]
    of_base: Float32[Array, "steps B N"]
    recall: Float32[Array, "steps B K"]
    tokens: Float32[Array, "steps B K"]
    pages: Float32[Array, "steps B K"]
    read: Float32[Array, "steps B K"]


def watched(base: Policy, pruned: Policy, p: float, steps: int) -> Policy:
    """Returns `pruned`, which is Twilight over `base`, with a Seen per layer in its state.

    It is NaN where nothing was pruned.
    """

    def init(spec):
        heads, queries = (
            jnp.full((steps, spec.batch, n), jnp.nan) for n in (spec.num_kv_heads, spec.num_heads)
        )
        seen = MassMeasures(queries, queries, heads, heads, heads, heads)
        return jnp.zeros(spec.num_layers, jnp.int32), (seen,) * spec.num_layers

    def choose(state: WrappedState, layer: int, q: Array, view: StepView):
        steps_of, records = state.own
        covered, *_ = base.select(state.base.base, layer, q, view)
        chosen, summary, inner = pruned.select(state.base, layer, q, view)
        if chosen.dense is not None:
            return chosen, summary, WrappedState(inner, state.own)
        new = look(q, view.layers[layer], covered, chosen, p)
        record = jax.tree.map(lambda old, x: old.at[steps_of[layer]].set(x), records[layer], new)
        own = steps_of.at[layer].add(1), at_layer(records, layer, record)
        return chosen, summary, WrappedState(inner, own)

    return with_state(pruned, init, select=choose)


def look(
    q: Array, held: LayerCache, covered: Selection, chosen: Selection, p: float
) -> MassMeasures:
    """Measures one step with the exact weights."""
    logits = attention_logits(q, held)
    of_base, kept = (mask(selection, held) for selection in (covered, chosen))
    lse, base_lse, kept_lse = (
        jax.nn.logsumexp(jnp.where(marks[:, :, None], logits, -jnp.inf), axis=-1)
        for marks in (jnp.ones_like(kept), of_base, kept)
    )
    exact = threshold_select(
        jnp.where(of_base[:, :, None], logits, -jnp.inf), TopP(p), capacity=held.capacity
    )
    wanted = mask(exact, held)
    attended, read = count_tokens(chosen, held.lengths, held.page_size)
    pages = kept.reshape(*kept.shape[:2], -1, held.page_size).any(-1).sum(-1)
    return MassMeasures(
        jnp.exp(kept_lse - lse).reshape(q.shape[:2]),
        jnp.exp(kept_lse - base_lse).reshape(q.shape[:2]),
        jnp.sum(wanted & kept, -1) / jnp.maximum(jnp.sum(wanted, -1), 1),
        attended / held.lengths,
        pages / -(-held.lengths // held.page_size),
        read / held.lengths,
    )


def mask(selection: Selection, held: LayerCache) -> Array:
    """Returns the attended slots, bool[B, K, S]."""
    return token_mask(selection, held.lengths, num_pages=held.num_pages, page_size=held.page_size)


def measure(
    params: Params, base: str, prunes: Sequence[Prune], thresholds: Sequence[float], **given: Any
) -> list[dict]:
    """Returns a row for each way of pruning and p."""
    prompts, steps = given["prompts"], given["steps"]
    cases: list[tuple[Prune, float]] = [(prune, p) for prune in prunes for p in thresholds]
    policies = [
        watched(parse(base), twilight(parse(base), p=p, prune=prune), p, steps)
        for prune, p in cases
    ]
    forcing = force(params, policies, prompts, max_new_tokens=steps)
    rows = []
    for index, (prune, p) in enumerate(cases, 1):
        _, records = jax.device_get(forcing.last_state(index).own)
        seen = {
            name: np.stack([getattr(record, name) for record in records])
            for name in MassMeasures._fields
        }
        means = {name: float(np.nanmean(x)) for name, x in seen.items()}
        of_base = seen["of_base"][np.isfinite(seen["of_base"])]
        often = float(np.mean(of_base >= p - 0.02))
        rows.append({"base": base, "prune": prune, "p": p, **means, "at_least_p_less_0.02": often})
    return rows


def main() -> None:
    """Measures the mass and prints a table."""
    parser = report_parser("twilight_mass", "Measure the attention mass that Twilight keeps.")
    parser.add_argument("--length", type=int, default=2048, help="tokens per prompt (default 2048)")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts (default 4)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps (default 32)")
    parser.add_argument("--base", nargs="+", default=BASES, help="expressions of base selectors")
    parser.add_argument("--p", nargs="+", type=float, default=THRESHOLDS, help="values of p")
    args = parser.parse_args()
    environment = describe(allow_modified=args.allow_modified)
    params = load("smollm2")
    tokens = text_tokens(params)
    if len(tokens) < args.prompts * args.length:
        parser.error(
            f"--prompts {args.prompts} of --length {args.length}: the text has {len(tokens)} tokens"
        )
    prompts = [tokens[i * args.length : (i + 1) * args.length] for i in range(args.prompts)]
    report = {
        "benchmark": "twilight_mass",
        "environment": environment,
        "settings": vars(args) | {"json": None},
    }
    report["results"] = rows = []
    columns = ("mass", "of_base", "at_least_p_less_0.02", "recall", "tokens", "pages", "read")
    table = Table("base", "prune", "p", *columns)
    for base in args.base:
        for row in measure(params, base, PRUNES, args.p, prompts=prompts, steps=args.steps):
            rows.append(row)
            table.add_row(
                base, row["prune"], str(row["p"]), *(f"{row[name]:.3f}" for name in columns)
            )
        write_report(args.json, report)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
