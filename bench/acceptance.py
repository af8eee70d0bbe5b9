"""How many of a policy's drafts does dense attention accept, and how fast is decoding then?

Prompts are prefilled once. Then dense attention decodes them, greedily or at --temperature, and
each policy drafts under `exact`. The --rows of a batch are windows of --context tokens, taken in
turn from:

    verse       the text of `jsparse eval`
    code        the package's own modules
    prose       the package's own documentation

For each policy and number of drafts K, the report has the time next to dense attention's, measured
just before it; the position where rows first differ from its text, and the gap of the two best
logits there; and by kind of text the acceptance rate, the acceptance rate by position in a round
(of the drafts made there), and the tokens per round. With --fewer-rows, dense attention is compared
with itself, since it rounds differently at another batch size.

    python -m bench.acceptance --json build/acceptance.json
"""

import gc
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.subprocesses import write_report

if TYPE_CHECKING:
    from jsparse.evaluation.shared_prefill import SharedPrefill
    from jsparse.runtime.decoding import StepResult

POLICIES = (
    "verified(budget=512)",
    "quest(budget=512)",
    "quest(budget=1024)",
    "double_sparsity(budget=512)",
    "twilight(quest(budget=2048), p=0.9)",
    "lychee_cluster(budget=1024)",
    "lychee_decode('smollm2', value=1024)",
    "lfps(budget=0.1)",
    "streaming(sink=4, recent=508)",
)
DRAFTS = (2, 4, 8)
# an engine's counters in the report
COUNTED = ("decode_steps", "plan_seconds", "dispatch_seconds", "results_seconds")


def texts(wanted: int) -> dict[str, str]:
    """Returns the texts, each cut to at least `wanted` tokens if it is long enough."""
    folders = {
        "verse": REPOSITORY / "jsparse/evaluation/texts",
        "code": REPOSITORY / "jsparse/runtime",
        "prose": REPOSITORY / "docs",
    }
    endings = {"verse": "*.txt", "code": "*.py", "prose": "*.md"}
    # a token has less than 8 characters on average in all of them
    return {
        name: "\n".join(_read(path) for path in sorted(folder.glob(endings[name])))[: 8 * wanted]
        for name, folder in folders.items()
    }


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def windows(ids: list[int], length: int, count: int) -> list[list[int]]:
    """Returns `count` windows of `length` tokens, evenly spaced."""
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [ids[start : start + length] for start in starts]


def prompts_of(params: Any, context: int, rows: int) -> dict[str, list[list[int]]]:
    """Returns windows of each text, `rows` in all."""
    from jsparse.text.prompts import tokenizer_of

    made, found = {}, texts(context + 256 * rows)
    for at, (name, text) in enumerate(found.items()):
        ids = tokenizer_of(params, "the benchmark").encode(text)
        if len(ids) < context:
            raise SystemExit(f"error: --context {context}: a text has {len(ids)} tokens")
        made[name] = windows(ids, context, len(range(at, rows, len(found))))
    return made


class Run(NamedTuple):
    """Decoded rows.

    Attributes:
        tokens: the tokens of each row.
        rounds: the drafted and accepted numbers of each round of each row.
        seconds: the time of all rows after their first tokens, without compilation.
    """

    tokens: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    seconds: float


def decoded(
    shared: "SharedPrefill", index: int, drafts: int | None, new: int, temperature: float
) -> Run:
    """Decodes `new` tokens of each row, twice, since the first run compiles."""
    runs = []
    for _ in range(2):
        session, asked = shared.session(index, drafts=drafts), choice(shared, index, temperature)
        limits = [new] * shared.spec.batch
        held = [int(length) for length in shared.prefilled[0].cache.positions]
        session.expect(*asked, prompts=held, limits=limits)
        results = session.steps(*asked, limits=limits)
        kept = [next(results)]
        kept[0].tokens.block_until_ready()
        began = time.perf_counter()
        made = np.ones(shared.spec.batch, int)
        for result in results:
            kept.append(result)
            # the host reads each program's results while the next one runs, as in serving
            made += counts(kept[-2]) if len(kept) > 2 else 0
            if made.min() >= new:
                break
        kept[-1].tokens.block_until_ready()
        runs.append(read(kept, new, time.perf_counter() - began))
        results.close()
    return runs[-1]


def counts(result: "StepResult") -> np.ndarray:
    """Returns the number of tokens that each row got from a program."""
    if result.drafts is None:
        return np.full(result.tokens.shape[1], len(result.tokens))
    return np.asarray(result.drafts.counts)


def choice(shared: "SharedPrefill", index: int, temperature: float) -> Any:
    """Returns the token chooser and its initial carry."""
    import jsparse
    from jsparse.runtime.request import requests
    from jsparse.runtime.sampling import chooser

    wanted = jsparse.SamplingParams(temperature=temperature, ignore_eos=True)
    rows = [[0]] * shared.spec.batch
    asked = requests(shared.params, rows, wanted, shared.policies[index], seed=0)
    return chooser(asked, shared.params.config.vocab_size)


def read(results: "Sequence[StepResult]", new: int, seconds: float) -> Run:
    """Returns the tokens and rounds of each row."""
    rows = range(results[0].tokens.shape[1])
    run = Run([[] for _ in rows], [[] for _ in rows], seconds)
    for result in results:
        tokens, number = np.asarray(result.tokens), counts(result)
        for row in rows:
            if len(run.tokens[row]) < new:
                run.tokens[row].extend(tokens[: number[row], row].tolist())
                if result.drafts is None:
                    continue
                if drafted := int(result.drafts.drafted[row]):
                    run.rounds[row].append((drafted, int(number[row]) - 1))
                else:  # a program of several rounds
                    run.rounds[row] += [(0, 0)] * int(number[row])
    for row in rows:
        del run.tokens[row][new:]
    return run


def gaps(shared: "SharedPrefill", new: int) -> np.ndarray:
    """Returns the gap between dense attention's two highest logits, [new, rows]."""
    import jax

    def gap(logits: Any) -> Any:
        best = jax.lax.top_k(logits, 2)[0]
        return best[..., 0] - best[..., 1]

    session = shared.session(0)
    limits = [new] * shared.spec.batch
    results = session.steps(*choice(shared, 0, 0.0), limits=limits, keep_logits=True)
    kept = []
    for result in results:
        kept.append(np.asarray(jax.jit(gap)(result.logits)))
    return np.concatenate(kept)[:new]


def differences(run: Run, dense: Run, gaps: np.ndarray | None) -> list[dict[str, Any]]:
    """Returns where rows first differ from dense attention's, with the gap of the two best logits.

    After a difference the texts diverge and are not compared.
    """
    found = []
    for row, (own, others) in enumerate(zip(run.tokens, dense.tokens, strict=False)):
        same = [a == b for a, b in zip(own, others, strict=True)]
        if not all(same):
            at = same.index(False)
            gap = None if gaps is None else float(gaps[at, row])
            found.append({"row": row, "token": at, "gap": gap})
    return found


def compared(differ: list[dict[str, Any]], rows: int, new: int) -> int:
    """Returns the number of tokens whose preceding text was the same."""
    return rows * new - sum(new - 1 - each["token"] for each in differ)


def accepted(rounds: Sequence[Sequence[tuple[int, int]]], new: int) -> dict[str, Any]:
    """Returns a report's statistics of the rounds of some rows of `new` tokens each."""
    of_all = [each for row in rounds for each in row]
    drafted, kept = (sum(column) for column in zip(*of_all, strict=True))
    by_position = [
        sum(kept > at for _, kept in of_all)
        / max(sum(number > at and kept >= at for number, kept in of_all), 1)
        for at in range(max(number for number, _ in of_all))
    ]
    return {
        "drafted": drafted,
        "accepted_share": kept / max(drafted, 1),
        "accepted_by_position": by_position,
        "tokens_per_round": len(rounds) * (new - 1) / len(of_all),
    }


def served(
    params: Any, prompts: list[list[int]], new: int, policy: str, drafts: int | None
) -> tuple[dict[str, Any], Run]:
    """Serves the prompts with an engine; `drafts` of dense attention are 0, and None is to choose.

    Returns a report's row and the outputs; the row has counters of the last run.
    """
    import jsparse

    exact = {} if drafts == 0 else {"exact": True, "num_speculative_tokens": drafts}
    rows, length = len(prompts), len(prompts[0]) + new
    llm = jsparse.LLM(
        params, policy, max_num_seqs=rows, max_model_len=length, decode_rows=[rows], **exact
    )
    wanted = jsparse.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    seconds, counters, before = [], llm.engine.counters, {}
    for nth in range(3):
        while nth and llm.engine.programs.compiling:  # programs that are optional
            time.sleep(0.1)
        counters.draft_tokens = counters.accepted_tokens = 0
        before = {name: getattr(counters, name) for name in COUNTED}
        began = time.perf_counter()
        outs = llm.generate(prompts, wanted, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    share = counters.accepted_tokens / max(counters.draft_tokens, 1)
    row = {"engine": True, "policy": policy, "drafts": drafts or 0, "accepted_share": share}
    row |= {name: getattr(counters, name) - before[name] for name in COUNTED}
    run = Run([list(out.outputs[0].token_ids) for out in outs], [], max(seconds[1:]))
    return row | {"first_seconds": seconds[0]}, run


def main() -> None:
    """Runs every policy on every text and writes the report after each."""
    parser = report_parser("acceptance", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=6144, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=129, help="tokens to decode per prompt")
    parser.add_argument("--rows", type=int, default=3, help="prompts, which decode in one batch")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument(
        "--drafts", nargs="+", type=int, default=list(DRAFTS), metavar="K", help="0 is to choose"
    )
    parser.add_argument(
        "--fewer-rows", type=int, help="also compare dense attention with itself, in fewer rows"
    )
    parser.add_argument(
        "--engine", nargs="+", type=int, metavar="K", help="also serve the prompts by engines"
    )
    args = parser.parse_args()
    import jsparse
    from jsparse.evaluation.shared_prefill import as_policies, prime
    from jsparse.runtime import capacity

    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    names = ("model", "context", "new", "rows", "temperature")
    report |= {f"num_{name}" if name == "rows" else name: getattr(args, name) for name in names}
    params = jsparse.load(args.model)
    found = prompts_of(params, args.context, args.rows)
    prompts = list(found.values())
    rows = [prompts[row % len(found)][row // len(found)] for row in range(args.rows)]
    spec = capacity.cache_spec(params, rows, args.new, None, 16)
    began = time.perf_counter()
    shared = prime(params, as_policies(["dense", *args.policies]), rows, spec, lambda *_: None)
    shared.prefilled[0].logits.block_until_ready()
    report["read_seconds"] = time.perf_counter() - began
    dense = decoded(shared, 0, 0, args.new, args.temperature)
    own_gaps = None if args.temperature else gaps(shared, args.new)
    report["results"] = []

    def tell(row: dict[str, Any], run: Run, dense: Run) -> None:
        differ = differences(run, dense, own_gaps)
        row |= {"seconds": run.seconds, "dense_seconds": dense.seconds}
        row |= {"over_dense": dense.seconds / run.seconds}
        row |= {"compared": compared(differ, len(run.tokens), args.new), "differences": differ}
        report["results"].append(row)
        print(*(row.get(key) for key in ("policy", "drafts")), end=" ")
        print(f"{row['over_dense']:.2f}, {len(differ)} of {row['compared']} differ", end=" ")
        for of in row.get("texts", {}).values():
            print(f"{of['accepted_share']:.3f} {of['tokens_per_round']:.2f}", end=" ")
        print(flush=True)
        write_report(args.json, report)

    for nth, policy in enumerate(args.policies, start=1):
        for drafts in args.drafts:
            # GPUs slow down as they warm up
            dense = decoded(shared, 0, 0, args.new, args.temperature)
            run = decoded(shared, nth, drafts or None, args.new, args.temperature)
            by_text = {
                name: accepted(run.rounds[at :: len(found)], args.new)
                for at, name in enumerate(found)
                if at < args.rows
            }
            tell({"policy": policy, "drafts": drafts, "texts": by_text}, run, dense)
    if args.fewer_rows:
        fewer = rows[: args.fewer_rows]
        spec = capacity.cache_spec(params, fewer, args.new, None, 16)
        del shared
        shared = prime(params, as_policies(["dense"]), fewer, spec, lambda *_: None)
        run = decoded(shared, 0, 0, args.new, args.temperature)
        tell({"policy": "dense", "rows": args.fewer_rows}, run, dense)
    if args.engine:
        del shared
        row, dense = served(params, rows, args.new, "dense", 0)
        tell(row, dense, dense)
        for policy, drafts in product(args.policies, args.engine):
            gc.collect()  # the engine before
            tell(*served(params, rows, args.new, policy, drafts or None), dense)


if __name__ == "__main__":
    main()
