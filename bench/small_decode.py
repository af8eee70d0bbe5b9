"""How many tokens per second does a small model decode after the first, compared with Hugging Face?

SmolLM2-135M's shape, a prompt of 2048 tokens, 256 new ones after the first, greedy, batch 1;
bfloat16 on a GPU and float32 on a CPU. Contenders, each in its own process:

    jsparse             as in jsparse.generate, for each policy of --policy and each number of
                        --steps-per-program; a session's default on a GPU is 8
    hf-compile          transformers, StaticCache, SDPA, a step under torch.compile
    hf-cudagraphs       the same under torch.compile(mode="reduce-overhead")

`--model smollm2` loads SmolLM2 and uses the text of `jsparse eval`. `--model random` uses random
weights and random ids, as Hugging Face's contenders always do: dense attention takes the same time
with any weights. All feed tokens back on the device. One warm-up, which also compiles, precedes the
timed runs. The rate of jsparse is GenerationStats.decode_tokens_per_second; that of Hugging Face
has the same definition: tokens after the first over the time from the first to the last.

    python -m bench.small_decode --json build/small_decode.json
"""

import json
import subprocess
import time
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import run_child, spread, write_report

CONTENDERS = ("jsparse", "hf-compile", "hf-cudagraphs")
# whole programs of 8 steps follow the first token
PROMPT_TOKENS, NEW_TOKENS, RUNS = 2048, 257, 5


def jsparse_decode(
    model: str, policy: str, count: int, prompt_tokens: int, new_tokens: int, runs: int
) -> dict[str, Any]:
    """Times generation with at most `count` decode steps per program."""
    import jsparse
    from jsparse.policies.expressions import parse
    from jsparse.runtime.capacity import cache_spec
    from jsparse.runtime.request import requests
    from jsparse.runtime.session import Session
    from jsparse.runtime.turn import run

    params, prompt = model_and_prompt(model, prompt_tokens)
    method = parse(policy)
    wanted = jsparse.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    asked = requests(params, [prompt], wanted, method)
    spec = cache_spec(params, [prompt], new_tokens, None, 16)

    def once() -> jsparse.GenerationStats:
        # as in jsparse.generate; the number of steps is an option of sessions
        session = Session(params, method, spec, steps_per_program=count)
        (out,) = run(session, asked, [lambda piece: None], lambda *_: None)
        assert len(out.token_ids) == new_tokens
        return out.stats

    began = time.perf_counter()
    once()
    warm_up = time.perf_counter() - began
    stats = [once() for _ in range(runs)]
    return {
        "dtype": str(params.dtype),
        "decode_tokens_per_second": spread([own.decode_tokens_per_second or 0.0 for own in stats]),
        "prefill_seconds": spread([own.prefill_seconds for own in stats]),
        "warm_up_seconds": warm_up,
        "attended_fraction": stats[-1].attended_fraction,
        "read_fraction": stats[-1].read_fraction,
    }


def model_and_prompt(model: str, prompt_tokens: int) -> tuple[Any, list[int]]:
    """Returns SmolLM2 and a text, or random weights of its shape and random ids."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jsparse
    from bench.lib.shapes import SMOLLM2
    from bench.lib.text import text_tokens
    from jsparse.models.transformer import random_weights

    if model == "smollm2":
        params = jsparse.load("smollm2")
        return params, text_tokens(params)[:prompt_tokens]
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    params = jsparse.Params(random_weights(SMOLLM2, dtype), SMOLLM2, None, {}, "random SmolLM2")
    ids = np.random.default_rng(0).integers(SMOLLM2.vocab_size, size=prompt_tokens)
    return params, ids.tolist()


def huggingface_decode(name: str, prompt_tokens: int, new_tokens: int, runs: int) -> dict[str, Any]:
    """Times transformers' forward, token by token, after the prefill."""
    import torch
    from transformers import StaticCache

    from bench.lib.llama_8b import huggingface_model
    from bench.lib.shapes import SMOLLM2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = huggingface_model(SMOLLM2, device)
    cache = StaticCache(config=model.config, max_cache_len=prompt_tokens + new_tokens)
    mode = "reduce-overhead" if name == "hf-cudagraphs" else "default"
    forward = torch.compile(model.forward, mode=mode)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(SMOLLM2.vocab_size, (1, prompt_tokens), generator=generator)
    prompt = prompt.to(device)

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step(ids: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        # the position is the cache's length, on the device
        logits = forward(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def once() -> tuple[float, float]:
        cache.reset()
        settle()
        began = time.perf_counter()
        logits = model(
            input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        ids = logits[:, -1:].argmax(-1)
        settle()
        read = time.perf_counter()
        for _ in range(new_tokens - 1):
            ids = step(ids).clone()
        settle()
        assert int(cache.get_seq_length()) == prompt_tokens + new_tokens - 1
        return (new_tokens - 1) / (time.perf_counter() - read), read - began

    began = time.perf_counter()
    once()
    warm_up = time.perf_counter() - began
    rates, prefills = zip(*(once() for _ in range(runs)), strict=True)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "decode_tokens_per_second": spread(list(rates)),
        "prefill_seconds": spread(list(prefills)),
        "warm_up_seconds": warm_up,
    }


def main() -> None:
    """Runs every contender and prints a table."""
    parser = report_parser("small_decode", "Time decoding of a small model after the first token.")
    parser.add_argument(
        "--model",
        choices=("smollm2", "random"),
        default="smollm2",
        help="weights of jsparse's contenders (default smollm2)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default all)"
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["dense", "quest(budget=256)"],
        help="policy expressions",
    )
    parser.add_argument(
        "--steps-per-program",
        nargs="+",
        type=int,
        default=[1, 8],
        help="steps per program of jsparse (default 1 and 8)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=PROMPT_TOKENS, help="prompt length (default 2048)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, help="tokens to generate (default 257)"
    )
    parser.add_argument(
        "--runs", type=int, default=RUNS, help="timed runs after the warm-up (default 5)"
    )
    parser.add_argument(
        "--child",
        nargs=3,
        metavar=("NAME", "POLICY", "STEPS"),
        help="measure one here and print a JSON line",
    )
    args = parser.parse_args()
    sizes = (args.prompt_tokens, args.new_tokens, args.runs)
    if args.new_tokens < 2 or min(sizes) < 1:
        parser.error("--new-tokens must be at least 2, --prompt-tokens and --runs at least 1")
    if args.child:
        name, policy, count = args.child
        row = (
            jsparse_decode(args.model, policy, int(count), *sizes)
            if name == "jsparse"
            else huggingface_decode(name, *sizes)
        )
        print(json.dumps(row))
        return
    settings = ("model", "prompt_tokens", "new_tokens", "runs")
    report = {
        "benchmark": "small_decode",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"warm_ups": 1} | {name: getattr(args, name) for name in settings},
        "results": [],
    }
    given = [word for name in settings for word in (option_of(name), str(getattr(args, name)))]
    for contender in contenders(args.only, args.policy, args.steps_per_program):
        row = {**contender, **measure(contender, given)}
        report["results"].append(row)
        print(summary(row), flush=True)
        write_report(args.json, report)


def option_of(name: str) -> str:
    """Returns the option that sets an argument."""
    return f"--{name.replace('_', '-')}"


def contenders(names: list[str], policies: list[str], counts: list[int]) -> list[dict[str, Any]]:
    """Returns the fields that identify rows; Hugging Face's are dense, one step per program."""
    return [
        {"name": name, "policy": policy, "steps_per_program": count}
        for name in names
        for policy in (policies if name == "jsparse" else ["dense"])
        for count in (counts if name == "jsparse" else [1])
    ]


def measure(contender: dict[str, Any], given: list[str]) -> dict[str, Any]:
    """Measures one row in a child process; a contender that fails is a row with its error."""
    child = [contender["name"], contender["policy"], str(contender["steps_per_program"])]
    try:
        return run_child("bench.small_decode", [*given, "--child", *child], timeout_s=600)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[-600:]}


def summary(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    text = f"{row['name']:14} {row['policy']:20} {row['steps_per_program']} per program"
    if "error" in row:
        return f"{text}  failed: {row['error'][-300:]}"
    median, minimum, maximum = (
        row["decode_tokens_per_second"][key] for key in ("median", "min", "max")
    )
    prefill = row["prefill_seconds"]["median"]
    return f"{text} {median:8.1f} tokens/s ({minimum:.1f}-{maximum:.1f})  prefill {prefill:.3f} s"


if __name__ == "__main__":
    main()
