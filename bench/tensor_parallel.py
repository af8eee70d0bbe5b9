"""How much faster is a model with a second GPU that has half of its heads?

Random bf16 weights and prompts of Llama 3.1's shapes, in an engine, on each number of GPUs in
--ranks:

    one         a prompt of 128K, 256 new
    eight       eight prompts of 30,720, 256 new
    many        three prompts of 256K, 64 new, whose K and V do not fit on one GPU of 80 GB;
                only on several, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.94 to make room
    large       the shape of the 70B model: a prompt of 64K, 64 new; only on several

    python -m bench.tensor_parallel one eight --json build/tensor_parallel.json
"""

import gc
import json
import time
from dataclasses import replace
from typing import Any

from bench.engine_speed import memory_peaks, random_model
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import LLAMA_8B, LLAMA_70B, READ_BANDWIDTHS
from bench.lib.subprocesses import write_report

LLAMA_256K = replace(LLAMA_8B, max_position_embeddings=2**18 + 256)
K = 1024
# shape, prompts, their length, new tokens, and whether one GPU has room
PARTS = {
    "one": (LLAMA_8B, 1, 128 * K - 256, 256, True),
    "eight": (LLAMA_8B, 8, 30 * K, 256, True),
    "many": (LLAMA_256K, 3, 256 * K, 64, False),
    "large": (LLAMA_70B, 1, 64 * K, 64, False),
}


def floor_ms(shape: Any, rows: int, tokens: int, ranks: int, device: str) -> float:
    """Returns the time to read a GPU's weights, and its K and V of `tokens` tokens per row."""
    head = 0 if shape.tie_word_embeddings else shape.hidden_size * shape.vocab_size
    weights = 2 * (shape.num_layers * shape.layer_weights + head)
    of_token = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    total = weights + rows * tokens * of_token
    return 1e3 * total / ranks / READ_BANDWIDTHS.get(device, READ_BANDWIDTHS["NVIDIA H200"])


def measured(part: str, policy: str, ranks: int) -> dict[str, Any]:
    """Measures a part on `ranks` GPUs."""
    import jax

    from jsparse.benchmark.throughput import measure
    from jsparse.benchmark.workload import random_workload
    from jsparse.engine.core import Engine
    from jsparse.engine.options import EngineOptions

    shape, rows, length, new, _ = PARTS[part]
    began = time.perf_counter()
    options = EngineOptions(
        max_num_seqs=rows,
        max_model_len=length + new,
        kv_cache_tokens=rows * (length + new),
        decode_rows=[rows],
        prepare=True,
    )
    made = Engine(random_model(shape, ranks), policy, options)
    started = time.perf_counter() - began
    print(f"{part} on {ranks}: started after {started:.0f} s", flush=True)
    asked = random_workload(
        shape.vocab_size, num_prompts=rows, input_len=length, output_len=new, seed=1
    )
    figures = measure(made, asked)
    device = jax.devices()[0].device_kind
    attended = (figures["attended_fraction"] or 1.0) * (length + new / 2)
    floor = floor_ms(shape, rows, int(attended), ranks, device)
    row = {"part": part, "policy": policy, "ranks": ranks, "start_seconds": started}
    row |= {"step_ms": figures["decode_ms_per_step"], "floor_ms": floor}
    row |= {"first_tokens_seconds": figures["ttft_p99_ms"] / 1e3}
    del made
    gc.collect()
    return row | figures | memory_peaks()


def main() -> None:
    """Runs the parts for each policy and writes the report after each row."""
    parser = report_parser("tensor_parallel", (__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--policies", nargs="+", default=["dense"], metavar="POLICY")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1])
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    report |= {"rows": []}
    for policy in args.policies:
        for part in args.parts:
            for ranks in (each for each in args.ranks if each > 1 or PARTS[part][4]):
                row = measured(part, policy, ranks)
                report["rows"].append(row)
                shown = ("step_ms", "floor_ms", "first_tokens_seconds", "device_peak_gb")
                print(part, policy, ranks, json.dumps({k: row[k] for k in shown}), flush=True)
                write_report(args.json, report)


if __name__ == "__main__":
    main()
