"""What does LFPS's attention cost, next to dense attention and Quest?

One layer of the 8B shape selects, attends and takes in what it attended to, as in the decode step,
over a cache full of random K and V. Tables are of the prompt's random queries, and steps follow
each other on several caches in turn, so that no list is still in the device's cache. Quest lists as
many tokens. "exact" lists three times as many and attends to the best. In the table, microseconds
per call on the device, launch gaps included, or the host's where there is no profile; the times of
the parts are sums over kernels:

    candidates  the two tables' best positions
    products    of exact weights: the candidates' logits
    choose      the candidates of greatest weight
    attend      attention over the list, its logits' report, and the merge of its splits
    update      both tables take in the weights

    python -m bench.lfps_speed --json build/lfps_speed.json
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_cases import HEAD_DIM, ROTATED_BYTES, AttentionCase
from bench.lib.kernel_programs import Contender, Job, cache
from bench.lib.kernel_rows import Bandwidth, Settings, bandwidth, job_rows
from bench.lib.kernel_timing import LEAD_BYTES, TimedProgram, lead
from bench.lib.llama_8b import state_after_prompt
from bench.lib.peers import numbers
from bench.lib.subprocesses import write_report
from bench.twilight_speed import contender as stateless
from bench.twilight_speed import dense, spec_of
from jsparse.cache import CacheSpec, KVCache, StepView
from jsparse.policies.expressions import parse
from jsparse.policy import Policy
from jsparse.runtime.decode_step import attend_layer

SHAPES = (
    (1, 131072),
    (8, 131072),
    (1, 32768),
    (8, 32768),
    (1, 8192),
    (8, 8192),
    (1, 2048),
    (8, 2048),
)
BUDGETS, CALLS, COPIES = (0.02, 0.04), 8, 4
FORMS = {"lfps": "", "exact": ", exact=True"}
SIGNS = {
    "candidates": ("candidates_kernel",),
    "products": ("listed_products_kernel",),
    "choose": ("select_kernel",),
    "attend": ("attend_kernel", "_merge"),
    "update": ("update_kernel",),
}


def contender(policy: Policy, spec: CacheSpec) -> Contender:
    """Returns a maker of programs of CALLS steps, over the caches in turn; states are kept."""

    def run(states, caches, queries):
        states, results, out = list(states), [], None
        for nth, q in enumerate(queries):
            at = nth % len(caches)
            held = caches[at]
            lengths = held.layers[0].lengths
            q, lengths, out = jax.lax.optimization_barrier((q, lengths, out))
            layers = (held.layers[0]._replace(lengths=lengths),)
            held = held._replace(cache=held.cache._replace(layers=layers))
            found, state, _ = attend_layer(policy, 0, q, held, states[at])
            states[at] = policy.update(state, 0, found.stats, held)
            out = found.o
            results.append(out)
        return tuple(states), results

    step = jax.jit(run, donate_argnums=0)

    def program(caches, queries):
        kept = [tuple(state_after_prompt(policy, spec, held) for held in caches)]

        def call():
            kept[0], results = step(kept[0], caches, queries)
            return results

        return TimedProgram(call, len(queries))

    return program


def job(case: AttentionCase) -> Job:
    """Returns the job of all contenders on one shape; `bytes` are dense attention's."""
    spec = spec_of(case)
    copies = max(min(-(-COPIES * ROTATED_BYTES // case.pool_bytes), CALLS), 2)

    def build():
        held = [cache(case) for _ in range(copies)]
        keys = jax.random.split(jax.random.key(0), CALLS)
        queries = [
            jax.random.normal(key, (case.batch, case.heads, HEAD_DIM), jnp.bfloat16) for key in keys
        ]
        no_row = jnp.zeros(case.batch, jnp.bool_)
        caches = [KVCache((layer,), layer.lengths[:, 0], no_row) for layer in held]
        return list(map(StepView, caches)), queries

    listed = {
        f"{name} {share:.0%}": f"lfps(budget={share}{form})"
        for name, form in FORMS.items()
        for share in BUDGETS
    }
    pages = {
        f"quest {share:.0%}": f"quest(budget={int(share * case.context)})" for share in BUDGETS
    }
    contenders = {"dense": stateless(dense(), spec)}
    contenders |= {name: stateless(parse(text), spec) for name, text in pages.items()}
    contenders |= {name: contender(parse(text), spec) for name, text in listed.items()}
    return Job(case.name, case.pool_bytes, build, contenders, attention=case)


def parts(row: dict[str, Any]) -> dict[str, float]:
    """Returns microseconds of LFPS's parts; {} for the others."""
    kernels = row.get("by_kernel", {})
    if not any(name.startswith(SIGNS["update"]) for name in kernels):
        return {}
    return {
        part: sum(k["us"] * k["launches"] for name, k in kernels.items() if name.startswith(signs))
        for part, signs in SIGNS.items()
    }


def line(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    text = f"{row['case']:14}{row['contender']:12}"
    if "us" not in row:
        return f"{text}{row.get('refused') or row.get('error')}".replace("\n", " ")[:150]
    text += f"{row['us']['median']:9.1f}"
    if "device" not in row:
        text += "  by the host's clock"
    return text + "".join(f"  {name} {value:.1f}" for name, value in row["parts"].items())


def main() -> None:
    """Times the requested cases and prints a line for each."""
    parser = report_parser("lfps_speed", "Time LFPS's attention.")
    parser.add_argument("--cases", nargs="+", help="batch x context, such as 8x131072")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one shape for a CPU, to test the script; times mean nothing",
    )
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not args.tiny:
        parser.error("needs a GPU; --tiny tests the script on a CPU")
    shapes: Sequence[Sequence[int]] = [(2, 256)] if args.tiny else SHAPES
    if args.cases:
        shapes = [numbers(case) for case in args.cases]
        if wrong := [
            text for text, shape in zip(args.cases, shapes, strict=True) if len(shape) != 2
        ]:
            parser.error(f"--cases {wrong[0]}: must be batch x context")
    nbytes = LEAD_BYTES // 1000 if args.tiny else LEAD_BYTES
    report: dict[str, Any] = {
        "benchmark": "lfps_speed",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.local_devices()[0].device_kind,
        "environment": describe(allow_modified=args.allow_modified),
        "results": [],
    }
    before, settings = lead(nbytes), Settings(calls=40, repeats=3, runs=6)
    rate: Bandwidth = bandwidth(before, nbytes, settings, on_gpu=on_gpu)
    report["bandwidth"] = rate._asdict()
    for batch, context in shapes:
        case = AttentionCase(f"{batch} x {context}", batch, context, dense="all")
        rows = [row | {"parts": parts(row)} for row in job_rows(job(case), before, rate, settings)]
        report["results"] += rows
        print(*map(line, rows), sep="\n", flush=True)
        write_report(args.json, report)


if __name__ == "__main__":
    main()
