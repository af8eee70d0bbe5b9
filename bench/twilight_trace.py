"""How many pages does Twilight keep on a real model? A trace of counts, and what replays it at other shapes.

Random weights give flat attention, of which top-p keeps nearly all. Speed is therefore measured with counts of SmolLM2:
of every layer that prunes, KV head and step, while dense attention's continuation of the text of `jsparse eval` is
decoded. The base is all tokens, so that a base that finds less than everything would keep no more.

    python -m bench.twilight_trace --json bench/results/twilight_trace/h200.json
"""

import argparse
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.lib.environment import describe
from bench.lib.recording import recording, text_tokens
from jsparse import policies
from jsparse.cache import KVCache
from jsparse.evaluation.forcing import force
from jsparse.models.checkpoint import Params, load
from jsparse.policy import Policy, State

RECORDED = "dense_layers(twilight(full(), p=0.95), n=2)"
LENGTHS = (1024, 2048, 4096, 8000)


def counting(policy: Policy, steps: int) -> Policy:
    """`policy`, and in its state the pages that heads kept, int32[layers, steps, B, K]; -1 where nothing was pruned."""

    def init(spec):
        counts = jnp.full((spec.num_layers, steps, spec.batch, spec.num_kv_heads), -1, jnp.int32)
        return policy.init(spec), jnp.zeros(spec.num_layers, jnp.int32), counts

    def select(state: State, layer: int, q: Array, cache: KVCache):
        inner, nth, counts = state
        chosen, summary, inner = policy.select(inner, layer, q, cache)
        kept = chosen.count if chosen.dense is None else jnp.where(chosen.dense, -1, chosen.count)
        return chosen, summary, (inner, nth.at[layer].add(1), counts.at[layer, nth[layer]].set(kept))

    return recording(policy, init, select)


def record(params: Params, prompts: Sequence[Sequence[int]], steps: int) -> list[int]:
    """The counts of all steps, layers and heads, by step."""
    forcing = force(params, [counting(policies.parse(RECORDED), steps)], prompts, max_new_tokens=steps)
    counts = np.asarray(deque(forcing.steps(1), maxlen=1)[0].state[2]).swapaxes(0, 1)
    return counts[counts >= 0].tolist()


def main() -> None:
    """Records, prints the means."""
    parser = argparse.ArgumentParser(prog="python -m bench.twilight_trace", description="Record what Twilight keeps.")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    params = load("smollm2")
    tokens = text_tokens(params)
    report: dict[str, Any] = {"benchmark": "twilight_trace", "environment": describe(), "policy": RECORDED}
    report |= {"model": "smollm2", "dtype": str(params.dtype), "steps": args.steps, "page_size": 16, "traces": []}
    for length in args.lengths:
        pages = record(params, [tokens[:length]], args.steps)
        report["traces"].append({"length": length, "pages": pages})
        print(f"{length} tokens: {16 * np.mean(pages):.0f} kept on average, {16 * np.max(pages)} at most", flush=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
