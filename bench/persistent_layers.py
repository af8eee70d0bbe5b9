"""Would one launch for all products of a layer be faster than a launch for each?

A prototype. Its products are those of a decode step of one row: q, k and v after a norm, o, gate
and up after a norm, down after a gate. Attention is left out: o multiplies q. Contenders:

    launches      norm_product, skinny_product, norm_product and gated_product: four launches a
                  layer, in XLA's CUDA graph, and more where a matrix is too large for these kernels
    persistent    one launch per layer, with a program on every multiprocessor; between two products
                  each waits until all have arrived
    prefetched    the same, and a program loads the first numbers of its next matrix before it waits
    resident      like prefetched, with all layers in one launch

In the table, microseconds per layer:

    us            from the start of a run's first kernel to the end of its last; median
    floor         its matrices' bytes over the bandwidth that this run measures
    x             us over floor
    waits         of these, how long a program waits for the others; median over programs and layers

    python -m bench.persistent_layers --json build/persistent_layers.json
"""

from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_timing import LEAD_BYTES, TimedProgram, lead, profile
from bench.lib.llama_8b import LLAMA_8B
from bench.lib.smollm2 import SMOLLM2
from bench.lib.subprocesses import write_report
from jsparse.pallas_kernels.gated_product import gated_product
from jsparse.pallas_kernels.norm_product import norm_product
from jsparse.pallas_kernels.skinny_product import skinny_product

SHAPES = {"135m": (SMOLLM2, 30), "8b": (LLAMA_8B, 8)}  # and how many layers
CONTENDERS = ("launches", "persistent", "prefetched", "resident")
EPS, RUNS = 1e-5, 8
WARM_UP = 4  # XLA makes its graphs in the first runs


class Layers(NamedTuple):
    """Holds the weights of all layers, one behind another."""

    norms: Array  # [L, 2, D]
    qkv: Array  # [L, D, Q]
    o: Array  # [L, A, D]
    gate_up: Array  # [L, D, 2F]
    down: Array  # [L, F, D]


def main() -> None:
    """Times the contenders and prints a table."""
    parser = report_parser("persistent_layers", "Time a layer's products in one launch.")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("needs a GPU")
    before = lead()
    (found,) = profile([], before, RUNS)
    bandwidth = LEAD_BYTES / found["kernels"]["median"] * 1e6
    report: dict[str, Any] = {
        "benchmark": "persistent_layers",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.local_devices()[0].device_kind,
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"runs": RUNS, "bandwidth": bandwidth},
        "results": [],
    }
    for shape in args.shape:
        report["results"] += measure(shape, before, bandwidth)
        write_report(args.json, report)
    print_table(report["results"])


def measure(shape: str, before: TimedProgram, bandwidth: float) -> list[dict[str, Any]]:
    """Returns a row for each contender."""
    layers, x = random_layers(shape)
    nbytes = sum(matrix.nbytes for matrix in layers[1:]) / len(layers.qkv)
    of_layers = [
        jax.tree.map(lambda w, n=n: jnp.copy(w[n]), layers) for n in range(len(layers.qkv))
    ]
    programs, waits, results = {}, {}, {}
    for name in CONTENDERS:
        given = of_layers if name == "launches" else layers
        run = jax.jit(launched if name == "launches" else partial(persistent, kind=name))
        for _ in range(WARM_UP):
            results[name], *stamps = jax.block_until_ready(run(given, x, 0.5 * x))
        waits[name] = [waited(np.asarray(one)) for one in stamps]
        programs[name] = TimedProgram(partial(run, given, x, 0.5 * x), 1)
    wanted = np.asarray(results["launches"], np.float32)
    rows = []
    profiles = profile(list(programs.values()), before, RUNS)[1:]
    for name, found in zip(CONTENDERS, profiles, strict=True):
        apart = np.abs(np.asarray(results[name], np.float32) - wanted).max() / np.abs(wanted).max()
        rows.append(
            {
                "shape": shape,
                "contender": name,
                "bytes": nbytes,
                "floor_us": nbytes / bandwidth * 1e6,
                "waits_us": waits[name][0] if waits[name] else None,
                "largest_difference": float(apart),
                "layers": len(layers.qkv),
                **found,
            }
        )
    return rows


def random_layers(shape: str) -> tuple[Layers, Array]:
    """Returns weights and a row."""
    config, count = SHAPES[shape]
    heads = config.num_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    sizes = ((width, qkv), (heads, width), (width, 2 * inner), (inner, width))
    keys = jax.random.split(jax.random.key(0), len(sizes) + 1)

    @partial(jax.jit, static_argnums=1)
    def random(key: Array, size: tuple[int, int]) -> Array:
        return (jax.random.normal(key, (count, *size)) / size[0] ** 0.5).astype(jnp.bfloat16)

    matrices = (random(key, size) for key, size in zip(keys, sizes, strict=False))
    x = jax.random.normal(keys[-1], (1, width)).astype(jnp.bfloat16)
    return Layers(jnp.ones((count, 2, width), jnp.bfloat16), *matrices), x


def launched(layers: list[Layers], x: Array, delta: Array) -> tuple[Array]:
    """Runs the layers as a decode step does."""
    for layer in layers:
        x, qkv = norm_product(x, delta, layer.norms[0], layer.qkv, eps=EPS)
        delta = skinny_product(qkv[:, : layer.o.shape[0]], layer.o)
        x, gate_up = norm_product(x, delta, layer.norms[1], layer.gate_up, eps=EPS)
        delta = gated_product(gate_up, layer.down)
    return (x + delta,)


def persistent(layers: Layers, x: Array, delta: Array, kind: str) -> tuple[Array, Array]:
    """Runs them in a launch of their own each, or in one.

    Returns:
        The row, and when programs of a layer arrived and went on, int32[layers, 4, programs, 2].
    """
    from bench.lib.persistent_triton import run_layers

    count = len(layers.qkv)
    if kind == "resident":
        x, delta, stamps = run_layers(layers, x, delta, 0, count, prefetch=True)
        return x + delta, stamps
    stamps = []
    for layer in range(count):
        x, delta, times = run_layers(layers, x, delta, layer, 1, prefetch=kind == "prefetched")
        stamps.append(times)
    return x + delta, jnp.concatenate(stamps)


def waited(stamps: np.ndarray) -> float:
    """Returns for how many microseconds of a layer a program waits, medians over programs."""
    arrived, left = stamps[..., 0], stamps[..., 1]
    return float(np.median((left - arrived).sum(axis=1))) / 1e3


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    table = Table(*("shape", "contender", "us", "floor", "x", "waits", "difference"))
    for row in rows:
        us = row["device"]["median"] / row["layers"] if "device" in row else None
        table.add_row(
            row["shape"],
            row["contender"],
            *(f"{us:.1f}" if us else "-", f"{row['floor_us']:.1f}"),
            f"{us / row['floor_us']:.2f}" if us else "-",
            "-" if row["waits_us"] is None else f"{row['waits_us']:.1f}",
            f"{row['largest_difference']:.4f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
