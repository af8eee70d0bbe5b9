"""How near to each other are the tokens that matter, and which heads look at the sinks alone?

SmolLM2 reads windows of the text of `jsparse eval`; the queries of a window's last tokens attend
to all tokens up to their own. These are Figures 2b and 2c and Table 3 of LFPS (arXiv:2506.15704),
in kind, as means over layers, KV heads and steps:

    within D    share of the tokens of largest weight that have another such token at most D
                positions away; a token's weight is the greatest in the group, sinks do not count
    by chance   the same for tokens drawn at random
    heads       share of the query heads, or of the KV heads all of whose query heads are such,
                whose rho is above epsilon: the share of the sinks as LFPS estimates it from the
                prompt
    errors      |o - full| / |full| for the outputs of these query heads. o is attention to the
                exact top 2 % of the tokens; to the sinks alone; to the sinks and a token that
                stands for the mean of the prompt (bypass=True); or the mean of the prompt's values
                (bypass="mean")

    python -m bench.sink_heads --json build/sink_heads.json
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32
from rich.console import Console
from rich.table import Table

from bench.eviction_error import DenseRecord, record
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.cache import LayerCache, read_heads
from jsparse.models.checkpoint import load
from jsparse.policies.lfps import wanted
from jsparse.policies.lfps_variants import SINKS, bypassed, described, sink_attention
from jsparse.policies.oracle import attention_logits
from jsparse.threshold import top_k_mask

LENGTH, STEPS = 4096, 64
BUDGETS, DISTANCES = (0.02, 0.04), (1, 2, 4, 8)
NEWEST = (0, 64)  # the newest tokens that are left out of the distances: all heads look there
EPSILONS, TOP = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 0.02
OUTPUTS = ("top_k", "sinks", "sinks_and_mean", "mean")


class SinkMeasures(NamedTuple):
    """Holds what was measured in each step of one layer and row.

    Attributes:
        within: the share of heavy tokens near another, for each of NEWEST, BUDGETS and DISTANCES.
        log_rho: the logarithm of LFPS's estimate of the share of the sinks.
        errors: the relative error of each of OUTPUTS.
    """

    within: Float32[Array, "steps newest budgets distances K"]
    log_rho: Float32[Array, "steps K G"]
    errors: Float32[Array, "steps outputs K G"]


@partial(jax.jit, static_argnames="prompt")
def seen(
    whole: LayerCache,
    last: Float[Array, "1 N H"],
    queries: Float[Array, "steps 1 N H"],
    prompt: int,
) -> SinkMeasures:
    """Measures a layer whose prompt ends with the query `last`, for the queries that follow it."""
    known = described(whole._replace(lengths=jnp.full_like(whole.lengths, prompt)), last)
    slots = jnp.arange(whole.capacity, dtype=jnp.int32)

    def step(asked: tuple[Array, Array]) -> SinkMeasures:
        nth, q = asked
        held = whole._replace(lengths=jnp.full_like(whole.lengths, prompt + nth + 1))
        logits = attention_logits(q, held)
        weight = jnp.max(jax.nn.softmax(logits, axis=-1), axis=2)

        def heavy(newest: int, budget: float) -> Bool[Array, "1 K S"]:
            counted = (slots >= SINKS) & (slots < held.lengths[..., None] - newest)
            return top_k_mask(jnp.where(counted, weight, -jnp.inf), wanted(budget, held.lengths))

        top = top_k_mask(weight, wanted(TOP, held.lengths))[:, :, None]
        sinks, full = sink_attention(q, held, known), attended(logits, held)
        outputs = (
            attended(jnp.where(top, logits, -jnp.inf), held),
            sinks.o,
            *(bypassed(q, held, known, alone=alone)[1].o for alone in (False, True)),
        )
        away = jnp.stack([o.reshape(full.shape) - full for o in outputs])
        errors = jnp.linalg.norm(away, axis=-1) / jnp.linalg.norm(full, axis=-1)
        within = [[near(heavy(newest, budget)) for budget in BUDGETS] for newest in NEWEST]
        return SinkMeasures(jnp.array(within)[..., 0, :], sinks.log_rho[0], errors[:, 0])

    return jax.lax.map(step, (jnp.arange(len(queries), dtype=jnp.int32), queries))


def attended(logits: Float32[Array, "B K G S"], held: LayerCache) -> Float32[Array, "B K G H"]:
    """Returns the output of attention with these logits."""
    values = read_heads(held.v, held).astype(jnp.float32)
    return jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(logits, axis=-1), values)


def near(marks: Bool[Array, "*rows S"]) -> Float32[Array, "distances *rows"]:
    """Returns the share of the marked slots that have another within each of DISTANCES."""
    slots, axis = jnp.arange(marks.shape[-1], dtype=jnp.float32), marks.ndim - 1
    last = jax.lax.cummax(jnp.where(marks, slots, -jnp.inf), axis)
    following = jax.lax.cummin(jnp.where(marks, slots, jnp.inf), axis, reverse=True)
    # a slot's own mark is no neighbour: the marks up to the slot before it, and from the next on
    sides = [(0, 0)] * axis
    before = jnp.pad(last, [*sides, (1, 0)], constant_values=-jnp.inf)[..., :-1]
    after = jnp.pad(following, [*sides, (0, 1)], constant_values=jnp.inf)[..., 1:]
    apart = jnp.where(marks, jnp.minimum(slots - before, after - slots), jnp.inf)
    return jnp.stack([jnp.sum(apart <= d, -1) / jnp.sum(marks, -1) for d in DISTANCES])


def measure(recorded: DenseRecord) -> SinkMeasures:
    """Returns what all layers of a recorded run saw, with an axis of layers before the steps."""
    layers = [
        jax.device_get(seen(layer, window[:, -1], queries, recorded.prompt))
        for layer, window, queries in zip(*recorded[1:4], strict=True)
    ]
    return jax.tree.map(lambda *each: np.stack(each), *layers)


def distances(within: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row for each of NEWEST and BUDGETS.

    Args:
        within: of shape [..., newest, budgets, distances, K].
    """
    mean = within.mean((*range(within.ndim - 4), within.ndim - 1))
    return [
        {
            "newest_left_out": newest,
            "budget": budget,
            "within": mean[i, j].tolist(),
            "by_chance": [1 - (1 - budget) ** (2 * d) for d in DISTANCES],
        }
        for i, newest in enumerate(NEWEST)
        for j, budget in enumerate(BUDGETS)
    ]


def bypasses(log_rho: np.ndarray, errors: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row per epsilon for query heads, then for KV heads.

    Args:
        log_rho: of shape [..., K, G].
        errors: of shape [..., outputs, K, G].
    """
    rows, by_output = [], np.moveaxis(errors, -3, 0)
    for of in ("query heads", "KV heads"):
        minimum = log_rho if of == "query heads" else log_rho.min(-1, keepdims=True)
        for epsilon in EPSILONS:
            passed = np.broadcast_to(minimum > math.log(epsilon), log_rho.shape)
            # a mean over nothing is left out
            means = (
                by_output[:, passed].mean(-1).tolist() if passed.any() else [None] * len(OUTPUTS)
            )
            row = {"of": of, "epsilon": epsilon, "heads": float(passed.mean())}
            rows.append(row | dict(zip(OUTPUTS, means, strict=True)))
    return rows


def tables_of(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Returns the table of distances and that of bypasses."""
    near_by = Table("budget", "newest left out", *(f"within {d} (by chance)" for d in DISTANCES))
    for r in results["distances"]:
        shares = zip(r["within"], r["by_chance"], strict=True)
        cells = (f"{share:.1%} ({chance:.1%})" for share, chance in shares)
        near_by.add_row(f"{r['budget']:.0%}", str(r["newest_left_out"]), *cells)
    passed = Table("of", "epsilon", "heads", *(f"error, {name}" for name in OUTPUTS))
    for r in results["bypasses"]:
        errors = ("" if r[name] is None else f"{r[name]:.3f}" for name in OUTPUTS)
        passed.add_row(r["of"], str(r["epsilon"]), f"{r['heads']:.1%}", *errors)
    return [near_by, passed]


def main() -> None:
    """Measures all windows and prints two tables."""
    parser = report_parser("sink_heads", "Measure how near heavy tokens are, and what sinks hold.")
    parser.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens per window (default {LENGTH})"
    )
    parser.add_argument("--prompts", type=int, default=8, help="number of windows (default 8)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"queries per window, the last (default {STEPS})"
    )
    args = parser.parse_args()
    minimum = args.steps + max(NEWEST) + SINKS + 1
    if args.steps < 1 or args.prompts < 1 or args.length < minimum:
        parser.error(
            f"--length {args.length}: must be at least {minimum}; --steps and --prompts must be at "
            "least 1"
        )
    environment, params = describe(allow_modified=args.allow_modified), load("smollm2")
    tokens = text_tokens(params)
    if args.prompts * args.length > len(tokens):
        parser.error(f"--prompts {args.prompts}: the text has {len(tokens)} tokens")
    found, prompt = [], args.length - args.steps
    for start in range(0, args.prompts * args.length, args.length):
        ids = tokens[start : start + args.length]
        found.append(measure(record(params, [ids[:prompt]], np.array([ids[prompt:]]))))
    within, log_rho, errors = map(np.stack, zip(*found, strict=True))
    results = {"distances": distances(within), "bypasses": bypasses(log_rho, errors)}
    settings = vars(args) | {"json": None, "dtype": str(params.dtype), "distances": DISTANCES}
    report = {"benchmark": "sink_heads", "environment": environment, "settings": settings}
    write_report(args.json, report | {"results": results})
    for table in tables_of(results):
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
