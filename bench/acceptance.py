"""How many of a policy's drafts does dense attention accept, and what does that make of it?

A prompt is read once; then dense attention decodes it, greedily or at --temperature, and each
policy drafts under `exact`. Three kinds of text, each cut to --context tokens:

    verse       the text of `jsparse eval`
    code        the package's own modules
    prose       the package's own documentation

For each policy and number of drafts K the report has: whether the text was dense attention's, the
share of drafts that were accepted, that by position in a round (of those that were drafted there),
the tokens per round, and the tokens per second beside dense attention's in the same process.

    python -m bench.acceptance --json build/acceptance.json
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.subprocesses import write_report

if TYPE_CHECKING:
    from jsparse.evaluation.shared_prefill import SharedPrefill

POLICIES = (
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


def texts(wanted: int) -> dict[str, str]:
    """Returns the texts, each of which has at least as many tokens."""
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


def decoded(
    shared: "SharedPrefill", index: int, drafts: int, new: int, temperature: float
) -> dict[str, Any]:
    """Decodes `new` tokens; returns the tokens, and what the rounds gave."""
    import jsparse
    from jsparse.runtime.request import requests
    from jsparse.runtime.sampling import chooser

    wanted = jsparse.SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
    vocab, runs = shared.params.config.vocab_size, []
    for _ in range(2):  # the first compiles
        session = shared.session(index, drafts=drafts)
        asked = requests(shared.params, [[0]], wanted, session.policy, seed=0)
        results = session.steps(*chooser(asked, vocab), limits=[new])
        made = np.asarray(next(results).tokens)[:, 0].tolist()
        began, rounds = time.perf_counter(), []
        for result in results:
            tokens = np.asarray(result.tokens)[:, 0].tolist()
            if result.drafts is None:
                made += tokens
            else:
                count, drafted = (int(x[0]) for x in result.drafts)
                made += tokens[:count]
                rounds.append((drafted, count - 1))
            if len(made) >= new:
                break
        runs.append({"tokens": made, "rounds": rounds, "seconds": time.perf_counter() - began})
        results.close()
    return runs[-1]


def figures(run: dict[str, Any], dense: dict[str, Any], drafts: int) -> dict[str, Any]:
    """Returns what a row of the report says."""
    drafted, accepted = (sum(column) for column in zip(*run["rounds"], strict=True))
    by_position = [
        sum(kept > at for _, kept in run["rounds"])
        / max(sum(number > at and kept >= at for number, kept in run["rounds"]), 1)
        for at in range(drafts)
    ]
    same = [a == b for a, b in zip(run["tokens"], dense["tokens"], strict=True)]
    return {
        "text_is_dense": all(same),
        "first_difference": None if all(same) else same.index(False),
        "drafted": drafted,
        "accepted_share": accepted / drafted,
        "accepted_by_position": by_position,
        "tokens_per_round": (len(run["tokens"]) - 1) / len(run["rounds"]),
        "over_dense": dense["seconds"] / run["seconds"],
    }


def main() -> None:
    """Runs every policy on every text and writes the report after each."""
    parser = report_parser("acceptance", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=6144, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=129, help="tokens to decode")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--drafts", nargs="+", type=int, default=list(DRAFTS), metavar="K")
    args = parser.parse_args()
    import jsparse
    from jsparse.evaluation.shared_prefill import as_policies, prime
    from jsparse.runtime import capacity
    from jsparse.text.prompts import tokenizer_of

    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    names = ("model", "context", "new", "temperature")
    report |= {name: getattr(args, name) for name in names} | {"rows": []}
    params = jsparse.load(args.model)
    for name, text in texts(args.context).items():
        ids = tokenizer_of(params, "the benchmark").encode(text)[: args.context]
        if len(ids) < args.context:
            raise SystemExit(f"error: {name} has {len(ids)} tokens, fewer than {args.context}")
        spec = capacity.cache_spec(params, [ids], args.new, None, 16)
        shared = prime(params, as_policies(["dense", *args.policies]), [ids], spec, lambda *_: None)
        dense = decoded(shared, 0, 0, args.new, args.temperature)
        for nth, policy in enumerate(args.policies, start=1):
            for drafts in args.drafts:
                run = decoded(shared, nth, drafts, args.new, args.temperature)
                row = {"text": name, "policy": policy, "drafts": drafts}
                row |= figures(run, dense, drafts)
                row |= {"dense_tokens_per_second": (args.new - 1) / dense["seconds"]}
                report["rows"].append(row)
                print(*(row[key] for key in ("text", "policy", "drafts", "text_is_dense")), end=" ")
                print(round(row["accepted_share"], 3), round(row["tokens_per_round"], 2), end=" ")
                print(f"{row['over_dense']:.2f}", flush=True)
                write_report(args.json, report)


if __name__ == "__main__":
    main()
