"""Tests every kernel of these ops against its reference, case by case.

Attention, 4-bit keys, page bounds and products have their own files beside this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.centroid_update import centroid_update
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.group_means import group_means
from jsparse.pallas_kernels.nearest_centroid import nearest_centroid
from jsparse.pallas_kernels.place_logits import place_logits
from jsparse.pallas_kernels.point_groups import centroids_of
from jsparse.pallas_kernels.row_gather import row_gather
from jsparse.pallas_kernels.row_scatter import row_scatter
from jsparse.pallas_kernels.runs_to_tokens import runs_to_tokens
from jsparse.pallas_kernels.shared_counts import shared_counts
from jsparse.pallas_kernels.table_candidates import table_candidates
from jsparse.pallas_kernels.table_update import table_update
from jsparse.pallas_kernels.window_attention import window_attention
from jsparse.selection import Selection
from tests.kernels.cases import centroid_scores as scores_cases
from tests.kernels.cases import centroid_update as update_cases
from tests.kernels.cases import compact_pages as compact_cases
from tests.kernels.cases import group_means as means_cases
from tests.kernels.cases import nearest_centroid as nearest_cases
from tests.kernels.cases import place_logits as place_cases
from tests.kernels.cases import row_gather as gather_cases
from tests.kernels.cases import row_scatter as scatter_cases
from tests.kernels.cases import runs_to_tokens as runs_cases
from tests.kernels.cases import shared_counts as shared_cases
from tests.kernels.cases import table_candidates as candidate_cases
from tests.kernels.cases import table_update as table_cases
from tests.kernels.cases import window_attention as window_cases
from tests.kernels.cases.named import as_type

pytestmark = pytest.mark.gpu
KERNEL = "triton"


def same(case, inputs, got, want):
    """Checks that results are bitwise equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, _wide(a)), np.asarray(b, _wide(b)))


def _wide(x):
    return np.float32 if x.dtype == jnp.bfloat16 else x.dtype


def near(rtol, atol):
    """Checks that numbers are close, and that -inf is at the same positions."""

    def compare(case, inputs, got, want):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)

    return compare


def scored(case, i, by):
    return centroid_scores(*i, implementation=by)


def moved(case, i, by):
    return centroid_update(*i, normalise=case.normalise, implementation=by)


def compare_groups(case, inputs, got, want):
    np.testing.assert_array_equal(got.size, want.size)
    np.testing.assert_array_equal(got.of_point, want.of_point)
    one, other = (np.asarray(centroids_of(x)) for x in (got, want))
    # another order of summation may round to the neighbour
    rtol, atol = (2**-7, 1e-6) if case.dtype == "bfloat16" else (1e-5, 1e-6)
    np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    if want.radius is not None:
        # radii differ by no more than their centroids do
        apart = np.linalg.norm(one - other, axis=-1)
        assert (np.abs(got.radius - want.radius) <= apart * (1 + 1e-4) + 1e-4).all()


def compacted(case, i, by):
    return compact_pages(i.layer, i.keep, rewrite=i.rewrite, implementation=by)


def averaged(case, i, by):
    return group_means(*i, case.max_groups, by)


def compare_means(case, inputs, got, want):
    if case.like == "whole":
        same(case, inputs, got, want)
    there = np.arange(case.points) < np.asarray(inputs.number)[:, None]
    points = np.asarray(inputs.points, np.float32)
    largest = np.abs(np.where(there[:, None, :, None], points, 0)).max()
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], atol=2e-6 * largest)


def nearest(case, i, by):
    return nearest_centroid(*i, implementation=by)


def compare_nearest(case, inputs, got, want):
    if case.like == "whole":
        same(case, inputs, got, want)
        return
    points, centroid = (np.asarray(x, np.float64) for x in inputs[:2])
    products = np.einsum("bkmh,bklh->bkml", points, centroid)
    for b in range(case.batch):
        there = np.s_[b, :, : int(inputs.number[b])]
        chosen, wanted = (
            np.take_along_axis(products[there], np.asarray(x)[there][..., None], -1)
            for x in (got, want)
        )
        np.testing.assert_allclose(chosen, wanted, atol=1e-5)


def placed(case, i, by):
    """Places logits, with NaN for unread values, and sums them by page."""
    put = partial(place_logits, *i, **case.options, implementation=by)
    return put(stats="token_logits"), put(stats="page_mass")


def compare_placed(case, inputs, got, want):
    same(case, inputs, got[0], want[0])
    near(1e-5, 1e-5)(case, inputs, got[1], want[1])


def gathered(case, i, by):
    return row_gather(*i, implementation=by)


def scattered(case, i, by):
    return row_scatter(*i, implementation=by)


def listed_runs(case, i, by):
    arrays, capacity = i
    return runs_to_tokens(*arrays, capacity=capacity, implementation=by)


def shared(case, i, by):
    return shared_counts(*i, **case.bounds, implementation=by)


def candidates(case, i, by):
    return table_candidates(*i[:4], **i.kwargs, implementation=by)


def added(case, i, by):
    return table_update(*i[:5], **i.kwargs, implementation=by)


def compare_tables(case, inputs, got, want):
    for pair in zip(got, want, strict=True):
        table, wanted = (np.asarray(x.astype(jnp.float32)) for x in pair)
        # one rounding may differ
        np.testing.assert_allclose(table, wanted, rtol=2.0**-7, atol=1e-6)
        assert (table != wanted).mean() <= 0.01


def attended(case, i, by):
    """The shares of every head and those of groups; the reference's are float32."""
    if by == "reference":
        layer = i.layer._replace(k=as_type(i.layer.k, jnp.float32, jnp.inf))
        i = i._replace(queries=i.queries.astype(jnp.float32), layer=layer)
    ways = [(group, over) for group in ("mean", "max") for over in ("competing", "held")]
    return [window_attention(*i, group=group, over=over, implementation=by) for group, over in ways]


class Kernel(NamedTuple):
    """An op under test.

    Attributes:
        run: calls the op on the inputs of a case, by an implementation.
        cases: its cases, including large ones.
        compare: checks the kernel's results against the reference's.
        batch: a case with rows as the first axis of inputs and results; None: no such axis.
        again: a case that is run many times; None: programs of this kernel never interact.
        tiles: names of the kernel module, and other values for them; None: they are not varied.
    """

    run: Callable[..., Any]
    cases: Sequence[Any]
    compare: Callable[..., None] = same
    batch: Any = None
    again: Any = None
    tiles: dict[str, int] | None = None


_scores = partial(scores_cases.Case, clusters=6554, head_dim=128, dtype="bfloat16")
_update = partial(update_cases.Case, kv_heads=8, groups=6554, points=13108, head_dim=128)
_runs = partial(runs_cases.Case, kv_heads=8, runs=13108, listed=130, capacity=1024)
_table = partial(candidate_cases.Case, kv_heads=8, number=0.04)
MANY = gather_cases.Case(
    "many", rows=5000, width=(16, 128), lists=(8, 8), capacity=70, dtype="bfloat16"
)
PLACED = place_cases.Case("long", batch=8, kv_heads=8, num_pages=8192, capacity=819)
BATCH_OF_RUNS = _runs("large_shared", batch=8, like="one_long", shared=True)
KERNELS = {
    "centroid_scores": Kernel(
        scored,
        (
            *scores_cases.CASES,
            _scores("large", 1, 8, number=4915),
            _scores("large_batch", 8, 8, radii=True),
            _scores("large_float32", 2, 4, dtype="float32", radii=True),
            _scores("large_units", 8, 8, units=64),
        ),
        near(1e-5, 1e-4),
        batch=_scores("large_units", 8, 8, units=64, radii=True),
        tiles={"BLOCK_BYTES": 4096, "NUM_WARPS": 8},
    ),
    "centroid_update": Kernel(
        moved,
        (
            *update_cases.CASES,
            _update("large", batch=8, new=3),
            _update("large_radii", new=16, radii=True),
            update_cases.Case("most", 1, 2, 128, 90, 300, joined=50, head_dim=256, radii=True),
        ),
        compare_groups,
        batch=update_cases.Case("batch", new=16, radii=True, own=True),
    ),
    "compact_pages": Kernel(compacted, compact_cases.CASES),
    "group_means": Kernel(
        averaged,
        (
            *means_cases.CASES,
            means_cases.Case("large", 1, 8, points=3277, max_groups=1639, head_dim=128),
            means_cases.Case("large_few", 1, points=50_000, max_groups=64, head_dim=128),
        ),
        compare_means,
        batch=means_cases.Case("batch", points=700, dtype="float32", like="spread"),
    ),
    "nearest_centroid": Kernel(
        nearest,
        (
            *nearest_cases.CASES,
            nearest_cases.Case("large", 1, 8, points=3277, groups=1639, head_dim=128),
            nearest_cases.Case("large_few", kv_heads=8, points=23, groups=6554, head_dim=128),
        ),
        compare_nearest,
        batch=nearest_cases.Case("batch", points=200, like="directions"),
    ),
    "place_logits": Kernel(
        placed,
        (*place_cases.CASES, PLACED),
        compare_placed,
        again=PLACED,
        tiles={"TILE": 1024, "NUM_WARPS": 2},
    ),
    "row_gather": Kernel(gathered, (*gather_cases.CASES, MANY)),
    "row_scatter": Kernel(scattered, scatter_cases.CASES),
    "runs_to_tokens": Kernel(
        listed_runs,
        (
            *runs_cases.CASES,
            BATCH_OF_RUNS,
            runs_cases.Case("large_all", 2, 4, 9000, 9000, count="all", like="mixed"),
            _runs("large_outside", batch=8, shared=True, outside=True, capacity=None),
            runs_cases.Case("large_long", 2, 2, 700, 600, like="mixed", long=9000),
        ),
        batch=BATCH_OF_RUNS,
        tiles={"BLOCK": 16, "ZEROS": 16, "NUM_WARPS": 2},
    ),
    "shared_counts": Kernel(
        shared,
        (*shared_cases.CASES, *shared_cases.LARGE),
        batch=replace(shared_cases.LARGE[0], batch=8),
        again=replace(shared_cases.LARGE[0], batch=64),
    ),
    "table_candidates": Kernel(
        candidates,
        (
            *(case for case in candidate_cases.CASES if case.a is None),
            _table("large_past", batch=1, slots=131072),
            _table("large_ties", 2, slots=40001, number=0.3, like="ties", ragged=True),
            candidate_cases.Case("large_zeros", 1, 4, 20000, 0.1, like="zeros"),
            # samples see only zeros, half of the slots
            _table("large_striped", batch=4, slots=65536, like="striped"),
            # samples see only the largest: too few are gathered
            _table("large_inverted", batch=4, slots=65536, number=0.7, like="inverted"),
            _table("large_few", batch=1, slots=65536, number=1.6e-4),  # 6 are ranked
            _table("large_constant", batch=8, slots=32768, like="constant"),
            _table("large_flat", batch=8, slots=32768, like="flat", ragged=True),
            _table("large_gap", batch=1, slots=131072, like="gap"),
            # one program per head
            _table("large_batch", batch=32, slots=9001, ragged=True),
        ),
        batch=_table("batch", batch=8, slots=32768, ragged=True),
        again=_table("again", batch=4, slots=65536, like="striped"),
    ),
    "table_update": Kernel(
        added,
        (
            *table_cases.CASES,
            table_cases.Case("large", 1, 8, slots=131072, entries=5244),
            table_cases.Case("large_batch", 8, 8, slots=16384, entries=1500, penalty=0.5),
            table_cases.Case("large_wide", 1, 4, 8, 40000, 15730, spread=30.0),
        ),
        compare_tables,
        batch=table_cases.Case("batch", 8, 8, slots=16384, entries=1500, penalty=0.5),
    ),
    "window_attention": Kernel(
        attended,
        (
            *window_cases.CASES,
            window_cases.Case(
                "long", 1, 1, 4, window=32, num_pages=600, dtype="bfloat16", table="scrambled"
            ),
        ),
        near(1e-4, 1e-5),
    ),
}
ALL = [
    pytest.param(kernel, case, id=f"{name}-{case}")
    for name, kernel in KERNELS.items()
    for case in kernel.cases
]


def having(attribute):
    return pytest.mark.parametrize(
        "name", [name for name, kernel in KERNELS.items() if getattr(kernel, attribute)]
    )


def results(kernel, case, inputs, by=KERNEL):
    """Runs one program on the input arrays; all other inputs are static."""
    leaves, tree = jax.tree.flatten(inputs)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

    @jax.jit
    def run(arrays):
        given = [arrays.get(i, x) for i, x in enumerate(leaves)]
        # float32 products in the reference must not be rounded to TF32
        with jax.default_matmul_precision("highest"):
            return kernel.run(case, jax.tree.unflatten(tree, given), by)

    return run(arrays)


@pytest.mark.parametrize(("kernel", "case"), ALL)
def test_matches_the_reference(kernel, case):
    for seed in range(2):
        inputs = case.build(seed)
        got, want = (results(kernel, case, inputs, by) for by in (KERNEL, "reference"))
        kernel.compare(case, inputs, got, want)


def rows(tree, at):
    return jax.tree.map(lambda x: x[at : at + 1] if isinstance(x, jax.Array) else x, tree)


@having("batch")
def test_row_has_the_same_bits_alone_and_in_a_batch(name):
    kernel = KERNELS[name]
    inputs = kernel.batch.build()
    together = results(kernel, kernel.batch, inputs)
    for row in (0, kernel.batch.batch - 1):
        alone = results(kernel, kernel.batch, rows(inputs, row))
        same(None, None, alone, rows(together, row))


@having("again")
def test_repeated_calls_give_the_same_bits(name):
    """Missing synchronisation between programs would show sooner or later."""
    kernel = KERNELS[name]
    inputs = kernel.again.build()
    first = results(kernel, kernel.again, inputs)
    for _ in range(30):
        same(None, None, results(kernel, kernel.again, inputs), first)


@having("tiles")
def test_block_sizes_change_nothing(name, monkeypatch):
    kernel = KERNELS[name]
    module = import_module(f"jsparse.pallas_kernels.{name}.triton_gpu")
    for constant, value in (kernel.tiles or {}).items():
        monkeypatch.setattr(module, constant, value)
    for case in kernel.cases[-4:]:
        inputs = case.build(4)
        got, want = (results(kernel, case, inputs, by) for by in (KERNEL, "reference"))
        kernel.compare(case, inputs, got, want)


def test_donated_arrays_are_written_in_place():
    layer, keep, _ = compact_cases.Case(
        "", batch=1, num_pages=4096, head_dim=128, dtype="bfloat16", lengths="full"
    ).build()
    compact = jax.jit(partial(compact_pages, implementation=KERNEL), donate_argnums=0)
    memory = compact.lower(layer, keep).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= layer.k.nbytes + layer.v.nbytes
    assert memory.temp_size_in_bytes < layer.k.nbytes // 4
    inputs = table_cases.Case("large", 1, 8, slots=131072, entries=5244).build()
    update = partial(table_update, **inputs.kwargs, implementation=KERNEL)
    memory = jax.jit(update, donate_argnums=(0, 1)).lower(*inputs[:5]).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < inputs.vertical.nbytes


@pytest.mark.parametrize("kept", ["but_first", "last", "some"])
def test_overlapping_source_and_target_rows_are_never_lost(kept):
    """Fifty runs over many chunks, each written over rows just read, give the same bits."""
    sizes = {"kv_heads": 8, "num_pages": 512, "head_dim": 128, "dtype": "bfloat16"}
    layer, keep, _ = compact_cases.Case("", lengths="full", kept=kept, **sizes).build()
    want = jax.jit(partial(compact_pages, implementation="reference"))(layer, keep)
    run = jax.jit(partial(compact_pages, implementation=KERNEL), donate_argnums=0)
    for _ in range(50):
        same(None, None, run(jax.tree.map(jnp.copy, layer), keep), want)


def test_pools_of_more_than_2_to_the_31_elements_are_compacted():
    page_size, head_dim, num_pages = 64, 256, 2**16 + 64
    shape = (2 * num_pages, page_size, head_dim)
    slot = num_pages * page_size - 1  # the very last row of the second head
    numbers = jnp.arange(1, head_dim + 1, dtype=jnp.bfloat16)
    pool = jax.jit(lambda: jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(numbers))()
    table = jnp.arange(2 * num_pages, dtype=jnp.int32).reshape(1, 2, num_pages)
    layer = LayerCache(pool, -pool, jnp.full((1, 2), slot + 1, jnp.int32), table)
    keep = Selection(
        jnp.full((1, 2, 1), slot, jnp.int32), jnp.array([[0, 1]], jnp.int32), granularity="token"
    )
    del pool
    out = jax.jit(partial(compact_pages, implementation=KERNEL), donate_argnums=0)(layer, keep)
    np.testing.assert_array_equal(np.asarray(out.k[num_pages, 0]), np.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(out.v[num_pages, 0]), -np.asarray(numbers))
    assert int(jnp.count_nonzero(out.k)) == 2 * head_dim


def test_lengths_beyond_capacity_read_no_other_memory():
    # after an overflow lengths exceed the capacity; results are meaningless, but no memory past the
    # end may be read
    kernel = KERNELS["place_logits"]
    for dense in ("none", "mixed", "all"):
        case = place_cases.Case(
            "", num_pages=700, lengths="full", listed="newest", capacity=2, dense=dense
        )
        inputs = case.build()
        longer = inputs._replace(lengths=inputs.lengths + 1000)
        same(None, None, results(kernel, case, longer), results(kernel, case, inputs))
