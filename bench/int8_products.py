"""What would prompts gain and lose if their products were computed in 8-bit integers?

Quality: the perplexity of --windows x --length tokens of the text of `jsparse eval` with a GGUF
model in float32, if the rows that a layer's products multiply are rounded to 8 bits with a scale
per token, its matrices with a scale per output channel, or both. Speed, on a GPU: the products of
Llama 3.1 8B's layer for a chunk of 8,192 tokens, in bf16 and by XLA in int8, with and without the
rounding of the rows.

    python -m bench.int8_products --model model.gguf --json build/int8_products.json
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jsparse
from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report
from bench.weight_formats import excerpts
from jsparse.evaluation import texts
from jsparse.models import linear
from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer

KERNELS = (("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down"))
LAYER = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
CHUNK, RUNS, CALLS = 8192, 5, 10


def rounded(x: jax.Array, axis: int) -> jax.Array:
    """Rounds numbers to 8 bits, with a scale for all that differ only along an axis."""
    codes, scale = in_int8(x, axis)
    return codes.astype(x.dtype) * scale


def in_int8(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns codes from -127 to 127 and scales."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / 127
    return jnp.round(wide / scale).astype(jnp.int8), scale


def round_rows() -> None:
    """Rounds the rows of all products of layers that are compiled from here on."""
    product = linear.product

    def of_rounded(x: Any, matrix: Any, *rest: Any, **options: Any) -> Any:
        return product(rounded(x, -1), matrix, *rest, **options)

    def of_gated(gate_up: Any, matrix: Any, *rest: Any, **options: Any) -> Any:
        gate, up = jnp.split(gate_up, 2, -1)
        return of_rounded(jax.nn.silu(gate) * up, matrix, *rest, **options)

    linear.product, linear.gated_product = of_rounded, of_gated


def round_matrices(params: Any) -> None:
    """Rounds the matrices of all layers in place."""
    for name, layer in params.weights["params"].items():
        for part, kernel in KERNELS if name.startswith("layers_") else ():
            layer[part][kernel]["kernel"] = rounded(layer[part][kernel]["kernel"], 0)


def perplexities(path: Path, windows: int, length: int) -> dict[str, list[float]]:
    """Returns the mean negative log-likelihood of each excerpt, by the kind of rounded numbers."""
    params = jsparse.load(path, weights="plain", dtype="float32")
    text = Tokenizer.from_gguf(GGUFFile(path).metadata).encode(texts.read(None))
    tokens = excerpts(text, windows, length + 1)

    def losses() -> list[float]:
        found = []
        for excerpt in tokens:
            logs = jax.nn.log_softmax(jsparse.logits(params, excerpt[None, :-1])[0])
            found.append(float(-jnp.mean(logs[jnp.arange(length), excerpt[1:]])))
        return found

    made = {"nothing": losses()}
    round_matrices(params)
    made["matrices"] = losses()
    jax.clear_caches()
    round_rows()
    made["both"] = losses()
    return made


def product_times() -> list[dict[str, Any]]:
    """Returns the times of a layer's products of a chunk, in milliseconds."""

    def in_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.T

    def of_codes(codes: jax.Array, w: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(codes, w, dims, preferred_element_type=jnp.int32)

    def with_rounding(x: jax.Array, w: jax.Array) -> jax.Array:
        codes, scale = in_int8(x, -1)
        return (of_codes(codes, w).astype(jnp.float32) * scale).astype(x.dtype)

    results = []
    for name, (width, out) in LAYER.items():
        x = jax.random.normal(jax.random.key(0), (CHUNK, width), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(1), (out, width), jnp.bfloat16)
        codes, integers = in_int8(x, -1)[0], in_int8(w, -1)[0]
        row: dict[str, Any] = {"product": name, "flops": 2 * CHUNK * width * out}
        row["bf16"] = timed(in_bf16, x, w)
        row["int8"] = timed(of_codes, codes, integers)
        row["int8_with_rounding"] = timed(with_rounding, x, integers)
        results.append(row)
    return results


def timed(function: Callable[..., jax.Array], *given: jax.Array) -> dict[str, float]:
    """Returns the spread of the time of a call, in milliseconds."""
    run, times = jax.jit(function), []
    jax.block_until_ready(run(*given))
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready([run(*given) for _ in range(CALLS)])
        times.append((time.perf_counter() - began) * 1e3 / CALLS)
    return spread(times)


def main() -> None:
    """Measures times on a GPU, and quality if there is a model."""
    parser = report_parser("int8_products", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: speed alone")
    parser.add_argument("--windows", type=int, default=4, help="excerpts (default 4)")
    parser.add_argument("--length", type=int, default=1024, help="their tokens (default 1024)")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("windows", "length")}
    report: dict[str, Any] = {
        "benchmark": "int8_products",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": settings | {"model": args.model and args.model.name},
    }
    if jax.default_backend() == "gpu":
        report["times"] = product_times()
        for row in report["times"]:
            medians = (f"{kind} {row[kind]['median']:.3f} ms" for kind in list(row)[2:])
            print(row["product"], *medians, flush=True)
    if args.model is not None:
        report["losses"] = perplexities(args.model, args.windows, args.length)
        exact = float(np.exp(np.mean(report["losses"]["nothing"])))
        report["perplexity"] = {}
        for what, losses in report["losses"].items():
            value = report["perplexity"][what] = float(np.exp(np.mean(losses)))
            print(f"{what} rounded: perplexity {value:.3f}, {100 * (value / exact - 1):+.2f} %")
    write_report(args.json, report)


if __name__ == "__main__":
    main()
