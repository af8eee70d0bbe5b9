"""How soon does a conversation answer whose K and V had to make room for others?

8 conversations of 32,768 tokens take turns, and the device has room for three. Llama 3.1 8B's
shape, random bf16 weights, dense attention. Each turn appends a message of 128 tokens to the
conversation so far and asks for 16 tokens. Seconds to the first token of a turn, of

    host        an engine with host memory for all conversations
    again       an engine without, which reads the conversation again
    device      the turn of a conversation that is still on the device

and for `host` the blocks copied each way per turn.

    python -m bench.returning_turns --json build/returning_turns.json
    python -m bench.returning_turns --tiny      # on a CPU
"""

import time
from typing import Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report

TALKS, FIT, TURNS, NEW = 8, 3, 3, 16


def first_token(llm: Any, talk: list[int], message: list[int]) -> tuple[float, int]:
    """Appends a message and its answer to a conversation.

    Returns the seconds to the first token, and the number of cached tokens.
    """
    from jsparse import SamplingParams

    talk += message
    own = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    (out,) = llm.generate([talk], own, use_tqdm=False)
    talk += out.outputs[0].token_ids
    return out.metrics.time_to_first_token, out.num_cached_tokens


def measured(llm: Any, length: int, message: int, turns: int) -> dict[str, Any]:
    """Returns the times of all turns after the first, and of more turns on the device."""
    rng, size = np.random.default_rng(0), llm.engine.params.config.vocab_size

    def tokens(count: int) -> list[int]:
        return rng.integers(size, size=count).tolist()

    talks = [tokens(length) for _ in range(TALKS)]
    for talk in talks:
        first_token(llm, talk, tokens(message))
    counters = llm.engine.counters
    out, back, began = counters.blocks_out, counters.blocks_in, time.perf_counter()
    took = [first_token(llm, talk, tokens(message)) for _ in range(turns) for talk in talks]
    seconds, count = time.perf_counter() - began, len(took)
    there = [first_token(llm, talks[-1], tokens(message)) for _ in range(TURNS)]
    return {
        "turn": spread([first for first, _ in took]),
        "device": spread([first for first, _ in there]),
        "least_cached": min(cached for _, cached in took),
        "blocks_out": (counters.blocks_out - out) / count,
        "blocks_in": (counters.blocks_in - back) / count,
        "block_bytes": llm.engine.block_bytes,
        "seconds_per_turn": seconds / count,
    }


def main() -> None:
    """Measures an engine with host memory and one without, and writes the report."""
    parser = report_parser("returning_turns", (__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    import jsparse
    from bench.engine_speed import random_model
    from bench.lib import eviction_steps

    params = random_model(eviction_steps.tiny().model) if args.tiny else random_model()
    length, message, block = (512, 32, 64) if args.tiny else (32_768, 128, 512)
    longest = length + (2 * TURNS + 1) * (message + NEW)
    longest = -(-longest // block) * block
    options = {
        "max_model_len": longest,
        "max_num_seqs": 1,
        "kv_cache_tokens": FIT * longest,
    }
    config = params.config
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    token_bytes *= params.dtype.itemsize
    gib = TALKS * longest * token_bytes / 2**30  # for conversations on the device, too
    report |= {"length": length, "message": message, "host_gib": gib, "unit": "s"}
    report["results"] = {}
    for name, size, turns in (("host", gib, TURNS), ("again", 0.0, 1)):
        llm = jsparse.LLM(params, "dense", kv_offloading_size=size, **options)
        own = report["results"][name] = measured(llm, length, message, turns)
        del llm
        write_report(args.json, report)
        print(line(name, own["turn"]), flush=True)
    host = report["results"]["host"]
    print(line("device", host["device"]))
    copied = ", ".join(f"{host[way]:.1f} {way[7:]}" for way in ("blocks_out", "blocks_in"))
    print(f"blocks   {copied} per turn, of {host['block_bytes'] / 1e6:.1f} MB")


def line(name: str, seconds: dict[str, float]) -> str:
    """Formats a line of the table."""
    return f"{name:8} {seconds['median']:.3f} s ({seconds['min']:.3f}-{seconds['max']:.3f})"


if __name__ == "__main__":
    main()
