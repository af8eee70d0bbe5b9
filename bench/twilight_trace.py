"""How many pages does Twilight keep on a real model?

Random weights give nearly flat attention, which top-p hardly prunes. Speed is therefore measured
with counts of SmolLM2, for every layer that prunes, KV head and step, while it decodes dense
attention's continuation of the text of `jsparse eval`. The base is all tokens, so that a base that
finds less than everything would keep no more. lib/replay.py replays the counts at other shapes.

    python -m bench.twilight_trace --json build/twilight_trace.json
"""

import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.text import text_tokens
from jsparse.cache import StepView
from jsparse.evaluation.teacher_forcing import force
from jsparse.models.checkpoint import Params, load
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.expressions import parse
from jsparse.policy import Policy

RECORDED = "dense_layers(twilight(all_pages(), p=0.95), n=2)"
LENGTHS = (1024, 2048, 4096, 8000)


def counting(policy: Policy, steps: int) -> Policy:
    """Returns `policy` with a state that records the number of pages that each head keeps.

    The counts are int32[layers, steps, B, K], -1 where nothing was pruned.
    """

    def init(spec):
        counts = jnp.full((spec.num_layers, steps, spec.batch, spec.num_kv_heads), -1, jnp.int32)
        return jnp.zeros(spec.num_layers, jnp.int32), counts

    def select(state: WrappedState, layer: int, q: Array, view: StepView):
        nth, counts = state.own
        chosen, summary, inner = policy.select(state.base, layer, q, view)
        kept = chosen.count if chosen.dense is None else jnp.where(chosen.dense, -1, chosen.count)
        own = nth.at[layer].add(1), counts.at[layer, nth[layer]].set(kept)
        return chosen, summary, WrappedState(inner, own)

    return with_state(policy, init, select=select)


def record(params: Params, prompts: Sequence[Sequence[int]], steps: int) -> list[int]:
    """Returns the counts of all steps, layers and heads, by step."""
    forcing = force(params, [counting(parse(RECORDED), steps)], prompts, max_new_tokens=steps)
    counts = np.asarray(forcing.last_state(1).own[1]).swapaxes(0, 1)
    return counts[counts >= 0].tolist()


def main() -> None:
    """Records the counts and prints their means."""
    parser = report_parser("twilight_trace", "Record how many pages Twilight keeps.", required=True)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the prompts"
    )
    parser.add_argument("--steps", type=int, default=32, help="decode steps (default 32)")
    args = parser.parse_args()
    environment = describe(allow_modified=args.allow_modified)
    params = load("smollm2")
    tokens = text_tokens(params)
    report: dict[str, Any] = {
        "benchmark": "twilight_trace",
        "environment": environment,
        "policy": RECORDED,
    }
    report |= {
        "model": "smollm2",
        "dtype": str(params.dtype),
        "steps": args.steps,
        "page_size": 16,
        "traces": [],
    }
    for length in args.lengths:
        pages = record(params, [tokens[:length]], args.steps)
        report["traces"].append({"length": length, "pages": pages})
        print(
            f"{length} tokens: {16 * np.mean(pages):.0f} kept on average, "
            f"{16 * np.max(pages)} at most",
            flush=True,
        )
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
