"""How long does attention take where K and V lie: on the CPU, or fetched by the GPU?

LFPS (arXiv:2506.15704, sections 4 and 5) keeps K and V in the CPU's memory and attends there, while
the rest of the model runs on the GPU. Its system point is that the tokens are known before the
query. One layer of Llama 3.1 8B's shape in bfloat16, given the tokens that a head attends to; in
microseconds, from a query on the GPU to an output on the GPU:

    in place    the GPU reads the tokens' K and V from pinned host memory (`offloaded`)
    gather      the GPU fetches them, and then attends
    device      K and V lie on the GPU
    compute_on  XLA's host computation inside the same program, K and V in pinned host memory
    cpu         a program of JAX's CPU backend on all cores; query and output cross the bus

The sum for one row, 64K tokens and 2 %: 1,311 tokens of 8 heads are 5.4 MB. The bus takes 0.13 ms
at 42 GB/s. A socket's memory, at 100 to 300 GB/s, takes 0.02 to 0.05 ms, but a query and an output
that cross by way of the host take some 0.1 ms each way, and XLA's gather on a CPU uses one core.

    python -m bench.attention_on_cpu --json build/attention_on_cpu.json
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import spread, write_report
from jsparse.cache import LayerCache
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.selection import Selection

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
RUNS, WARM_UPS = 30, 5


def attend(q: Array, k: Array, v: Array, rows: Array) -> Array:
    """Attends, in plain jnp, to the listed rows of K and V.

    Constants would lie in the GPU's memory, which a host computation must not see: hence q scaled
    and rows that count over all heads.

    Args:
        q: [B, K, G, H], scaled.
        k: [B · K · S, H].
        v: the same.
        rows: [B, K, n].
    """
    keys, values = (x.at[rows].get(mode="promise_in_bounds") for x in (k, v))
    logits = jnp.einsum("bkgh,bknh->bkgn", q, keys, preferred_element_type=jnp.float32)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    out = jnp.einsum("bkgn,bknh->bkgh", weights.astype(values.dtype), values)
    return out / jnp.sum(weights, axis=-1, keepdims=True).astype(out.dtype)


def paged(q: Array, k: Array, v: Array, ids: Array) -> Array:
    """Attends with the kernel of token selections: ids[B, K, n], k and v[B · K · S / P, P, H]."""
    heads = ids.shape[:2]
    slots = k.shape[0] * PAGE // (heads[0] * heads[1])
    held = LayerCache(k, v, jnp.full(heads, slots, jnp.int32))
    chosen = Selection(ids, jnp.full(heads, ids.shape[2], jnp.int32), granularity="token")
    return token_sparse_decode(q, held, chosen, dtype=q.dtype).o


def gathered(q: Array, k: Array, v: Array, rows: Array) -> Array:
    """Fetches the listed rows, and attends to all of them."""
    keys, values = (row_gather(x, rows).reshape(-1, DIM) for x in (k, v))
    return attend(q, keys, values, jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape))


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Returns microseconds of a call that ends when its result is there."""
    times = []
    for nth in range(WARM_UPS + RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        if nth >= WARM_UPS:
            times.append(1e6 * (time.perf_counter() - begun))
    return spread(times)


def ways(batch: int, context: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """Returns a call for each way, all of the same attention."""
    device, host, space = jax.devices()[0], jax.devices("cpu")[0], jax.memory.Space
    rng, heads = np.random.default_rng(0), batch * KV_HEADS
    q = rng.standard_normal((batch, HEADS, DIM), np.float32).astype(jnp.bfloat16)
    k, v = (
        rng.standard_normal((heads * context, DIM), np.float32).astype(jnp.bfloat16) for _ in "kv"
    )
    # the newest token is always attended to
    each = [[*np.sort(rng.choice(context - 1, tokens - 1, False)), context - 1]] * heads
    ids = np.array(each, np.int32).reshape(batch, KV_HEADS, tokens)
    rows = ids + context * np.arange(heads, dtype=np.int32).reshape(batch, KV_HEADS, 1)
    scaled = (q * DIM**-0.5).astype(q.dtype).reshape(batch, KV_HEADS, -1, DIM)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pages = [x.reshape(-1, PAGE, DIM) for x in (k, v)]
    on_device = [jax.device_put(x, device) for x in (q, *pages, ids, scaled, rows)]
    in_host = [jax.device_put(x, pinned) for x in (k, v, rows)]
    pages = [jax.device_put(x, pinned) for x in pages]
    on_cpu = [jax.device_put(x, host) for x in (k, v, rows)]

    @jax.jit
    def by_host(q: Array, k: Array, v: Array, rows: Array) -> Array:
        computed: Any = compute_on(attend, compute_type="device_host", out_memory_spaces=space.Host)
        return jax.device_put(computed(jax.device_put(q, space.Host), k, v, rows), space.Device)

    on_cores = jax.jit(attend)

    def by_cpu() -> Array:
        out = on_cores(jax.device_put(on_device[4], host), *on_cpu)
        return jax.device_put(out, device)

    reading, fetching = jax.jit(paged), jax.jit(gathered)
    return {
        "in place": partial(reading, on_device[0], *pages, on_device[3]),
        "gather": partial(fetching, on_device[4], *in_host[:2], on_device[5]),
        "device": partial(reading, *on_device[:4]),
        "compute_on": partial(by_host, on_device[4], *in_host),
        "cpu": by_cpu,
    }


def main() -> None:
    """Times every way at one row and eight, and prints a table."""
    parser = report_parser("attention_on_cpu", "Time attention where K and V lie.")
    parser.add_argument("--context", type=int, default=65536, help="tokens held (default 64K)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="rows (default 1, 8)")
    parser.add_argument("--share", type=float, default=0.02, help="part attended to (default 0.02)")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "benchmark": "attention_on_cpu",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"context": args.context, "share": args.share, "dtype": "bfloat16"},
        "results": [],
    }
    table = Table("rows", "way", "µs", "least", "most", "error")
    for batch in args.batch:
        expected = None
        for name, run in ways(batch, args.context, round(args.share * args.context)).items():
            try:
                out = np.asarray(run(), np.float32).reshape(batch, HEADS, DIM)
            except Exception as error:  # a way that XLA refuses is a result too
                report["results"].append({"batch": batch, "way": name, "error": str(error)[:300]})
                table.add_row(str(batch), name, str(error)[:60])
                continue
            expected = out if expected is None else expected
            away = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            found = timed(run)
            report["results"].append({"batch": batch, "way": name, "us": found, "difference": away})
            numbers = (f"{found[x]:.0f}" for x in ("median", "min", "max"))
            table.add_row(str(batch), name, *numbers, f"{away:.1e}")
            write_report(args.json, report)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
