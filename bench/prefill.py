"""How fast is prefill of a long prompt, and how much memory does it need, next to Hugging Face?

Llama 3.1 8B's shape, random bf16 weights, random ids, batch 1. jsparse works in chunks, as
`generate` does. Hugging Face prefills the prompt in one piece through SDPA's flash attention, with
a DynamicCache and logits of the last token only. Each contender runs in its own process, with one
warm-up, which also compiles. Memory excludes weights and cache. A policy that builds an index of
the prompt does so within the time.

Methods of sparse prefill read the share of blocks that a real model made them read: --shares is a
report of bench.prompt_shares, which bench.lib.prompt_replay replays.

    python -m bench.prefill --json build/prefill.json [--prefill "xattention(threshold=0.9)"
                            --shares bench/results/prompt_shares/cpu.json]
"""

import json
import time
from pathlib import Path
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import LLAMA_8B, boundary_constants, huggingface_model
from bench.lib.subprocesses import run_child, spread, write_report

CONTENDERS = ("jsparse", "hf")


def jsparse_prefill(
    context: int, runs: int, policy: str, prefill: str, shares: Path | None
) -> dict[str, Any]:
    """Times the prefill of `generate`, including cache allocation and first logits."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from bench.lib.prompt_replay import recorded_shares, replayed
    from jsparse.cache import CacheSpec
    from jsparse.models.checkpoint import Params
    from jsparse.models.transformer import random_weights
    from jsparse.policies.prefill_methods import as_method
    from jsparse.policies.sparse_prefill import with_prefill
    from jsparse.runtime.session import Session

    sparse = as_method(prefill)
    if sparse is not None and shares is not None:
        sparse = replayed(sparse, recorded_shares(shares, prefill))
    method = with_prefill(policy, sparse or "dense")
    weights = random_weights(LLAMA_8B, jnp.bfloat16)
    params = Params(weights, LLAMA_8B, None, {}, "random 8B", constants=boundary_constants())
    spec = CacheSpec(
        LLAMA_8B.num_layers,
        1,
        LLAMA_8B.num_heads,
        LLAMA_8B.num_kv_heads,
        LLAMA_8B.head_dim,
        16,
        context // 16,
        params.dtype,
    )
    ids = np.random.default_rng(0).integers(LLAMA_8B.vocab_size, size=context).tolist()

    def once() -> float:
        began = time.perf_counter()
        session = Session(params, method, spec)
        session.prefill([ids])
        jax.block_until_ready(session.prefilled)
        return time.perf_counter() - began

    warm_up = once()
    times = [once() for _ in range(runs)]
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    peak = (jax.local_devices()[0].memory_stats() or {})["peak_bytes_in_use"]
    return {
        "seconds": spread(times),
        "warm_up_seconds": warm_up,
        "weight_bytes": weight_bytes,
        "cache_bytes": spec.nbytes,
        "peak_bytes": peak,
        "beside_bytes": peak - weight_bytes - spec.nbytes,
    }


def huggingface_prefill(context: int, runs: int) -> dict[str, Any]:
    """Times transformers' forward over the whole prompt."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import DynamicCache

    model = huggingface_model()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(LLAMA_8B.vocab_size, (1, context), device="cuda")

    @torch.no_grad()
    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(
                ids,
                past_key_values=DynamicCache(config=model.config),
                use_cache=True,
                logits_to_keep=1,
            )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    warm_up = once()
    times = [once() for _ in range(runs)]
    return {
        "seconds": spread(times),
        "warm_up_seconds": warm_up,
        "weight_bytes": weight_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    """Runs both contenders on every length and prints a table."""
    parser = report_parser("prefill", "Time prefill of the 8B shape.")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[32768, 131072], help="prompt lengths"
    )
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default all)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="timed runs after the warm-up (default 3)"
    )
    parser.add_argument(
        "--policy", nargs="+", default=["dense"], help="policy expressions (default dense)"
    )
    parser.add_argument(
        "--prefill", nargs="+", default=["dense"], help="prefill methods (default dense)"
    )
    parser.add_argument(
        "--shares", type=Path, help="report of bench.prompt_shares to replay for sparse prefill"
    )
    parser.add_argument(
        "--child",
        nargs=4,
        metavar=("NAME", "CONTEXT", "POLICY", "PREFILL"),
        help="measure one here and print a JSON line",
    )
    args = parser.parse_args()
    if args.child:
        name, context, policy, prefill = args.child
        run = (
            jsparse_prefill(int(context), args.runs, policy, prefill, args.shares)
            if name == "jsparse"
            else huggingface_prefill(int(context), args.runs)
        )
        print(json.dumps(run))
        return
    settings = {"warm_ups": 1, "runs": args.runs, "shares": args.shares and str(args.shares)}
    replay = ["--shares", str(args.shares.resolve())] if args.shares else []
    methods = [(policy, prefill) for policy in args.policy for prefill in args.prefill]
    report = {
        "benchmark": "prefill",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": settings,
        "results": [],
    }
    for context in args.contexts:
        for name in args.only:
            for policy, prefill in methods if name == "jsparse" else [("dense", "dense")]:
                arguments = ["--child", name, str(context), policy, prefill, *replay]
                arguments += ["--runs", str(args.runs)]
                row = {
                    "context": context,
                    "name": name,
                    "policy": policy,
                    "prefill": prefill,
                    **run_child("bench.prefill", arguments, timeout_s=500),
                }
                row["tokens_per_second"] = context / row["seconds"]["median"]
                report["results"].append(row)
                print(summary(row), flush=True)
                write_report(args.json, report)


def summary(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    seconds = row["seconds"]
    text = (
        f"{row['context']:>7} {row['name']:8} {row['policy']:20} {row['prefill']:32} "
        f"{row['tokens_per_second']:8.0f} tokens/s, "
        f"{seconds['median']:.2f} s ({seconds['min']:.2f}-{seconds['max']:.2f}), "
        f"peak {row['peak_bytes'] / 1e9:.1f} GB"
    )
    beside = row.get("beside_bytes")
    return text if beside is None else text + f", {beside / 1e9:.2f} GB beside weights and cache"


if __name__ == "__main__":
    main()
