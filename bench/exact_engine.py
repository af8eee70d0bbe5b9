"""What does `exact` make of an engine's speed on real text, and do its answers stay dense's own?

The --rows are windows of --context tokens of the texts of bench.acceptance, all asked for at once,
greedily. Each engine serves them three times: the first compiles and reads the prompts, the others
take them from the prefix cache; the slower of these counts. For each engine the report has its
time beside that of the engine of dense attention, where answers first differed from its answers,
and the share of drafts that were accepted. The last engine answers every second request under its
policy alone (exact=False), the others exactly.

    python -m bench.exact_engine --json build/exact_engine.json
"""

import gc
import itertools
import time
from typing import Any

from bench.acceptance import Run, compared, differences, prompts_of
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report


def served(params: Any, prompts: Any, new: int, policy: str, **options: Any) -> dict[str, Any]:
    """Serves the prompts by an engine of its own; `mixed` is that every second is not exact."""
    import jsparse

    mixed = options.pop("mixed", False)
    llm = jsparse.LLM(
        params,
        policy,
        max_num_seqs=len(prompts),
        max_model_len=len(prompts[0]) + new,
        decode_rows=[len(prompts)],
        **options,
    )
    asked = [
        jsparse.SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            exact=False if mixed and nth % 2 else None,
        )
        for nth in range(len(prompts))
    ]
    seconds, counters = [], llm.engine.counters
    for _ in range(3):
        counters.draft_tokens = counters.accepted_tokens = counters.decode_steps = 0
        began = time.perf_counter()
        outs = llm.generate(prompts, asked)
        seconds.append(time.perf_counter() - began)
    return {
        "first_seconds": seconds[0],
        "seconds": max(seconds[1:]),
        "steps_and_rounds": counters.decode_steps,
        "drafted": counters.draft_tokens,
        "accepted_share": counters.accepted_tokens / max(counters.draft_tokens, 1),
        "run": Run([out.outputs[0].token_ids for out in outs], [], max(seconds[1:])),
    }


def main() -> None:
    """Runs the engines and writes the report after each."""
    parser = report_parser("exact_engine", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=6144, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=129, help="tokens to decode of each")
    parser.add_argument("--rows", type=int, default=3, help="prompts, which decode in one batch")
    parser.add_argument("--policy", default="verified(budget=512)")
    parser.add_argument(
        "--drafts", nargs="+", type=int, default=[4, 0], metavar="K", help="0 is to choose"
    )
    args = parser.parse_args()
    import jsparse

    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    names = ("model", "context", "new", "policy")
    report |= {name: getattr(args, name) for name in names} | {"num_rows": args.rows, "results": []}
    params = jsparse.load(args.model)
    prompts = list(itertools.chain(*prompts_of(params, args.context, args.rows).values()))
    dense: Run | None = None
    exact = {"exact": True}
    engines = [("dense", {}), (args.policy, {})]
    engines += [(args.policy, exact | {"num_speculative_tokens": k or None}) for k in args.drafts]
    engines.append((args.policy, exact | {"mixed": True}))
    for policy, options in engines:
        row = {"policy": policy} | options | served(params, prompts, args.new, policy, **options)
        gc.collect()
        run = row.pop("run")
        dense = dense or run
        differ = differences(run, dense, None)
        row["over_dense"] = dense.seconds / run.seconds
        row["compared"] = compared(differ, args.rows, args.new)
        report["results"].append(row | {"differences": differ})
        print(len(differ), "differ", row, flush=True)
        write_report(args.json, report)


if __name__ == "__main__":
    main()
