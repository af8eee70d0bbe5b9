"""How fast are steps, prompts and a workload in our engine, compared with vLLM's on the same GPU?

Random bf16 weights, random prompts, greedy decoding, no prefix cache; both engines receive the same
requests through the same loop, and are timed by the moments at which the host receives tokens:

    one         Llama 3.1 8B's shape, 1 prompt of 130,900 tokens, 512 new
    four        4 such prompts
    sixteen     16 prompts of 30,720 tokens, 512 new
    varied      16 prompts of 20,000 tokens ± 15 %, 2,000 new ± 15 %, at most 8 at a time
    small       SmolLM2's shape, 64 prompts of 1,024 tokens, 512 new

Figures: ms per step while all rows decode (blocks of 64 steps), seconds until every row has a
token, and generated tokens per second of the whole case.

Every policy of --policy runs with every dtype of --kv-cache-dtype; with --exact it only drafts, and
the figure of a step is that of a generated token. --vllm-python is the interpreter of an
environment with vLLM; without it only our side runs. Random weights make attention flat, which is
the worst case for policies that follow its mass, such as twilight. --tiny checks the script on a
CPU, with short prompts and a tiny model.

    python -m bench.peers --vllm-python ~/vllm/bin/python --json build/peers.json
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.engine_driver import CASES, ENGINE_SIZES, figures, warm_up
from bench.lib.environment import describe
from bench.lib.subprocesses import stream_child, write_report

POLICIES = ("dense", "twilight(quest(budget=5120, bounds_dtype='uint8'), p=0.95)", "hard_kv()")


class JSparse:
    """Our engine, for the driver; `attended` has the shares of finished requests."""

    def __init__(self, engine: Any) -> None:
        """Wraps an engine."""
        self.engine, self.attended = engine, list[float]()

    def add(self, name: str, ids: list[int], tokens: int) -> None:
        """Queues a request."""
        from jsparse import SamplingParams
        from jsparse.runtime.request import requests

        own = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (request,) = requests(self.engine.params, [ids], [own], self.engine.policy)
        self.engine.add(request, request_id=name, arrived=time.perf_counter())

    def step(self) -> Mapping[str, int]:
        """Advances all requests."""
        counts = {}
        for state in self.engine.step():
            counts[state.request_id] = len(state.metrics.token_times)
            if state.finished:
                share = state.output().outputs[0].attended_fraction
                self.attended += [] if share is None else [share]
        return counts


def our_rows(names: list[str], policy: str, kv: str, *, exact: bool, tiny: bool) -> None:
    """Runs cases of one shape in our engine; prints one line of JSON per case."""
    began = time.perf_counter()
    from bench.engine_speed import random_model
    from bench.lib.eviction_steps import tiny as tiny_scale
    from jsparse.engine.core import Engine
    from jsparse.engine.options import EngineOptions

    cases = [CASES[name] for name in names]
    length, rows = ENGINE_SIZES[cases[0].shape]
    model = shape_of(cases[0].shape)
    if tiny:
        model, length = tiny_scale().model, 2048
        cases = [replace(case, prompt=max(case.prompt // 128, 32), new=192) for case in cases]
    params = replace(random_model(model), kv_cache_dtype=kv)
    counts = sorted({min(case.count, case.at_once or case.count) for case in cases} | {rows})
    options: dict[str, Any] = {"max_model_len": length, "max_num_seqs": rows, "exact": exact}
    options |= {"decode_rows": counts, "enable_prefix_caching": False}
    engine = Engine(params, policy, EngineOptions(prepare=not tiny, **options))
    start = {"start_seconds": time.perf_counter() - began}
    counters = engine.counters
    for case in cases:
        warm_up(case, JSparse(engine), model.vocab_size)
        ours, drafted, accepted = JSparse(engine), counters.draft_tokens, counters.accepted_tokens
        row = {"case": case.name, **start, **figures(case, ours, model.vocab_size)}
        row["attended_fraction"] = mean(ours.attended) if ours.attended else None
        if drafts := counters.draft_tokens - drafted:
            row["accepted_share"] = (counters.accepted_tokens - accepted) / drafts
        print(json.dumps(row), flush=True)


def shape_of(name: str) -> Any:
    """Returns a model's sizes, with enough positions for the cases."""
    from bench.lib.llama_8b import LLAMA_8B
    from bench.lib.shapes import SMOLLM2

    shape = {"8b": LLAMA_8B, "135m": SMOLLM2}[name]
    return replace(shape, max_position_embeddings=ENGINE_SIZES[name][0], rope_scaling=None)


def hf_config(shape: Any) -> dict[str, Any]:
    """Returns a Llama's config.json, as transformers writes it."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def vllm_rows(names: list[str], kv: str, python: str, options: str) -> Iterator[dict[str, Any]]:
    """Yields cases of one shape in vLLM."""
    asked = json.loads(options) | {"kv_cache_dtype": kv}
    with tempfile.TemporaryDirectory() as folder:
        config = hf_config(shape_of(CASES[names[0]].shape))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        arguments = [folder, json.dumps(asked), *names]
        yield from stream_child("bench.lib.vllm_engine", arguments, python=python)


def main() -> None:
    """Runs all contenders, one process per model's shape, and prints a table."""
    parser = report_parser("peers", (__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--policy", nargs="*", default=list(POLICIES), help="of our engine")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=("auto", "int8"), default=["auto"], help="of ours"
    )
    parser.add_argument("--exact", action="store_true", help="policies draft for dense attention")
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vLLM")
    parser.add_argument(
        "--vllm-kv-cache-dtype", nargs="+", default=["auto"], metavar="DTYPE", help="of vLLM"
    )
    parser.add_argument(
        "--vllm-options", default="{}", metavar="JSON", help="further arguments of vllm.LLM"
    )
    parser.add_argument("--tiny", action="store_true", help="check our side on a CPU")
    parser.add_argument("--child", nargs=2, metavar=("POLICY", "DTYPE"), help="run ours here")
    args = parser.parse_args()
    if args.child:
        policy, kv = args.child
        return our_rows(args.cases, policy, kv, exact=args.exact, tiny=args.tiny)
    report: dict[str, Any] = {
        "benchmark": "peers",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"cases": {name: vars(CASES[name]) for name in args.cases}},
        "results": [],
    }
    baseline: dict[str, dict[str, Any]] = {}
    for names in by_shape(args.cases):
        for contender, rows in contenders(names, args):
            for row in attempts(rows):
                if contender["engine"] == "vllm" and contender["kv_cache_dtype"] == "auto":
                    baseline.setdefault(row.get("case", ""), row)
                row = contender | row
                report["results"].append(row)
                print(line(row, baseline.get(row.get("case", ""))), flush=True)
                write_report(args.json, report)


def by_shape(names: list[str]) -> list[list[str]]:
    """Groups cases by their model, which loads once for all of them."""
    shapes = dict.fromkeys(CASES[name].shape for name in names)
    return [[name for name in names if CASES[name].shape == shape] for shape in shapes]


def contenders(names: list[str], args: Any) -> Iterator[tuple[dict[str, Any], Iterator[Any]]]:
    """Yields each contender, and its rows of some cases."""
    if args.vllm_python:
        for kv in args.vllm_kv_cache_dtype:
            found = vllm_rows(names, kv, args.vllm_python, args.vllm_options)
            yield {"engine": "vllm", "policy": "dense", "kv_cache_dtype": kv}, found
    flags = ["--exact"] * args.exact + ["--tiny"] * args.tiny
    for policy in args.policy:
        for kv in args.kv_cache_dtype:
            asked = ["--child", policy, kv, "--cases", *names, *flags]
            named = {"engine": "jsparse", "policy": policy, "kv_cache_dtype": kv}
            yield named | {"exact": args.exact}, stream_child("bench.peers", asked)


def attempts(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows; a contender that fails ends with a row that has its error."""
    try:
        yield from rows
    except RuntimeError as error:
        yield {"error": str(error)[-1500:]}


def line(row: dict[str, Any], beside: dict[str, Any] | None) -> str:
    """Formats one line of the table, with factors over vLLM in bf16."""
    name = row["engine"] if row["engine"] == "vllm" else row["policy"]
    name = f"exact({name})" if row.get("exact") else name
    text = f"{row.get('case', ''):9}{name:60.60} {row['kv_cache_dtype']:5}"
    if "error" in row:
        return f"{text} failed: {row['error']}"
    shown = [("output_tokens_per_second", row["output_tokens_per_second"], "8.0f", "tokens/s")]
    if row["step_ms"]:
        shown.insert(0, ("read_seconds", row["read_seconds"], "6.2f", "s"))
        shown.insert(0, ("step_ms", row["step_ms"]["median"], "7.2f", "ms"))
    for figure, value, form, unit in shown:
        text += f" {value:{form}} {unit}"
        if beside:
            other = beside[figure]["median"] if figure == "step_ms" else beside[figure]
            text += f" ({value / other if unit == 'tokens/s' else other / value:.2f}x)"
    return text


if __name__ == "__main__":
    main()
