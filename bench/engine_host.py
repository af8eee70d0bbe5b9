"""What does an engine gain from host memory, and what do its pages take on the bus?

Llama 3.1 8B's shape, random bf16 weights and prompts. Parts:

    resident    prompts of 128K, 256 new each, where the device has room for K and V of one: two
                one after the other on the device, then four side by side with K and V in host
                memory, and once more when host memory has the prompts
    moved       answers of 16K that leave the device and come back: milliseconds per GB, beside
                copies of one array of that size to pinned memory and back
    answers     prompts of 2,048 tokens, 8,192 new each, where K and V have 20 GB: 64 under
                `hard_kv()`, 32 under dense attention, with --swap-space for answers that have to
                make room

Lengths are divided by --shorten. Each part is one process, since pinned memory is not given back.

    python -m bench.engine_host moved --json build/engine_host.json
"""

import statistics
import time
from typing import Any

from bench.engine_speed import LONG, LONG_ANSWER, NEW, PROMPT, SCARCE, memory_peaks, random_model
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report

POLICY = "quest(budget=2624)"
MOVED = 16_384
REPEATS = 5


def workload(params: Any, count: int, length: int, new: int) -> Any:
    """Returns random requests that begin differently."""
    from jsparse.benchmark.workload import random_workload

    return random_workload(
        params.config.vocab_size, num_prompts=count, input_len=length, output_len=new
    )


def engine(params: Any, policy: str, **options: Any) -> Any:
    """Returns an engine all of whose programs are compiled."""
    from jsparse.engine.core import Engine

    rows = options["max_num_seqs"]
    return Engine(params, policy, prepare=True, decode_rows=[rows], **options)


def resident(params: Any, shorten: int, **_others: Any) -> list[dict[str, Any]]:
    """Measures requests one at a time on the device, and four side by side in host memory."""
    from jsparse.benchmark.throughput import measure

    length, rows = LONG // shorten, []
    for policy, slots, count, times in ((POLICY, 1, 2, 1), (f"offloaded({POLICY})", 4, 4, 2)):
        asked = workload(params, count, length, NEW)
        made = engine(
            params,
            policy,
            max_num_seqs=slots,
            max_model_len=length + NEW,
            kv_cache_tokens=slots * (length + NEW),
        )
        measured = [measure(made, asked) for _ in range(times)]
        step = measured[-1]["decode_ms_per_step"]
        rows.append(
            {"policy": policy, "rows": slots, "host_gb": made.kv_host_bytes / 1e9}
            | {"measured": measured, "decode_ms_per_step": step}
            | {"decode_tokens_per_second": 1e3 * slots / step}
            | {"output_tokens_per_second": [m["output_tokens_per_second"] for m in measured]}
            | memory_peaks()
        )
        print("resident", {k: v for k, v in rows[-1].items() if k != "measured"}, flush=True)
        del made
    one, four = rows
    four["over_one_at_a_time"] = four["decode_tokens_per_second"] / one["decode_tokens_per_second"]
    return rows


def moved(params: Any, shorten: int, **_others: Any) -> list[dict[str, Any]]:
    """Times an answer that leaves the device and comes back, beside copies of one array."""
    import jax
    import jax.numpy as jnp

    from jsparse.engine.step_plan import Move
    from jsparse.host_memory.pages import device_sharding, host_sharding

    length = MOVED // shorten
    made = engine(
        params,
        "dense",
        max_num_seqs=2,
        max_model_len=2 * length,
        kv_cache_tokens=4 * length,
        swap_space=8.0,
    )
    groups = list(range(made.sizes.groups_for(length)))
    nbytes = made.spec._replace(pool_pages=len(groups) * made.spec.num_kv_heads).nbytes
    runner, move = made._runner, Move(0, 0, groups, 0)
    array, place = jnp.zeros(nbytes // 2, jnp.bfloat16), host_sharding()
    device = device_sharding()

    def seconds(run: Any) -> float:
        jax.block_until_ready(runner._slots)
        began = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - began

    def park() -> Any:
        runner._park(move)
        return runner._parked[0]

    def resume() -> Any:
        runner._resume(move)
        return runner._slots

    times: dict[str, list[float]] = {name: [] for name in ("park", "resume", "out", "back")}
    on_host, kinds = jax.device_put(array, place), set()
    for _ in range(REPEATS + 1):
        times["park"].append(seconds(park))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(runner._parked[0])}
        times["resume"].append(seconds(resume))
        times["out"].append(seconds(lambda: jax.device_put(array, place)))
        times["back"].append(seconds(lambda: jax.device_put(on_host, device)))
    of_slots = {x.sharding.memory_kind for x in jax.tree.leaves(runner._slots)}
    per_gb = {
        f"{name}_ms_per_gb": 1e12 * statistics.median(each[1:]) / nbytes
        for name, each in times.items()
    }
    shares = {
        "park_over_copy": per_gb["park_ms_per_gb"] / per_gb["out_ms_per_gb"],
        "resume_over_copy": per_gb["resume_ms_per_gb"] / per_gb["back_ms_per_gb"],
    }
    kept = {"parked_memory": sorted(map(str, kinds)), "slots_memory": sorted(map(str, of_slots))}
    return [{"tokens": length, "gb": nbytes / 1e9} | per_gb | shares | kept | memory_peaks()]


def answers(params: Any, shorten: int, swap_space: float, policy: str) -> list[dict[str, Any]]:
    """Measures long answers where memory is scarce."""
    from jsparse.benchmark.throughput import measure

    made = engine(
        params,
        policy,
        max_num_seqs=64,
        max_model_len=PROMPT + LONG_ANSWER,
        kv_cache_tokens=SCARCE,
        swap_space=swap_space,
    )
    print("prepared", flush=True)
    few = 64 if made.policy.evicts else 32
    measured = measure(made, workload(params, few, PROMPT, LONG_ANSWER // shorten))
    parked = {"parked_answers": made.counters.parked_answers, "swap_space": swap_space}
    return [{"policy": policy} | parked | measured | memory_peaks()]


PARTS = {"resident": resident, "moved": moved, "answers": answers}


def main() -> None:
    """Runs one part and writes the report."""
    parser = report_parser("engine_host", (__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--policy", default="dense", help="of the part answers")
    parser.add_argument("--shorten", type=int, default=1, help="divide lengths by this")
    parser.add_argument("--swap-space", type=float, default=0.0, help="GiB, of the part answers")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    options = {"swap_space": args.swap_space, "policy": args.policy}
    report |= {"part": args.part, "shorten": args.shorten}
    report["rows"] = PARTS[args.part](random_model(), args.shorten, **options)
    for row in report["rows"]:
        print(args.part, {k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
    write_report(args.json, report)


if __name__ == "__main__":
    main()
