"""How long does an engine take for the parts of a training loop that are not sampling?

Llama 3.1 8B's shape, random bf16 weights, dense attention. Seconds of:

    prefill     8 prompts of 4,096 tokens, one new token each, none of them cached
    logprobs    the same with the log-probabilities of all prompt tokens
    top         the same with the five most likely tokens at each position
    update      update_weights with weights in bf16
    converted   update_weights with weights in float32
    sleep, wake giving back K and V of `kv` bytes, and allocating them again

    python -m bench.training_loop --json build/training_loop.json
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report

PROMPTS, LENGTH, RUNS = 8, 4096, 5
KV = PROMPTS * (LENGTH + 64)


def timed(run: Callable[[], Any]) -> float:
    """Returns the seconds of a call, until the device has finished."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Times each part in turn, RUNS times, and writes the report."""
    args = report_parser("training_loop", (__doc__ or "").splitlines()[0]).parse_args()
    report: dict[str, Any] = {"environment": describe(allow_modified=args.allow_modified)}
    import jax
    import jax.numpy as jnp

    import jsparse
    from bench.engine_speed import random_model

    params, rng = random_model(), np.random.default_rng(0)
    llm = jsparse.LLM(
        params, "dense", max_model_len=LENGTH + 64, max_num_seqs=PROMPTS, kv_cache_tokens=KV
    )
    size = params.config.vocab_size
    del params

    def answer(**options: Any) -> None:
        prompts = rng.integers(size, size=(PROMPTS, LENGTH)).tolist()
        own = jsparse.SamplingParams(max_tokens=1, temperature=0, **options)
        for out in llm.generate(prompts, own, use_tqdm=False):
            assert out.num_cached_tokens == 0

    def update(params: jsparse.Params) -> None:
        llm.update_weights(params)
        jax.block_until_ready(llm.engine.params.weights)

    def wake() -> None:
        llm.wake_up()
        llm.engine.settle()

    slots = llm.engine._runner._slots
    report["kv"] = sum(leaf.nbytes for leaf in jax.tree.leaves(slots))
    del slots
    parts: dict[str, Callable[[], Any]] = {
        "prefill": answer,
        "logprobs": lambda: answer(prompt_logprobs=0),
        "top": lambda: answer(prompt_logprobs=5),
        "sleep": llm.sleep,
        "wake": wake,
    }
    times: dict[str, list[float]] = {}
    for nth in range(RUNS + 1):
        for name, run in parts.items():
            seconds = timed(run)
            if nth:  # the first run compiles
                times.setdefault(name, []).append(seconds)
    for name, dtype in (("update", jnp.bfloat16), ("converted", jnp.float32)):
        for _ in range(3):
            new = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), llm.engine.params)
            jax.block_until_ready(new.weights)
            times.setdefault(name, []).append(timed(lambda new=new: update(new)))
            del new
    report |= {"prompts": PROMPTS, "length": LENGTH, "unit": "s"}
    report["results"] = {name: spread(each) for name, each in times.items()}
    write_report(args.json, report)
    for name, each in report["results"].items():
        print(f"{name:10} {each['median']:.3f} s ({each['min']:.3f}-{each['max']:.3f})")
    print(f"kv         {report['kv'] / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
