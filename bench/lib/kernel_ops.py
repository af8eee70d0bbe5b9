"""Builds jobs of the other ops for bench.kernels: scores, selection, runs, gather, compaction.

Only jobs that use the cases in `tests` import that folder.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.lib.kernel_cases import HEAD_DIM, KV_HEADS, ROTATED_BYTES, AttentionCase
from bench.lib.kernel_programs import Contender, Job, in_turn, random
from bench.lib.kernel_timing import TimedProgram
from jsparse.cache import LayerCache
from jsparse.pallas_kernels.centroid_scores.api import centroid_scores
from jsparse.pallas_kernels.compact_pages.api import compact_pages
from jsparse.pallas_kernels.expert_product import expert_product
from jsparse.pallas_kernels.gated_product.api import gated_product
from jsparse.pallas_kernels.group_means.api import group_means
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.int4_scores.api import int4_scores
from jsparse.pallas_kernels.key_bounds import PageBounds
from jsparse.pallas_kernels.nearest_centroid.api import nearest_centroid
from jsparse.pallas_kernels.norm_product.api import norm_product
from jsparse.pallas_kernels.page_bounds.api import page_bounds
from jsparse.pallas_kernels.quantized_product.api import MAX_ROWS, quantized_product
from jsparse.pallas_kernels.row_gather.api import row_gather
from jsparse.pallas_kernels.runs_to_tokens.api import runs_to_tokens
from jsparse.pallas_kernels.skinny_product.api import skinny_product
from jsparse.pallas_kernels.threshold_select import Budget, TopK, TopP, threshold_select
from jsparse.pallas_kernels.weight_blocks import FORMS
from jsparse.selection import Selection

PAGE, GROUP = 16, 4
# for normal logits with this deviation, 4 % of the tokens have that share of the mass
TOP_P, LOGIT_SPREAD = 0.9, 3.0
# 128K tokens in runs of 8 to 16; a budget of tokens fits at most CHOSEN_RUNS
RUNS, CHOSEN_RUNS, BUDGET = 13108, 130, 1024
# clusters of two runs on average, the maximum number, and the runs that 16 steps may add
CLUSTERS, NEW_CHUNKS = 6554, 3
# of a layer of SmolLM2-135M, of Llama 3.1 8B, and of a fourth of it, up to 32 MiB, with the ops
# that may precede them in the same launch
ROW_PRODUCTS = (
    ("135M qkv", 960, 576, "norm"),
    ("135M o", 576, 576, None),
    ("135M gate|up", 3072, 576, "norm"),
    ("135M down", 576, 1536, "gate"),
    ("8B o", 4096, 4096, None),
    ("8B/4 qkv", 1536, 4096, "norm"),
    ("8B/4 o", 4096, 1024, None),
    ("8B/4 down", 4096, 3584, "gate"),
)
ROW_OPS: dict[str | None, Any] = {
    None: (skinny_product, {}, "reference"),
    "norm": (norm_product, {"eps": 1e-5}, "separate"),
    "gate": (gated_product, {}, "separate"),
}
EXPERTS, EXPERTS_OF_ROW = 128, 8  # of Qwen3 30B-A3B
FORM_ROWS = (1, 8, 512, 4096)  # rows of products in several formats
MANY = 16  # minimum rows of products that have others for comparison
# of a layer of Llama 3.1 8B
PRODUCTS = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate|up", 28672, 4096), ("down", 4096, 14336))


def jobs(*, on_gpu: bool, max_calls: int, shrink: int = 1) -> list[Job]:
    """Returns all of them; `shrink` divides contexts, rows and pages, for a CPU."""
    name = "triton" if on_gpu else "reference"
    context, batch = 131072 // shrink, max(8 // shrink, 1)
    made = [
        _bounds(name, batch, context),
        _int4(name, batch, context),
        _int4(name, batch, context, quarter=True),
        _int4(name, batch, context, framed=True),
        _int4(name, batch, context, quarter=True, framed=True),
    ]
    for rows, length, group in ((64, 32768, 1), (256, 32768, 1), (2048, 7680, GROUP)):
        shape = (
            max(rows // KV_HEADS // group // shrink, 1),
            KV_HEADS,
            group,
            max(length // shrink, PAGE),
        )
        # the case is called select in the committed results
        made.append(_select(name, f"select: {rows} rows of {length}", shape, max_calls))
    for rows in (1, 8):
        made.append(_budget(name, rows, max(RUNS // shrink, PAGE), max_calls))
        made.append(_runs(name, rows, shrink))
        made.append(_centroids(name, rows, max(CLUSTERS // shrink, 1), max_calls))
        made.append(_nearest(name, rows, NEW_CHUNKS, max(CLUSTERS // shrink, 1)))
    chunks, clusters = max(RUNS // shrink, PAGE), max(CLUSTERS // shrink, 1)
    made += [_nearest(name, 1, chunks, clusters), _means(name, chunks, clusters)]
    for pages in (2048, 8192, 32768):
        for where in ("pinned_host", "device") if on_gpu else ("device",):
            made.append(_gather(name, where, pages // shrink, 65536 // shrink, max_calls))
    made.append(compaction(name, batch, 32768 // shrink, 16384 // shrink))
    for rows in (1, 8, 32, 64, 512, 1024, 2048, 4096):
        for what, out, width in PRODUCTS:
            product = "reference" if not on_gpu else "triton" if rows == 1 else "mosaic"
            sizes = (rows, max(out // shrink // 64, 1) * 64, max(width // shrink // 256, 1) * 256)
            for form in ("q8_0", "q4_k", "q6_k") if rows in FORM_ROWS else ("q8_0",):
                kind = "8-bit" if form == "q8_0" else form
                made.append(_product(product, f"{kind} {what} b{rows}", form, *sizes, max_calls))
    for what, out, width, before in ROW_PRODUCTS:
        sizes = out // shrink, width // shrink, max_calls
        made += [_row(name, what, each, *sizes) for each in dict.fromkeys((None, before))]
    for rows in (1, 8, 64, 1024, 8192):
        for what in ("gate|up", "down"):
            made.append(_experts(name, what, max(rows // shrink, 1), shrink, max_calls))
    return made


def _experts(name: str, what: str, rows: int, shrink: int, max_calls: int) -> Job:
    """Returns a product of rows with their experts, at random those of a layer of Qwen3 30B-A3B.

    The bytes are those of the experts that some row has.
    """
    gated = what == "gate|up"
    width, ffn = max(2048 // shrink, 16), max(768 // shrink, 16)
    shape = (EXPERTS, width, 2 * ffn) if gated else (EXPERTS, ffn, width)
    calls = min(8, max_calls)
    rng = np.random.default_rng(0)
    drawn = np.argsort(rng.random((calls, rows, EXPERTS)), axis=-1)[..., :EXPERTS_OF_ROW]
    distinct = np.mean([np.unique(one).size for one in drawn])

    def build():
        one = (rows, width) if gated else (EXPERTS_OF_ROW, rows, ffn)
        chosen = [jnp.asarray(each.T, jnp.int32) for each in drawn]
        return random(0, shape), [(random(n, one), each) for n, each in enumerate(chosen)]

    def op(implementation: str) -> Contender:
        options = {"gated": gated, "implementation": implementation}
        return in_turn(lambda matrices, one: expert_product(one[0], matrices, one[1], **options))

    nbytes = int(2 * distinct * shape[1] * shape[2])
    names = (name, "blocks") if rows > EXPERTS else (name,)
    return Job(f"experts' {what} b{rows}", nbytes, build, {each: op(each) for each in names})


def _row(name: str, what: str, before: str | None, out: int, width: int, max_calls: int) -> Job:
    """Returns a product of one row with a matrix, compared with XLA's own.

    With a norm or a gate before it, it is compared with separate launches.
    """
    nbytes = 2 * out * width
    calls = min(max(-(-ROTATED_BYTES // nbytes), 4), 4 * max_calls)  # more than L2 holds
    row, (op, given, beside) = (1, width), ROW_OPS[before]
    shapes = {"norm": (row, row, (width,)), "gate": ((1, 2 * width),), None: (row,)}[before]

    def build():
        return None, [
            tuple(random(n, shape) for shape in (*shapes, (width, out))) for n in range(calls)
        ]

    def run(implementation: str, one: Any) -> Any:
        return op(*one, implementation=implementation, **given)

    of = {each: in_turn(lambda _, one, each=each: run(each, one)) for each in (name, beside)}
    return Job(f"{before}, {what} b1" if before else f"{what} b1", nbytes, build, of)


def _product(
    name: str, case: str, form: str, rows: int, out: int, width: int, max_calls: int
) -> Job:
    """Returns a product of some rows with a matrix in blocks.

    With many rows, it is compared with a product that first widens the matrix, and with one in
    bf16.
    """
    arrays, nbytes = FORMS[form].arrays(out, width), FORMS[form].nbytes(out, width)
    calls = min(max(-(-ROTATED_BYTES // nbytes), 4), 32, max_calls)

    def matrix(seed: int) -> Any:
        made = {}
        for name, spec in arrays.items():
            if spec.dtype == jnp.float16:
                made[name] = jnp.full(spec.shape, 0.02 / 73, spec.dtype)
            else:
                bits = jax.random.bits(jax.random.key(seed), spec.shape, jnp.uint8)
                made[name] = jax.lax.bitcast_convert_type(bits, spec.dtype)
        return made

    def build():
        wide = [random(n, (width, out)) if rows > MANY else None for n in range(calls)]
        return None, [(random(n, (rows, width)), matrix(n), wide[n]) for n in range(calls)]

    def op(implementation: str) -> Contender:
        return in_turn(lambda _, one: quantized_product(*one[:2], implementation=implementation))

    contenders = {name: op(name)} if rows <= MAX_ROWS else {}
    if rows > MANY:
        contenders |= {
            "reference": op("reference"),
            "bf16": in_turn(lambda _, one: one[0] @ one[2]),
        }
    return Job(case, nbytes, build, contenders)


def _queries(batch: int, calls: int = 4) -> list[jax.Array]:
    shape = (batch, KV_HEADS * GROUP, HEAD_DIM)
    return [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(calls)]


def _unread(batch: int, pages: int) -> LayerCache:
    """Returns a full cache for use within a program.

    K and V are never allocated, since nothing reads them.
    """
    pool = jnp.zeros((batch * KV_HEADS * pages, PAGE, HEAD_DIM), jnp.bfloat16)
    return LayerCache(pool, pool, jnp.full((batch, KV_HEADS), pages * PAGE, jnp.int32))


def _bounds(name: str, batch: int, context: int) -> Job:
    pages = context // PAGE
    shape = (batch * KV_HEADS * pages, HEAD_DIM)

    def build():
        low = random(0, shape)
        return PageBounds(low, low + jnp.abs(random(1, shape))), _queries(batch)

    def op(bounds, q):
        return page_bounds(q, _unread(batch, pages), bounds, implementation=name)

    return Job(
        f"page_bounds 128K b{batch}", 2 * 2 * shape[0] * shape[1], build, {name: in_turn(op)}
    )


def _int4(
    name: str, batch: int, context: int, *, quarter: bool = False, framed: bool = False
) -> Job:
    from tests.kernels.cases.int4_scores import Case, frame_for

    pages = context // PAGE
    rows = (batch * KV_HEADS * pages, PAGE)
    listed = AttentionCase("", batch, context, context // 4)

    def build():
        packed = jax.random.bits(jax.random.key(0), (*rows, HEAD_DIM // 2), jnp.uint8)
        scale = (0.1 + jnp.abs(random(1, rows))).astype(jnp.float16) / 8
        keys = Int4Keys(packed, scale, random(2, rows).astype(jnp.float16))
        shape = Case("", kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE, num_pages=pages)
        sets = []
        for seed, q in enumerate(_queries(batch)):
            ids = jnp.asarray(listed.ids(seed).reshape(batch, KV_HEADS, -1))
            count = jnp.full((batch, KV_HEADS), ids.shape[-1], jnp.int32)
            sets.append((q, Selection(ids, count) if quarter else None))
        return (keys, frame_for(shape) if framed else None), sets

    def op(kept, one):
        (keys, frame), (q, selection) = kept, one
        layer = _unread(batch, pages)
        return int4_scores(q, layer, keys, selection, frame=frame, implementation=name)

    read, written = rows[0] * PAGE * (HEAD_DIM // 2 + 4), 4 * batch * KV_HEADS * GROUP * context
    label = f"int4_scores 128K b{batch}, {'a quarter' if quarter else 'all'}"
    label += ", in a frame" if framed else ""
    return Job(label, (read + written) // (4 if quarter else 1), build, {name: in_turn(op)})


def _select(name: str, case: str, shape: tuple[int, int, int, int], max_calls: int) -> Job:
    length = shape[-1]
    size = 4 * int(np.prod(shape))
    maximum = max(length // 8, 1)
    kept = partial(threshold_select, capacity=max(length // 4, 1), implementation=name)

    def build():
        calls = min(max(-(-ROTATED_BYTES // size), 4), 32, max_calls)
        return None, [
            LOGIT_SPREAD * jax.random.normal(jax.random.key(seed), shape) for seed in range(calls)
        ]

    contenders = {
        f"{name} top-p {TOP_P}": in_turn(lambda _, scores: kept(scores, TopP(TOP_P))),
        f"{name} top-k {maximum}": in_turn(lambda _, scores: kept(scores, TopK(maximum))),
        f"lax.top_k {maximum}": in_turn(lambda _, scores: jax.lax.top_k(scores, maximum)),
    }
    return Job(case, size, build, contenders)


def _budget(name: str, batch: int, runs: int, max_calls: int) -> Job:
    shape = (batch, KV_HEADS, 1, runs)
    few = min(CHOSEN_RUNS, runs)
    kept = partial(threshold_select, capacity=few, implementation=name)

    def build():
        sizes = jax.random.randint(jax.random.key(0), (batch, KV_HEADS, runs), 8, 17)
        scores = [
            LOGIT_SPREAD * jax.random.normal(jax.random.key(seed), shape)
            for seed in range(min(32, max_calls))
        ]
        return sizes, scores

    contenders = {
        f"{name} budget {BUDGET}": in_turn(
            lambda sizes, scores: kept(scores, Budget(BUDGET, sizes))
        ),
        f"{name} top-k {few}": in_turn(lambda _, scores: kept(scores, TopK(few))),
        f"lax.top_k {few}": in_turn(lambda _, scores: jax.lax.top_k(scores, few)),
    }
    case = f"select: a budget, {batch * KV_HEADS} rows of {runs}"
    return Job(case, 2 * 4 * int(np.prod(shape)), build, contenders)


def _runs(name: str, batch: int, shrink: int) -> Job:
    from tests.kernels.cases.runs_to_tokens import Case

    runs, few = max(RUNS // shrink, PAGE), max(CHOSEN_RUNS // shrink, 1)
    capacity = max(BUDGET // shrink, 1)
    case = Case("", batch, KV_HEADS, runs, few, count="all", capacity=capacity)

    def build():
        return None, [case.build(seed)[0] for seed in range(4)]

    def op(_, inputs):
        return runs_to_tokens(*inputs, capacity=capacity, implementation=name)

    size = 4 * batch * KV_HEADS * (3 * few + capacity)
    return Job(f"runs_to_tokens {few} of {runs} b{batch}", size, build, {name: in_turn(op)})


def _nearest(name: str, batch: int, points: int, groups: int) -> Job:
    from tests.kernels.cases.nearest_centroid import Case

    case = Case(
        "", batch, KV_HEADS, points, groups, HEAD_DIM, used="three_quarters", like="directions"
    )

    def build():
        return None, [case.build(seed) for seed in range(4)]

    def op(_, inputs):
        return nearest_centroid(*inputs, implementation=name)

    size = batch * KV_HEADS * (points + groups) * 3 // 4 * HEAD_DIM * 2
    label = f"nearest_centroid: {points} points, {groups} centroids b{batch}"
    return Job(label, size, build, {name: in_turn(op)})


def _means(name: str, points: int, groups: int) -> Job:
    from tests.kernels.cases.group_means import Case

    case = Case("", 1, KV_HEADS, points, groups, HEAD_DIM, used="three_quarters", like="normal")

    def build():
        return None, [case.build(seed) for seed in range(4)]

    def op(_, inputs):
        return group_means(*inputs, max_groups=groups, implementation=name)

    size = KV_HEADS * (points * 3 // 4 * 2 + groups * 4) * HEAD_DIM
    return Job(f"group_means: {points} points, {groups} groups", size, build, {name: in_turn(op)})


def _centroids(name: str, batch: int, clusters: int, max_calls: int) -> Job:
    from tests.kernels.cases.centroid_scores import Case

    case = Case("", batch, KV_HEADS, GROUP, clusters, HEAD_DIM, "all", dtype="bfloat16")
    size = 2 * batch * KV_HEADS * clusters * HEAD_DIM
    calls = min(max(-(-ROTATED_BYTES // size), 4), 32, max_calls)

    def build():
        q, centroids, number, *_ = case.build()
        return number, [(q, centroids + jnp.bfloat16(seed)) for seed in range(calls)]

    def op(number, one):
        q, centroids = one
        return centroid_scores(q, centroids, number, implementation=name)

    written = 4 * batch * KV_HEADS * clusters
    label = f"centroid_scores {clusters} b{batch}"
    return Job(label, size + written, build, {name: in_turn(op)})


def _gather(name: str, where: str, wanted: int, pages: int, max_calls: int) -> Job:
    size = 2 * wanted * PAGE * HEAD_DIM
    calls = min(max(-(-ROTATED_BYTES // size), 4), 32, max_calls)

    def build():
        pool = random(0, (pages, PAGE, HEAD_DIM))
        if where != "device":
            pool = jax.device_put(
                pool, SingleDeviceSharding(jax.local_devices()[0], memory_kind=where)
            )
        ids = [
            np.random.default_rng(seed).choice(pages, wanted, replace=False)
            for seed in range(calls)
        ]
        return pool, [jnp.asarray(i.astype(np.int32)) for i in ids]

    def op(pool, ids):
        return row_gather(pool, ids, implementation=name)

    crosses, moved = ("memory", 2 * size) if where == "device" else ("bus", size)
    return Job(
        f"gather {wanted} pages, {where}", moved, build, {name: in_turn(op)}, crosses=crosses
    )


def compaction(name: str, batch: int, context: int, kept: int) -> Job:
    """Returns the job of compact_pages on heads of `context` slots that keep `kept`."""
    heads = (batch, KV_HEADS)
    listed = AttentionCase("", batch, context, kept, lists="token")

    def build():
        shape = (batch * KV_HEADS * context // PAGE, PAGE, HEAD_DIM)
        layer = LayerCache(random(0, shape), random(1, shape), jnp.full(heads, context, jnp.int32))
        count = jnp.full(heads, kept, jnp.int32)
        ids = [jnp.asarray(listed.ids(seed).reshape(*heads, kept)) for seed in range(4)]
        return layer, [Selection(i, count, granularity="token") for i in ids]

    @partial(jax.jit, donate_argnums=0)
    def run(layer, keeps):
        full = layer.lengths
        for keep in keeps:
            layer = compact_pages(layer, keep, implementation=name)._replace(lengths=full)
        return layer

    def start(layer: LayerCache, keeps: list[Any]) -> TimedProgram:
        held = [jax.tree.map(jnp.copy, layer)]

        def step():
            held[0] = run(held[0], keeps)
            return held[0]

        return TimedProgram(step, len(keeps))

    moved = int((listed.ids(0) != np.arange(kept)).sum())
    size = 2 * 2 * 2 * HEAD_DIM * moved  # K and V, read and written, two bytes each
    return Job(
        f"compact_pages {batch * KV_HEADS} heads, {kept} of {context}", size, build, {name: start}
    )
