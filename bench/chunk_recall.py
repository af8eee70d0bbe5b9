"""How much of the true top-k do chunks, clusters and pages find, and how steady is the choice?

SmolLM2 reads windows of prose (the text of `jsparse eval`), of code (Python's argparse.py) and of
JSON (the task json_retrieval). Each policy takes in all but a window's last tokens as a prompt and
chooses for the queries of these one after the other, as if it decoded them. Means over the KV heads
of all layers, the first two included, and over steps:

    recall      part of the k tokens of largest weight that is attended to, k the budget; a token's
                weight is the greatest in the group of query heads
    mass        true softmax mass of what is attended to, over the query heads
    attended    number of tokens attended to

The policies are LycheeCluster and its variants, one argument changed at a time (Figures 6 and 10
and Table 3 of its paper, in kind), ClusterKV, ArkVale, Quest, StreamingLLM and the oracles. --keys
adds heads of another model, without their text: chunks are then of fixed size.

With --follow N the model samples N tokens behind a window with each policy, and the choice of one
step is compared with those before (the paper's Figure 9). The first and the newest tokens, which
most policies always attend to, do not count. Means over layers, KV heads and blocks of steps:

    jaccard     |now and before| / |now or before|
    hits        part of what is chosen now that was chosen in one of the 32 steps before

    python -m bench.chunk_recall --json build/chunk_recall.json
"""

import argparse
import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.head_replay import PAGE, RecordedHeads, replay
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from bench.page_ranking import from_file, recorded
from jsparse.attended import token_mask
from jsparse.cache import CacheSpec, LayerCache, StepView
from jsparse.evaluation.tasks import parse as tasks_of
from jsparse.hooks import State
from jsparse.model_facts.constants import constants
from jsparse.models.checkpoint import Params, load
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.expressions import parse
from jsparse.policies.oracle import attention_logits
from jsparse.policy import Policy, at_layer
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.session import Session
from jsparse.selection import Selection
from jsparse.text.prompts import tokenizer_of
from jsparse.threshold import top_k_mask

LENGTH, BUDGETS, STEPS = 4096, (256, 1024), 64
TEXTS = ("prose", "code", "json")
CHANGED = (
    "rank='bound'",
    *(f"cluster_size={size}" for size in (1, 4, 8)),
    "pooling='max'",
    "normalise=False",
    "levels=2",
)
SINK, NEWEST, BEFORE = 16, 144, 32  # tokens that do not count; steps that hits look at
BLOCK = 256  # steps


def expressions(budget: int, *, fixed: bool) -> list[str]:
    """Returns the policies at a budget; `fixed` leaves out those that look at the text."""
    usual, chunks = f"lychee_cluster(budget={budget}", ", chunks='fixed'"
    clusters = [f"{usual}{chunks})", *(f"{usual}{chunks}, {way})" for way in CHANGED)]
    if not fixed:
        clusters = [f"{usual})", clusters[0], *(f"{usual}, {way})" for way in CHANGED)]
    return [
        *clusters,
        *(f"{name}(budget={budget})" for name in ("cluster_kv", "arkvale", "quest")),
        f"streaming(sink={SINK}, recent={budget - SINK})",
        f"oracle_top_k(budget={budget}, granularity='page')",
        f"oracle_top_k(budget={budget})",
    ]


class ChunkMeasures(NamedTuple):
    """Measures of one policy, each a mean over heads, by step."""

    recall: Float32[Array, "steps"]
    mass: Float32[Array, "steps"]
    attended: Float32[Array, "steps"]


@partial(jax.jit, static_argnames=("policy", "steps", "budget"))
def found(
    policy: Policy,
    heads: RecordedHeads,
    tokens: Int32[Array, "S"] | None,
    known: Mapping[str, Array] | None,
    steps: int,
    budget: int,
) -> ChunkMeasures:
    """Measures what a policy chooses for the last `steps` queries; `known` are the constants."""

    def look(q: Array, held: LayerCache, chosen: Selection, state: State) -> ChunkMeasures:
        true = jax.nn.softmax(attention_logits(q, held), axis=-1)
        attended = token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=PAGE)
        top = top_k_mask(jnp.max(true, axis=2), budget)
        return ChunkMeasures(
            jnp.mean(jnp.sum(attended & top, -1) / jnp.sum(top, -1)),
            jnp.mean(jnp.sum(jnp.where(attended[:, :, None], true, 0.0), -1)),
            jnp.mean(jnp.sum(attended, -1)),
        )

    return replay(policy, heads, steps, look, tokens=tokens, constants=known)


class HeadSource(NamedTuple):
    """Holds recorded heads; `tokens` is None where their text is not known."""

    heads: RecordedHeads
    tokens: Int32[Array, "S"] | None


def measure(
    policies: Sequence[str],
    sources: Sequence[HeadSource],
    steps: int,
    budget: int,
    params: Params | None = None,
) -> list[dict[str, Any]]:
    """Returns a row per policy, its figures the mean over equally long sources.

    `params` has the constants that policies need; None where none needs any.
    """
    rows = []
    for expression in policies:
        policy = parse(expression)
        known = None if params is None else constants(params, policy)
        each = [found(policy, heads, ids, known, steps, budget) for heads, ids in sources]
        mean = jax.tree.map(lambda *values: float(jnp.mean(jnp.stack(values))), *each)
        rows.append({"budget": budget, "policy": expression, **mean._asdict()})
    return rows


class ChoiceRecord(NamedTuple):
    """Holds one layer's record of its choices.

    Attributes:
        last: the step in which each slot was chosen last, far below 0 if never.
        step: the number of the next step.
        jaccard, hits: the measures by step; NaN for steps without a choice.
    """

    last: Int32[Array, "B K S"]
    step: Int32[Array, ""]
    jaccard: Float32[Array, "steps B K"]
    hits: Float32[Array, "steps B K"]


def followed(base: Policy, steps: int) -> Policy:
    """Returns `base` with a Steady per layer in its state, which has room for `steps` steps."""

    def init(spec: CacheSpec) -> tuple[ChoiceRecord, ...]:
        heads = spec.batch, spec.num_kv_heads
        never = jnp.full((*heads, spec.capacity), -BEFORE - 1, jnp.int32)
        none = jnp.full((steps, *heads), jnp.nan)
        return (ChoiceRecord(never, jnp.int32(0), none, none),) * spec.num_layers

    def select(state: WrappedState, layer: int, q: Array, view: StepView):
        chosen, summary, inner = base.select(state.base, layer, q, view)
        own = compared(state.own[layer], chosen, view.layers[layer])
        return chosen, summary, WrappedState(inner, at_layer(state.own, layer, own))

    return with_state(base, init, select=select)


def compared(own: ChoiceRecord, chosen: Selection, held: LayerCache) -> ChoiceRecord:
    """Compares what a step chose with the steps before, and notes it."""
    slots = jnp.arange(held.capacity, dtype=jnp.int32)
    # what was not among the newest in any of the steps that hits looks at
    free = (slots >= SINK) & (slots < held.lengths[..., None] - NEWEST - BEFORE)
    mask = token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=held.page_size)
    now, before = mask & free, (own.last == own.step - 1) & free
    recent = own.last >= own.step - BEFORE
    number = jnp.sum(now, -1)
    jaccard = jnp.sum(now & before, -1) / jnp.sum(now | before, -1)  # 0 / 0 is NaN
    hits = jnp.sum(now & recent, -1) / number
    if chosen.dense is not None:
        jaccard, hits = (jnp.where(chosen.dense, jnp.nan, x) for x in (jaccard, hits))
    first = own.step == 0
    return ChoiceRecord(
        jnp.where(mask, own.step, own.last),
        own.step + 1,
        own.jaccard.at[own.step].set(jnp.where(first, jnp.nan, jaccard)),
        own.hits.at[own.step].set(jnp.where(first, jnp.nan, hits)),
    )


def drawn(key: Array, nth: Array, logits: Float32[Array, "B V"], active: Any):
    """Samples at temperature 1: the greedy text of a small model soon repeats itself."""
    tokens = jax.random.categorical(jax.random.fold_in(key, nth), logits).astype(jnp.int32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)
    return tokens, chosen[:, 0], key


def follow(
    params: Params, expression: str, prompt: Sequence[int], steps: int, block: int = BLOCK
) -> dict[str, Any]:
    """Returns the measures of one policy over the steps behind a prompt, by block of steps."""
    policy = followed(parse(expression), steps)
    session = Session(params, policy, cache_spec(params, [prompt], steps + 1, None, PAGE))
    session.read([prompt])
    for _ in session.steps(drawn, jax.random.key(0), limits=[steps + 1]):
        pass
    records = jax.device_get(session.held.state.own)
    row: dict[str, Any] = {"policy": expression, "tokens": len(prompt), "steps": steps}
    for name in ("jaccard", "hits"):
        by_step = np.stack([getattr(record, name) for record in records], axis=1)
        row[name] = float(np.nanmean(by_step))
        row[f"{name}_by_block"] = [
            float(np.nanmean(by_step[at : at + block])) for at in range(0, steps, block)
        ]
    return row


def texts(params: Params, names: Sequence[str], number: int) -> dict[str, list[int]]:
    """Returns at least `number` tokens of each text.

    Raises:
        ValueError: a text has fewer.
    """
    encode = tokenizer_of(params, "the benchmark").encode
    (records,) = tasks_of("json_retrieval")
    made = {
        "prose": lambda: text_tokens(params),
        "code": lambda: encode(inspect.getsource(argparse)),
        # a sample has a place for its answer, and rounds down to whole records
        "json": lambda: encode(records.sample(encode, number + 256, 0).prompt),
    }
    found = {name: list(made[name]()) for name in names}
    for name, ids in found.items():
        if len(ids) < number:
            raise ValueError(f"texts={name}: has {len(ids)} tokens, must have at least {number}")
    return found


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """Returns the table of all rows, with these columns behind text and policy."""
    table = Table("text", "policy", *columns)
    for row in rows:
        cells = (f"{row[name]:.{0 if name in ('attended', 'units') else 3}f}" for name in columns)
        table.add_row(row["text"], row["policy"], *cells)
    return table


def recalls(args: Namespace, params: Params, report: dict[str, Any]) -> Table:
    """Measures recall on all texts, and on the heads of the file."""
    rows = report["results"]

    def widest(*, fixed: bool) -> int:
        of_all = (e for budget in args.budget for e in chosen(args, budget, fixed=fixed))
        return max(parse(expression).window for expression in of_all)

    window = args.steps + widest(fixed=False)
    for name, ids in texts(params, args.texts, args.prompts * args.length).items():
        cut = [ids[i * args.length : (i + 1) * args.length] for i in range(args.prompts)]
        sources = [HeadSource(recorded(params, one, window), jnp.asarray(one)) for one in cut]
        for budget in args.budget:
            policies = chosen(args, budget, fixed=False)
            for row in measure(policies, sources, args.steps, budget, params):
                rows.append({"text": name, "tokens": args.length, **row})
            write_report(args.json, report)
    if args.keys:
        heads = from_file(args.keys)
        tokens, queries = heads.keys.shape[1], heads.queries.shape[1]
        steps = min(args.steps, queries - widest(fixed=True))
        for budget in args.budget:
            policies = chosen(args, budget, fixed=True)
            for row in measure(policies, [HeadSource(heads, None)], steps, budget):
                rows.append({"text": args.keys.stem, "tokens": tokens, **row})
        write_report(args.json, report)
    return table_of(rows, ChunkMeasures._fields)


def follows(args: Namespace, params: Params, report: dict[str, Any]) -> Table:
    """Follows the choices of all policies behind the first window of each text."""
    rows = report["results"]
    for name, ids in texts(params, args.texts, args.length).items():
        for budget in args.budget:
            for expression in chosen(args, budget, fixed=False):
                row = follow(params, expression, ids[: args.length], args.follow)
                rows.append({"text": name, "budget": budget, **row})
                write_report(args.json, report)
    return table_of(rows, ("jaccard", "hits"))


def chosen(args: Namespace, budget: int, *, fixed: bool) -> list[str]:
    """Returns the policies that are asked for, at a budget."""
    if args.policy:
        return [expression.replace("BUDGET", str(budget)) for expression in args.policy]
    return expressions(budget, fixed=fixed)


def main() -> None:
    """Measures recall, or follows the choices, and prints a table."""
    parser = report_parser("chunk_recall", "Measure how much of the true top-k policies find.")
    parser.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens per window (default {LENGTH})"
    )
    parser.add_argument("--prompts", type=int, default=2, help="windows per text (default 2)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"decoded tokens of a window (default {STEPS})"
    )
    parser.add_argument(
        "--budget", nargs="+", type=int, default=BUDGETS, help="tokens, the k of the top-k too"
    )
    parser.add_argument(
        "--texts", nargs="+", choices=TEXTS, default=TEXTS, help="texts (default all)"
    )
    parser.add_argument(
        "--policy", nargs="+", help="expressions, in which BUDGET stands for a budget"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="heads of another model, recorded in a .npz file"
    )
    parser.add_argument(
        "--follow", type=int, default=0, metavar="N", help="follow the choices over N tokens"
    )
    args = parser.parse_args()
    if args.length % PAGE or args.length <= args.steps:
        parser.error(f"--length {args.length}: must be a multiple of {PAGE} above --steps")
    if args.steps < 1 or args.prompts < 1 or args.follow < 0:
        parser.error("--steps and --prompts must be at least 1, --follow at least 0")
    environment, params = describe(allow_modified=args.allow_modified), load("smollm2")
    settings = vars(args) | {"json": None, "keys": args.keys and args.keys.name}
    report = {"benchmark": "chunk_recall", "environment": environment, "settings": settings}
    report["results"] = []
    Console(width=160).print((follows if args.follow else recalls)(args, params, report))


if __name__ == "__main__":
    main()
