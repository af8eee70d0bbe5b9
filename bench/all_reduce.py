"""What do a step's all-reduces take, by the ways in which XLA can do them?

As many all-reduces, one after the other, as a model of 32 layers has in a step (64), of
[rows, 4096] in bf16: in a program that is run several times, and in one that loops over such steps,
as decode programs do. Ways:

    nccl            NCCL's
    nccl_graph      NCCL's, as a part of the GPU's graphs
    one_shot        a kernel of XLA's that reads the others' memory over NVLink, its default
    one_shot_graph  the same, as a part of the GPU's graphs

For each: microseconds per all-reduce, the share of them in which the host hands work over, and
what its kernel takes in a trace, where waiting for the other GPU counts, too.

    python -m bench.all_reduce --json build/all_reduce.json
"""

import itertools
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_timing import read_trace
from bench.lib.subprocesses import write_report

WIDTH, ALL_REDUCES, STEPS, REPEATS = 4096, 64, 16, 15
COMMANDS, KERNELS = "xla_gpu_enable_command_buffer", "xla_gpu_experimental_use_collective_kernels"


def ways() -> dict[str, dict[str, Any]]:
    """Returns the compiler's options for each way."""
    from jsparse.runtime.compilation import COMPILER_OPTIONS

    commands = COMPILER_OPTIONS[COMMANDS].replace(",COLLECTIVES", "")
    graph = {COMMANDS: f"{commands},COLLECTIVES"}
    return {
        "nccl": {COMMANDS: commands, KERNELS: ""},
        "nccl_graph": graph | {KERNELS: ""},
        "one_shot": {COMMANDS: commands},
        "one_shot_graph": graph,
    }


def measured(options: dict[str, Any], rows: int, ranks: int, *, loops: bool) -> dict[str, Any]:
    """Times one way with so many rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    from jsparse import ranks as of_ranks
    from jsparse.runtime.spread_programs import OWN, SAME

    mesh = Mesh(np.array(jax.devices()[:ranks]), (of_ranks.AXIS,))
    mine = jax.random.normal(jax.random.key(0), (ranks, rows, WIDTH), jnp.float32)
    mine = jax.device_put(mine.astype(jnp.bfloat16), NamedSharding(mesh, OWN))

    def step(_: Any, x: Any) -> Any:
        for _ in range(ALL_REDUCES):
            x = jax.lax.psum(x, of_ranks.AXIS) * jnp.bfloat16(1 / ranks)
        return x

    def body(x: Any, steps: Any) -> Any:
        return jax.lax.fori_loop(0, steps, step, x) if loops else step(0, x)

    spread = jax.shard_map(body, mesh=mesh, in_specs=(OWN, SAME), out_specs=OWN, check_vma=False)
    run, times = jax.jit(spread, compiler_options=options), 1 if loops else STEPS
    steps = jax.device_put(jnp.int32(STEPS), NamedSharding(mesh, SAME))
    whole, handed, made = [], [], jax.block_until_ready(run(mine, steps))
    for _ in range(REPEATS):
        made, began = mine, time.perf_counter()
        for _ in range(times):
            made = run(made, steps)
        handed.append(time.perf_counter() - began)
        jax.block_until_ready(made)
        whole.append(time.perf_counter() - began)
    traced = tempfile.mkdtemp()
    with jax.profiler.trace(traced):
        jax.block_until_ready(run(mine, steps))
    kernels = [x for x in read_trace(Path(traced)) if "psum" in x.name or "nccl" in x.name]
    names = Counter(x.name for x in kernels)
    wanted = mine.astype(jnp.float32).mean(0)
    return {
        "us_per_all_reduce": 1e6 * statistics.median(whole) / STEPS / ALL_REDUCES,
        "least_us": 1e6 * min(whole) / STEPS / ALL_REDUCES,
        "most_us": 1e6 * max(whole) / STEPS / ALL_REDUCES,
        "host_share": statistics.median(handed) / statistics.median(whole),
        "kernel_us": statistics.median(x.duration for x in kernels) if kernels else None,
        "kernels": names.most_common(3),
        "max_error": float(jnp.max(jnp.abs(made[0].astype(jnp.float32) - wanted))),
    }


def main() -> None:
    """Measures all ways and writes the report after each row."""
    parser = report_parser("all_reduce", (__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    report |= {"ranks": args.ranks, "width": WIDTH, "rows": []}
    for loops, rows, way in itertools.product((False, True), (1, 8, 64), ways()):
        row = {"loops": loops, "rows": rows, "way": way}
        row |= measured(ways()[way], rows, args.ranks, loops=loops)
        report["rows"].append(row)
        print(row, flush=True)
        write_report(args.json, report)


if __name__ == "__main__":
    main()
