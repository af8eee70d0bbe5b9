"""What share of a prompt's blocks does each method of sparse prefill read, in every head?

A model prefills the start of a text, once per length and method. Of the blocks of 128 keys that
causal attention would read for blocks of 128 queries, the report has the share of every layer and
query head, and `bench.prefill --shares` replays them on random weights.

    python -m bench.prompt_shares --model smollm2 --contexts 8192 --json build/prompt_shares.json
"""

from pathlib import Path
from typing import Any

import numpy as np

import jsparse
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.prompt_replay import recorder
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.models.checkpoint import Params
from jsparse.policies.prefill_methods import as_method
from jsparse.policy import PrefillMethod
from jsparse.runtime.capacity import spec_of
from jsparse.runtime.session import Session
from jsparse.text.prompts import tokenizer_of

METHODS = (
    "xattention(threshold=0.8, stride=8)",
    "xattention(threshold=0.9, stride=8)",
    "xattention(threshold=0.95, stride=8)",
    "xattention(threshold=0.9, stride=16)",
    "vertical_slash()",
    "streaming()",
)


def shares(params: Params, tokens: list[int], method: PrefillMethod) -> np.ndarray:
    """Returns the share of blocks that are read in each layer and query head, [L, N]."""
    spec = spec_of(params, 1, len(tokens), page_size=16)
    session = Session(params, recorder(method), spec)
    session.prefill([tokens])
    read, all_blocks = np.moveaxis(np.asarray(session.prefilled.state), 1, 0)
    return read / all_blocks


def main() -> None:
    """Prefills with every method and prints the mean shares."""
    parser = report_parser("prompt_shares", "Count the blocks that sparse prefill reads.")
    parser.add_argument("--model", default="smollm2", help="as in `jsparse generate`")
    parser.add_argument("--text", type=Path, help="a text file (default: that of `jsparse eval`)")
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192], help="prompt lengths")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="(default: six)")
    args = parser.parse_args()
    params = jsparse.load(args.model)
    if args.text:
        text = args.text.read_text(encoding="utf-8")
        tokens = tokenizer_of(params, "the benchmark").encode(text)
    else:
        tokens = text_tokens(params)
    if len(tokens) < max(args.contexts):
        parser.error(f"the text has {len(tokens)} tokens: must have {max(args.contexts)}")
    methods = [as_method(method) for method in args.methods]
    if None in methods:
        parser.error("--methods: dense reads all blocks")
    report: dict[str, Any] = {
        "benchmark": "prompt_shares",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"model": args.model, "text": args.text and args.text.name},
        "results": [],
    }
    for context in args.contexts:
        for method in filter(None, methods):
            found = shares(params, tokens[:context], method)
            row = {
                "context": context,
                "method": str(method),
                "mean": float(found.mean()),
                "shares": np.round(found, 4).tolist(),
            }
            report["results"].append(row)
            lowest, highest = np.quantile(found, (0.1, 0.9))
            print(
                f"{context:>7} {method!s:40} {found.mean():6.1%} of blocks; "
                f"a tenth of the heads below {lowest:.1%}, a tenth above {highest:.1%}",
                flush=True,
            )
            write_report(args.json, report)


if __name__ == "__main__":
    main()
