"""How many slots does hard_kv leave to each head of a real model?

Random weights say nothing about which heads need much. Speed is therefore measured with lengths of
SmolLM2's heads: right after a prompt of the text of `jsparse eval` was compressed, and after each
of the compressions that follow while it decodes greedily. bench.eviction_speed replays them.

    python -m bench.eviction_trace --json build/eviction_trace.json
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.text import text_tokens
from jsparse.cache import KVCache
from jsparse.models.checkpoint import Params, load
from jsparse.policies.expressions import parse
from jsparse.policy import Eviction, Policy
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import Session

RECORDED = "hard_kv()"
LENGTHS, COMPRESSIONS = (2048, 4096), 2


def record(params: Params, policy: Policy, prompt: Sequence[int], compressions: int) -> list[Any]:
    """Returns the lengths of all heads by layer, after the prompt and after `compressions` more."""
    found, eviction = [], policy.eviction
    assert eviction is not None

    def note(cache: KVCache) -> None:
        lengths = np.stack([layer.lengths[0] for layer in cache.layers])
        found.append({"new_tokens": int(cache.positions[0]) - len(prompt), "lengths": lengths})

    def after_prompt(state, view, slots):
        assert eviction.after_prompt is not None
        state, cache = eviction.after_prompt(state, view, slots)
        note(cache)
        return state, cache

    steps = 1 + compressions * policy.services.period
    noting = policy._replace(eviction=Eviction(after_prompt, eviction.max_length))
    session = Session(params, noting, cache_spec(params, [prompt], steps, None, 16))
    session.read([prompt])
    for _ in session.steps(greedy, (), limits=[steps]):
        pass
    note(session.held.cache)
    return [entry | {"lengths": entry["lengths"].tolist()} for entry in found]


def main() -> None:
    """Records the lengths and prints what they are like."""
    parser = report_parser("eviction_trace", "Record how long hard_kv's heads are.", required=True)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the prompts"
    )
    args = parser.parse_args()
    environment = describe(allow_modified=args.allow_modified)
    params = load("smollm2")
    tokens, policy = text_tokens(params), parse(RECORDED)
    report: dict[str, Any] = {
        "benchmark": "eviction_trace",
        "environment": environment,
        "policy": policy.name,
        "model": "smollm2",
        "dtype": str(params.dtype),
        "traces": [],
    }
    for length in args.lengths:
        for entry in record(params, policy, tokens[:length], COMPRESSIONS):
            report["traces"].append({"prompt_tokens": length, **entry})
            lengths = np.array(entry["lengths"])
            print(
                f"{length} tokens and {entry['new_tokens']} more: {lengths.mean():.0f} slots per "
                f"head, from {lengths.min()} to {lengths.max()}",
                flush=True,
            )
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
