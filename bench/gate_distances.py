"""How far does a model with gates lie from the dense one, in decoding and in the paper's training?

The distance is the one that `jsparse train-gates` minimises, for hard gates, on pass keys that
training does not see: the squared difference of the logits at the answers, as a share of the dense
logits' variance. Sets are handed on, as in decoding, or refreshed: every head picks the next
layer's, as in LycheeDecode's training. The named gates are compared with layer 0's heads alone, and
with random heads of the same number as the first gates have.

    python -m bench.gate_distances smollm2 --json build/gate_distances.json
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from rich.console import Console
from rich.table import Table

from bench.head_baselines import drawn
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report
from jsparse.evaluation import texts
from jsparse.models.checkpoint import Params, load
from jsparse.policies import head_gates
from jsparse.text.prompts import tokenizer_of
from jsparse.train import distill
from jsparse.train.data import Source
from jsparse.train.passkey import passkeys

SEED = 7  # of the samples; `jsparse train-gates` draws with 0


def compared(names: list[str], random_seeds: int) -> dict[str, Bool[np.ndarray, "L K"]]:
    """Returns the masks by their names in the table."""
    named = {name: head_gates.load(name).retrieval for name in names}
    first = next(iter(named.values()))
    alone = np.zeros_like(first)
    alone[0] = True
    count = int(first.sum())
    randoms = {
        f"random {seed}": drawn(first.shape, count, seed).retrieval for seed in range(random_seeds)
    }
    return {"layer 0 alone": alone, **randoms, **named}


def distances(
    params: Params,
    masks: Mapping[str, Bool[np.ndarray, "L K"]],
    source: Source,
    samples: int,
    keep: float,
) -> list[dict[str, Any]]:
    """Returns a row for each mask, with the mean over samples for each way of handing sets."""
    gates = jnp.stack([jnp.asarray(mask, jnp.float32) for mask in masks.values()])
    ways = get_args(distill.Sets)
    teach = jax.jit(partial(distill.teacher_cache, params.decoder, match="logits"))

    @jax.jit
    def measured(weights: Any, given: distill.TeacherCache) -> Array:
        def of(mask: Array, sets: distill.Sets) -> Array:
            made = distill.predictions(
                params.decoder, weights, given, mask, match="logits", keep=keep, sets=sets
            )
            return distill.distance(made, given)

        return jnp.stack([jax.lax.map(partial(of, sets=sets), gates) for sets in ways])

    far = [
        measured(params.weights, teach(params.weights, source.batch(nth, 1)))
        for nth in range(samples)
    ]
    means = np.mean(np.asarray(far), axis=0)
    return [
        {"gates": name, **{sets: float(mean) for sets, mean in zip(ways, column, strict=True)}}
        for name, column in zip(masks, means.T, strict=True)
    ]


def main() -> None:
    """Measures the distances and prints a table."""
    parser = report_parser("gate_distances", "Measure distances of gates from the dense model.")
    parser.add_argument("gates", nargs="+", help="names or files of gates")
    parser.add_argument(
        "--model", default="smollm2", help="as jsparse.load takes it (default smollm2)"
    )
    parser.add_argument("--samples", type=int, default=3, help="contexts (default 3)")
    parser.add_argument(
        "--length", type=int, default=1500, help="tokens per context (default 1500)"
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0.3,
        help="share of the context that a sparse head inherits (default 0.3)",
    )
    parser.add_argument("--random-seeds", type=int, default=3, help="random draws (default 3)")
    args = parser.parse_args()
    environment = describe(allow_modified=args.allow_modified)
    params = load(args.model)
    tokenizer, size = (
        tokenizer_of(params, "the bench"),
        {"min_length": args.length, "max_length": args.length},
    )
    source = passkeys(tokenizer, texts.read(None), **size, seed=SEED, buckets=(args.length,))
    rows = distances(
        params, compared(args.gates, args.random_seeds), source, args.samples, args.keep
    )
    report = {
        "benchmark": "gate_distances",
        "environment": environment,
        "settings": vars(args) | {"json": None},
    }
    write_report(args.json, report | {"data": source.describe(), "results": rows})
    table = Table("retrieval heads", *get_args(distill.Sets))
    for row in rows:
        table.add_row(row["gates"], *(f"{row[sets]:.3f}" for sets in get_args(distill.Sets)))
    Console().print(table)


if __name__ == "__main__":
    main()
