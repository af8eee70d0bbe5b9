"""How fast is attention of a prompt's chunk over chosen blocks, compared with dense attention?

The last chunk of a prompt in the attention of Llama 3.1 8B: 8192 or 512 queries of 32 heads, 8 KV
heads of 128 channels, bf16, pages of 16 tokens. Blocks of 128 keys are chosen at random for every
block of 128 queries and every head, always with the first block and the queries' own. In the table:

    ms          per call on the host's clock, amortised over consecutive calls
    blocks      the share of a causal chunk's blocks that are read
    TFLOP/s     4 · queries · keys · channels over the time: of blocks that are read, of the keys
                that a causal query sees (dense), or of all (cuDNN)

    dense       attention that gathers pages for cuDNN, as for K and V that the kernel does not take
    cudnn       cuDNN alone, not causal, over K and V of as many tokens that are not in pages
    paged       the kernel without a choice, as dense prefill uses it
    sparse      the kernel with a choice
    lists       the kernel's lists of chosen blocks alone, which its times include
    choosing    a method's scores and choice alone, to compare with `paged`

    python -m bench.sparse_prefill --json build/sparse_prefill.json
"""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.kernel_timing import TimedProgram, wall
from bench.lib.subprocesses import write_report
from jsparse.cache import LayerCache, read_slots
from jsparse.hooks import ChunkView
from jsparse.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from jsparse.pallas_kernels.block_sparse_prefill.lists import Unit, lists
from jsparse.policies.prefill_methods import as_method
from jsparse.runtime.chunk_attention import attend_chunk, flash

HEADS, KV_HEADS, HEAD_DIM, PAGE, BLOCK = 32, 8, 128, 16, 128
DENSITIES = (1.0, 0.5, 0.25, 0.1)
METHODS = (
    "xattention(stride=8)",
    "xattention(stride=16)",
    "vertical_slash()",
    "vertical_slash(queries=2)",
)
TINY = 64  # the factor by which --tiny shrinks the chunk and the contexts
PAIR_FLOPS = 4 * HEAD_DIM  # of one query and one key
CALLS, REPEATS = 40, 5


def main() -> None:
    """Times every contender at every context and prints a table."""
    parser = report_parser("sparse_prefill", "Time attention of chunks over chosen blocks.")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[32768, 131072], help="prompt lengths"
    )
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=[8192, 512], help="tokens per chunk"
    )
    parser.add_argument(
        "--table",
        nargs="+",
        choices=("identity", "scrambled"),
        default=("identity", "scrambled"),
        help="block tables: a session's, an engine's (default both)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="shapes for a CPU, to test the script; times mean nothing",
    )
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not args.tiny:
        parser.error("needs a GPU; --tiny tests the script on a CPU")
    shrink = TINY if args.tiny else 1
    report: dict[str, Any] = {
        "benchmark": "sparse_prefill",
        "device": jax.local_devices()[0].device_kind,
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"calls": CALLS, "repeats": REPEATS},
        "results": [],
    }
    for context, chunk, table in product(args.contexts, args.chunks, args.table):
        sizes = context // shrink, chunk // shrink
        for row in measure(*sizes, table, "mosaic" if on_gpu else "reference"):
            report["results"].append(row)
            print(line(row), flush=True)
            write_report(args.json, report)


def measure(context: int, chunk: int, table: str, implementation: str):
    """Yields a row per contender."""
    key = jax.random.split(jax.random.key(0), 3)
    pages = KV_HEADS * context // PAGE
    k, v = (jax.random.normal(own, (pages, PAGE, HEAD_DIM), jnp.bfloat16) for own in key[:2])
    q = jax.random.normal(key[2], (1, chunk, HEADS, HEAD_DIM), jnp.bfloat16)
    rng, of_head = np.random.default_rng(0), (1, KV_HEADS, context // PAGE)
    mapped = rng.permutation(pages).astype(np.int32).reshape(of_head)
    lengths, valid = jnp.full((1, KV_HEADS), context, jnp.int32), jnp.full(1, chunk, jnp.int32)
    kv = LayerCache(k, v, lengths, jnp.asarray(mapped) if table == "scrambled" else None)
    slots = jnp.broadcast_to(
        jnp.arange(context - chunk, context, dtype=jnp.int32), (1, KV_HEADS, chunk)
    )
    own = [jax.jit(read_slots)(pool, kv, slots).swapaxes(1, 2) for pool in (k, v)]
    whole = [pool.reshape(1, KV_HEADS, context, HEAD_DIM).swapaxes(1, 2) for pool in (k, v)]
    row = {"context": context, "chunk": chunk, "table": table}
    seen = chunk * (2 * context - chunk + 1) // 2

    def timed(name: str, pairs: int, op: Any, *given: Any, **fields: Any) -> dict[str, Any]:
        program = TimedProgram(partial(jax.jit(op), *given), 1)
        ms = {at: us / 1e3 for at, us in wall(program, CALLS, REPEATS).items()}
        rate = PAIR_FLOPS * pairs / ms["median"] / 1e9 if pairs else None
        return row | {"name": name, "ms": ms, "tflops": rate} | fields

    yield timed("dense", HEADS * seen, attend_chunk, q, *own, kv, valid)
    yield timed("cudnn", HEADS * chunk * context, lambda *qkv: flash(*qkv)[0], q, *whole)
    attend = partial(block_sparse_prefill, implementation=implementation)
    yield timed("paged", HEADS * seen, attend, q, kv, valid)
    blocks = {"query_blocks": -(-chunk // BLOCK), "key_blocks": -(-context // BLOCK)}
    listing = partial(lists, heads=HEADS, **blocks)
    for density in DENSITIES:
        chosen = jnp.asarray(draw(rng, density, context, chunk))
        listed = jax.jit(listing)(chosen, lengths[:, 0], valid)
        read, causal = int(jnp.sum(Unit(*listed.units.T).blocks)), reached(context, chunk)
        share = {"density": density, "blocks": read / causal}
        yield timed("sparse", read * BLOCK**2, attend, q, kv, valid, chosen, **share)
        yield timed("lists", 0, listing, chosen, lengths[:, 0], valid, **share)
    for name in METHODS:
        yield timed("choosing", 0, partial(choosing, as_method(name)), q, kv, valid, method=name)


def choosing(method: Any, q: Any, kv: LayerCache, valid: Any) -> Any:
    """Returns the blocks that a method chooses."""
    view = ChunkView(q, kv, valid)
    return method.choose(method.score(view), view)


def draw(rng: np.random.Generator, density: float, context: int, chunk: int) -> np.ndarray:
    """Chooses blocks, bool[1, N, QB, KB]."""
    blocks = -(-chunk // BLOCK), -(-context // BLOCK)
    chosen = rng.random((1, HEADS, *blocks)) < density
    first = (context - chunk + np.arange(blocks[0]) * BLOCK) // BLOCK
    chosen[..., 0] = True
    for shift in (0, 1):  # a block of queries may begin within a block of keys
        last = np.minimum(first + shift, blocks[1] - 1)
        chosen[..., np.arange(blocks[0]), last] = True
    return chosen


def reached(context: int, chunk: int) -> int:
    """Returns the number of blocks of keys that all blocks of queries of all heads reach."""
    ends = np.minimum(np.arange(BLOCK, chunk + BLOCK, BLOCK), chunk)
    return HEADS * int(np.sum(-(-(context - chunk + ends) // BLOCK)))


def line(row: dict[str, Any]) -> str:
    """Formats one line of the table."""
    rate = "" if row["tflops"] is None else f"{row['tflops']:6.0f} TFLOP/s"
    share = f"{row['blocks']:6.1%} of blocks" if "blocks" in row else row.get("method", "")
    return (
        f"{row['context']:>7} {row['chunk']:>5} {row['table']:9} {row['name']:8} "
        f"{row['ms']['median']:8.3f} ms ({row['ms']['min']:.3f}-{row['ms']['max']:.3f}) "
        f"{rate:15} {share}"
    ).rstrip()


if __name__ == "__main__":
    main()
