"""What does decoding with K and V in host memory cost, and how long can contexts be?

Llama 3.1 8B's shape, random bf16 weights, one row. Three parts:

    steps    A decode step after a full cache of random K and V. Policies read them from host
             memory, in place, gathered first or prefetched by one layer, and the same policies
             from the device. For comparison, in the same process: all of K and V copied to the
             device every step, with dense attention; K copied, the exact top-k selected, its V
             gathered.
    prompt   Prefill of a prompt of random ids and generation of some tokens; peak memory. Each
             prompt has its own process, and the environment limits its memory on the device
             (XLA_PYTHON_CLIENT_MEM_FRACTION) and on the host (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB).
    tokens   SmolLM2 generates from real text, with K and V on the host and on the device.

    python -m bench.offloaded steps --json build/offloaded.json
"""

import json
import os
import resource
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.llama_8b import LLAMA_8B, boundary_constants, state_after_prompt
from bench.lib.subprocesses import run_child, spread, write_report

LFPS, QUEST = "lfps(budget=0.02)", "quest(budget=2624)"  # 2 % of 128K tokens
DOUBLE = "double_sparsity(budget=2624)"
# Twilight's Table 7: its base selects a quarter of the context. Top-p hardly prunes random keys, so
# heads keep the number of pages that SmolLM2's did.
BASE = "quest(budget={quarter})"
TWILIGHT = f"twilight({BASE}, p=0.95)"
STEPS = {
    "lfps, in place": f"offloaded({LFPS})",
    "lfps, gathered": f"offloaded({LFPS}, reads='gather')",
    "copy K and V": None,
    "copy K, exact top-k": None,
    "dense, device": "dense",
    "lfps, device": LFPS,
    "quest": f"offloaded({QUEST})",
    "double_sparsity": f"offloaded({DOUBLE})",
    "quest, a quarter": f"offloaded({BASE})",
    "twilight": f"replayed(offloaded({TWILIGHT}))",
    "quest, device": QUEST,
    "double_sparsity, device": DOUBLE,
    "quest, a quarter, device": BASE,
    "twilight, device": f"replayed({TWILIGHT})",
}
BUDGET = 2624
WARM_UP, RUNS, CALLS, SLOW_CALLS = 3, 3, 20, 3
PROMPTS = ("131072 dense", f"262144 offloaded({LFPS})")
TOKENS = (LFPS.replace("0.02", "0.1"), "quest(budget=256)", "twilight(quest(budget=512), p=0.9)")


def asked(name: str, context: int) -> str | None:
    """Returns the expression of a contender at this context; None for those that copy."""
    text = STEPS[name]
    return None if text is None else text.format(quarter=context // 4)


def sizes(config, context: int):
    """Returns the sizes of a cache for one row."""
    import jax.numpy as jnp

    from jsparse.cache import CacheSpec

    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return CacheSpec(config.num_layers, 1, *heads, 16, context // 16, jnp.dtype("bfloat16"))


def full_cache(spec, held: int):
    """Returns a cache on the device with `held` random tokens."""
    import jax
    import jax.numpy as jnp

    from jsparse import cache as kv_cache

    random_pages = jax.jit(
        lambda key, like: jax.random.normal(key, like.shape, like.dtype),
        donate_argnums=1,
        keep_unused=True,
    )
    cache = kv_cache.init(spec)
    layers = tuple(
        layer._replace(
            k=random_pages(jax.random.key(2 * i), layer.k),
            v=random_pages(jax.random.key(2 * i + 1), layer.v),
            lengths=jnp.full_like(layer.lengths, held),
        )
        for i, layer in enumerate(cache.layers)
    )
    return cache._replace(layers=layers, positions=jnp.full_like(cache.positions, held))


def timed(step: Callable[[], Any], calls: int) -> dict[str, Any]:
    """Times steps, each of which returns an array; the first compiles."""
    began = time.perf_counter()
    step().block_until_ready()
    compiled = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        step().block_until_ready()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(calls):
            last = step()
        last.block_until_ready()
        times.append((time.perf_counter() - began) / calls)
    return {"seconds": spread(times), "compile_seconds": compiled}


def policy_step(params, spec, cache, host, expression: str) -> dict[str, Any]:
    """Times the session's own loop, from the cache or from its copy in host memory."""
    import jax
    import jax.numpy as jnp

    from bench.lib.replay import parse
    from jsparse import cache as kv_cache
    from jsparse.runtime.constants import constants
    from jsparse.runtime.sampling import greedy
    from jsparse.runtime.session import PrefillResult, Session

    policy = parse(expression, spec.capacity)
    view = kv_cache.StepView(cache, constants(params, policy))
    state = state_after_prompt(policy._replace(offload=None), spec, view)
    session = Session(params, policy, spec, adopts=True, steps_per_program=1)
    logits = jnp.zeros((1, params.config.vocab_size), jnp.float32)
    if policy.offload is None:
        session.adopt(PrefillResult(logits, jax.tree.map(jnp.copy, cache), state))
    else:
        session.adopt(PrefillResult(logits, cache, state), host.pages)
    results = session.steps(greedy, (), limits=[WARM_UP + RUNS * CALLS + 2])
    next(results)
    last = []

    def step():
        last[:] = [next(results)]
        return last[0].tokens

    row = timed(step, CALLS)
    shares = jax.tree.map(lambda x: float(x[-1].mean()), last[0].stats)
    results.close()
    host.pages = session.deployment.store.pages or host.pages
    return row | {"attended_fraction": shares.attended, "read_fraction": shares.read}


def copying_step(params, spec, cache, host, name: str) -> dict[str, Any]:
    """Times a step that copies all of K, or of K and V, to the device in every layer."""
    import jax
    import jax.numpy as jnp

    from jsparse.cache import LayerCache, physical_pages, write
    from jsparse.models.transformer import hidden_states, to_logits
    from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
    from jsparse.pallas_kernels.row_gather import row_gather
    from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
    from jsparse.policies.oracle import attention_logits
    from jsparse.selection import everything

    decoder = params.decoder
    device = jax.memory.Space.Device

    def copied(pages, layer, q, k, v, positions, valid) -> Any:
        held = layer._replace(k=jax.device_put(pages.k, device), v=jax.device_put(pages.v, device))
        held = write(held, k, v, positions, valid, held.lengths - 1)
        return block_sparse_decode(q, held, everything(held.lengths), dtype=q.dtype).o

    def exact(pages, layer, q, k, v, positions, valid) -> Any:
        held = layer._replace(k=jax.device_put(pages.k, device))
        held = write(held._replace(v=held.k), k, k, positions, valid, held.lengths - 1)
        chosen = threshold_select(
            attention_logits(q, held),
            TopK(BUDGET),
            capacity=BUDGET,
            group="max",
            granularity="token",
        )
        slots = chosen.ids
        at = physical_pages(held, slots // 16) * 16 + slots % 16
        keys = held.arrays[0].reshape(-1, held.k.shape[-1])[at]
        values = row_gather(pages.v, at, row_axes=2)
        values = jnp.where(
            (slots == held.lengths[..., None] - 1)[..., None], v[:, 0, :, None], values
        )
        rows = LayerCache(
            keys.reshape(-1, 16, keys.shape[-1]),
            values.reshape(-1, 16, keys.shape[-1]),
            chosen.count,
        )
        return block_sparse_decode(q, rows, everything(rows.lengths), dtype=q.dtype).o

    attention = copied if name == "copy K and V" else exact

    @jax.jit
    def step(weights, pages, lengths, positions, tokens):
        valid = jnp.ones_like(positions)
        at = positions[:, None]

        def attend(layer, q, k, v):
            held = LayerCache(pages[layer].k, pages[layer].v, lengths + 1)
            return attention(pages[layer], held, q[:, 0], k, v, at, valid)[:, None]

        hidden = hidden_states(decoder, weights, tokens[:, None], at, attend)
        logits = to_logits(decoder, weights, hidden[:, 0])
        return jnp.argmax(logits, -1).astype(jnp.int32)

    lengths, positions = cache.layers[0].lengths, cache.positions
    tokens = [jnp.zeros(1, jnp.int32)]

    def call():
        tokens[0] = step(params.weights, host.pages, lengths, positions, tokens[0])
        return tokens[0]

    return timed(call, SLOW_CALLS)


def steps(config, context: int, names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Times contenders one after the other, until the time is up; yields a row each."""
    import jax.numpy as jnp

    from jsparse.host_memory.pages import moved
    from jsparse.models.checkpoint import Params
    from jsparse.models.transformer import random_weights

    began = time.perf_counter()
    weights = random_weights(config, jnp.bfloat16)
    params = Params(weights, config, None, {}, "random", constants=boundary_constants())
    spec = sizes(config, context)
    cache = full_cache(spec, context - WARM_UP - RUNS * CALLS - 8)
    host = SimpleNamespace(pages=moved(cache))
    for pages in host.pages:
        pages.v.block_until_ready()
    yield {"name": "setup", "wall_seconds": time.perf_counter() - began}
    for name in names:
        if time.perf_counter() - began > seconds:
            yield {"name": name, "error": f"not begun: {seconds:.0f} s are over"}
            continue
        at, expression = time.perf_counter(), asked(name, context)
        row: dict[str, Any] = {"name": name, "policy": expression, "context": context}
        try:
            if expression is None:
                row |= copying_step(params, spec, cache, host, name)
            else:
                row |= policy_step(params, spec, cache, host, expression)
        except Exception as error:  # a contender that fails is a row with its error
            row["error"] = f"{type(error).__name__}: {error}"[:3000]
            row["traceback"] = traceback.format_exc()[-6000:]
        yield row | {"wall_seconds": time.perf_counter() - at}


def prompt(config, tokens: int, new: int, expression: str) -> dict[str, Any]:
    """Prefills a prompt of random ids and generates. Prefill rates exclude XLA's compilation."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jsparse.models.checkpoint import Params
    from jsparse.models.transformer import random_weights
    from jsparse.policies.expressions import parse
    from jsparse.runtime.sampling import greedy
    from jsparse.runtime.session import Session

    longer = replace(config, max_position_embeddings=max(2 * tokens, 4096))
    weights = random_weights(longer, jnp.bfloat16)
    params = Params(weights, longer, None, {}, "random", constants=boundary_constants())
    spec = sizes(longer, tokens + -(-new // 16) * 16)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=tokens).tolist()
    compiling: list[float] = []

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiling.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    began = time.perf_counter()
    session = Session(params, parse(expression), spec)
    session.prefill([ids])
    jax.block_until_ready(session.prefilled)
    read, compiled = time.perf_counter() - began, sum(compiling)
    times = []
    for result in session.steps(greedy, (), limits=[new]):
        result.tokens.block_until_ready()
        times.append(time.perf_counter() - began)
    # the first steps compile
    late = np.diff(times)[len(times) // 2 :].tolist()
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens": tokens,
        "new": new,
        "policy": expression,
        "read_seconds": read,
        "compile_seconds": compiled,
        "tokens_per_second": tokens / (read - compiled),
        "step_seconds": spread(late) if late else None,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        "cache_bytes": spec.nbytes,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": stats.get("bytes_limit"),
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "settings": {
            name: os.environ.get(name)
            for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
        },
    }


def same_tokens(length: int, new: int) -> Iterator[dict[str, Any]]:
    """Generates with SmolLM2 from both memories, and compares."""
    import jsparse
    from bench.lib.text import text_tokens

    params = jsparse.load("smollm2")
    ids = text_tokens(params)[:length]
    for policy in TOKENS:
        row: dict[str, Any] = {"policy": policy, "prompt": length}
        try:
            made = [
                jsparse.generate(params, ids, policy=text, max_new_tokens=new, eos_token_id=[])
                for text in (policy, f"offloaded({policy}, tail=64)")
            ]
            device, host = (out.token_ids for out in made)
            row |= {"same": device == host, "device": device, "host": host}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:3000]
            row["traceback"] = traceback.format_exc()[-6000:]
        yield row


def line(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    name = row.get("name") or row["policy"]
    if "error" in row:
        return f"{name:28} failed: {row['error'][:300]}".replace("\n", " ")
    if "same" in row:
        return f"{name:28} {len(row['host'])} tokens, {'the same' if row['same'] else 'OTHERS'}"
    if "read_seconds" in row:
        step, peak = row["step_seconds"], (row["peak_bytes"] or 0) / 1e9
        text = f"{row['tokens']:8} {name:34} read in {row['read_seconds']:.1f} s, "
        text += f"{row['compile_seconds']:.1f} of them compiling, "
        text += f"{row['tokens_per_second']:.0f} tokens/s, peak {peak:.1f} GB, "
        text += f"K and V {row['cache_bytes'] / 1e9:.1f} GB"
        return text + (f", step {step['median'] * 1e3:.2f} ms" if step else "")
    if "seconds" not in row:
        return f"{name:28} {row['wall_seconds']:.0f} s"
    median, minimum, maximum = (row["seconds"][key] * 1e3 for key in ("median", "min", "max"))
    text = f"{name:28} {median:8.2f} ms ({minimum:.2f}-{maximum:.2f})"
    if "read_fraction" in row:
        text += f"  read {row['read_fraction']:.2%}"
    return text + f"  compile {row['compile_seconds']:.0f} s, all {row['wall_seconds']:.0f} s"


def tiny_shape():
    """Returns sizes for a CPU, where times are meaningless."""
    return replace(
        LLAMA_8B,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_scaling=None,
    )


def main() -> None:
    """Runs one part and prints a line for each contender."""
    parser = report_parser("offloaded", "Time decoding with K and V in host memory.")
    parser.add_argument("part", choices=("steps", "prompt", "tokens"))
    parser.add_argument("--context", type=int, default=131072, help="tokens of the steps' cache")
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no contender after this time"
    )
    parser.add_argument(
        "--prompts", nargs="+", default=list(PROMPTS), help="each: its tokens, a space, a policy"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens generated after a prompt")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to test the script")
    parser.add_argument("--child", nargs=2, metavar=("TOKENS", "POLICY"), help="one prompt, here")
    args = parser.parse_args()
    config = tiny_shape() if args.tiny else LLAMA_8B
    if args.child:
        tokens, policy = args.child
        print(json.dumps(prompt(config, int(tokens), args.new, policy)))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report: dict[str, Any] = {
        "benchmark": "offloaded",
        "part": args.part,
        "environment": describe(allow_modified=args.allow_modified),
        "results": [],
    }
    rows = {
        "steps": partial(steps, config, args.context, args.only, args.seconds),
        "prompt": partial(prompts, args.prompts, args.new, tiny=args.tiny),
        "tokens": partial(same_tokens, *((200, 8) if args.tiny else (4000, 48))),
    }[args.part]
    for row in rows():
        report["results"].append(row)
        print(line(row), flush=True)
        write_report(args.json, report)


def prompts(asked: list[str], new: int, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Prefills each prompt in its own process."""
    for text in asked:
        tokens, policy = text.split(" ", 1)
        arguments = ["prompt", "--new", str(new), *["--tiny"] * tiny, "--child", tokens, policy]
        try:
            yield run_child("bench.offloaded", arguments)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield {"policy": text, "error": str(error)[-3000:]}


if __name__ == "__main__":
    main()
