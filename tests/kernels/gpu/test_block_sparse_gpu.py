"""Tests block_sparse_decode and merge_splits against the float32 references.

On Hopper mosaic attends to pages, on other GPUs triton; triton is tested on all.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode.api import block_sparse_decode
from jsparse.pallas_kernels.dispatch import no_mosaic
from jsparse.pallas_kernels.merge_splits import merge_splits
from jsparse.selection import Selection
from tests.kernels.cases.block_sparse_decode import CASES, INT8_CASES, Case, Inputs
from tests.kernels.cases.named import as_type
from tests.support.decode_checks import (
    assert_reports_rounded_mean,
    assert_rounds_o,
    in_families,
)

pytestmark = pytest.mark.gpu
BACKENDS = ("mosaic", "triton")
on_both = pytest.mark.parametrize("implementation", BACKENDS)


@pytest.fixture(autouse=True)
def _leaves_out_what_is_hopper_s(request):
    given = getattr(request.node, "callspec", None)
    if given and given.params.get("implementation") == "mosaic" and (reason := no_mosaic()):
        pytest.skip(reason)


BASE = Case("base", head_dim=128, num_pages=40, dtype="bfloat16")
SHAPES = [
    replace(
        BASE,
        name=f"h{h}_p{p}_g{g}_{dtype}",
        head_dim=h,
        page_size=p,
        group=g,
        dtype=dtype,
        dense="mixed",
    )
    for h, p, g, dtype in [
        (64, 16, 3, "bfloat16"),
        (64, 8, 16, "float16"),
        (192, 16, 7, "bfloat16"),
        (128, 8, 1, "bfloat16"),
        (128, 32, 16, "bfloat16"),
        (128, 64, 5, "float16"),
        (256, 8, 2, "bfloat16"),
        (256, 16, 16, "float16"),
        (64, 16, 48, "bfloat16"),
        (128, 16, 63, "bfloat16"),
        (256, 32, 40, "float16"),
        (256, 64, 4, "bfloat16"),
    ]
]
MANY = replace(
    BASE, name="many_heads", batch=64, kv_heads=8, num_pages=30, table="scrambled", bits=True
)
LONG = replace(BASE, name="long", num_pages=2500, batch=3, dense="mixed", table="scrambled")
# pages, head dimensions and K and V in 8 bits that mosaic does not support
TAKEN = [case.page_size <= 64 and case.head_dim % 64 == 0 for case in CASES]
WIDE = [*(case for case, taken in zip(CASES, TAKEN, strict=True) if not taken), *INT8_CASES]
WHOLE = [case for case, taken in zip(CASES, TAKEN, strict=True) if taken]


@partial(jax.jit, static_argnames=("implementation", "sm_scale", "stats"))
def attend(inputs, implementation="mosaic", sm_scale=None, stats=None):
    with jax.default_matmul_precision("highest"):  # otherwise the reference's float32 is TF32
        return block_sparse_decode(
            *inputs, sm_scale=sm_scale, stats=stats, implementation=implementation
        )


def cast(inputs: Inputs, dtype) -> Inputs:
    top = float(jnp.finfo(dtype).max) / 4  # far enough from the largest not to round to infinity
    k, v = (as_type(pool, dtype, top) for pool in inputs.layer[:2])
    return Inputs(inputs.q.astype(dtype), inputs.layer._replace(k=k, v=v), inputs.selection)


def build(case: Case, seed: int = 0) -> Inputs:
    """Builds the inputs, those in float16 through bfloat16: float16 cannot represent JUNK."""
    inputs = replace(case, dtype="bfloat16").build(seed)
    return cast(inputs, case.dtype) if case.dtype == "float16" else inputs


def assert_near(got, want, spread=1.0):
    error = 2e-2 * max(spread / 1e3, 1.0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (np.float32, b.shape)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=error)


def assert_matches_the_reference(case, implementation):
    if implementation == "triton" and case.head_dim == 256 and case.group > 31:
        pytest.skip("more queries than that kernel takes")
    inputs = build(case)
    want = attend(cast(inputs, jnp.float32), "reference", case.sm_scale, "token_logits")
    plain = attend(inputs, implementation, case.sm_scale)
    stats = attend(inputs, implementation, case.sm_scale, "token_logits")
    assert_near(stats, want, case.spread)
    assert_near((plain.o, plain.lse), (want.o, want.lse), case.spread)


@on_both
@pytest.mark.parametrize("case", [*WHOLE, *SHAPES, MANY, LONG], ids=str)
def test_matches_the_reference(case, implementation):
    assert_matches_the_reference(case, implementation)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_triton_supports_the_shapes_that_mosaic_does_not(case):
    assert_matches_the_reference(case, "triton")


@pytest.mark.parametrize("stats", [None, "page_mass"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_supports_float32(case, stats):
    if case.head_dim == 256 and case.group > (15 if stats else 16):
        pytest.skip("more queries than that kernel takes in float32")
    inputs = replace(case, dtype="float32").build()
    got, want = (attend(inputs, name, case.sm_scale, stats) for name in ("triton", "reference"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(case.spread / 1e3, 1.0))


@on_both
def test_shared_pages_are_read_once_for_all_rows(implementation):
    case = replace(
        BASE,
        name="families",
        batch=20,
        kv_heads=8,
        num_pages=60,
        lengths="full",
        listed="none",
        dense="all",
        table="scrambled",
    )
    families, tokens = [[*range(16)], [17, 18], []], [480, 960, 0]
    inputs = in_families(build(case), families, tokens)
    plain = Inputs(inputs.q, inputs.layer._replace(prefixes=None), inputs.selection)
    want = attend(cast(plain, jnp.float32), "reference")
    assert_near(attend(inputs, implementation), want)


@on_both
def test_o_has_the_requested_dtype(implementation):
    assert_rounds_o(partial(block_sparse_decode, implementation=implementation), BASE)


@on_both
def test_reported_logits_are_of_the_mean_query_rounded_to_its_dtype(implementation):
    assert_reports_rounded_mean(
        partial(block_sparse_decode, implementation=implementation), "page", off=2e-4
    )


@on_both
def test_listed_logits_reports_no_logits_and_changes_no_result(implementation):
    inputs = build(MANY)
    got, plain = (
        attend(inputs, implementation, stats="listed_logits"),
        attend(inputs, implementation),
    )
    np.testing.assert_array_equal(got.o, plain.o)
    np.testing.assert_array_equal(got.lse, plain.lse)
    entries = inputs.selection.ids.shape[-1] + 1
    assert got.stats.logits.shape == (MANY.batch, MANY.kv_heads, MANY.group, entries)
    assert not got.stats.count.any() and not got.stats.ids.any()
    assert np.isneginf(got.stats.logits).all()


@on_both
@pytest.mark.parametrize("case", [MANY, LONG], ids=str)
def test_repeated_calls_give_the_same_bits(case, implementation):
    inputs = build(case)
    first = jax.device_get(attend(inputs, implementation))
    for _ in range(50):
        np.testing.assert_array_equal(jax.device_get(attend(inputs, implementation).o), first.o)


@on_both
@pytest.mark.parametrize("case", [MANY, LONG], ids=str)
def test_row_has_the_same_bits_alone_and_in_a_batch(case, implementation):
    q, layer, selection = build(case)
    whole = attend(Inputs(q, layer, selection), implementation)
    assert layer.block_table is not None
    for row in range(0, case.batch, 7):
        rows = slice(row, row + 1)
        own = layer._replace(lengths=layer.lengths[rows], block_table=layer.block_table[rows])
        chosen = Selection(
            selection.ids[rows],
            selection.count[rows],
            None if selection.bits is None else selection.bits[rows],
            None if selection.dense is None else selection.dense[rows],
        )
        alone = attend(Inputs(q[rows], own, chosen), implementation)
        np.testing.assert_array_equal(alone.o, whole.o[rows])
        np.testing.assert_array_equal(alone.lse, whole.lse[rows])


@on_both
def test_pool_of_more_than_2_to_the_31_elements(implementation):
    pages, size, head_dim = (1 << 31) // (16 * 128) + 64, 16, 128
    pool = jnp.zeros((pages, size, head_dim), jnp.bfloat16)
    rng = np.random.default_rng(0)
    small = jnp.asarray(rng.normal(size=(64, size, head_dim)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(64).reshape(2, 2, 16), jnp.int32)
    far = table + pages - 64
    lengths = jnp.asarray([[256, 100], [17, 1]], jnp.int32)
    selection = Selection(
        jnp.zeros((2, 2, 0), jnp.int32), jnp.zeros((2, 2), jnp.int32), dense=jnp.ones((2, 2), bool)
    )
    q = jnp.asarray(rng.normal(size=(2, 8, head_dim)), jnp.bfloat16)
    want = attend(Inputs(q, LayerCache(small, small, lengths, table), selection), implementation)
    pool = jax.jit(lambda pool: pool.at[pages - 64 :].set(small), donate_argnums=0)(pool)
    got = attend(Inputs(q, LayerCache(pool, pool, lengths, far), selection), implementation)
    np.testing.assert_array_equal(got.o, want.o)


def test_merge_splits_in_triton():
    rng = np.random.default_rng(0)
    for splits in (1, 16, 33, 99, 264):
        o = jnp.asarray(rng.normal(size=(7, splits, 8, 96)), jnp.float32)
        lse = jnp.asarray(rng.normal(size=(7, splits, 8)) * 4, jnp.float32)
        used = jnp.asarray(rng.integers(0, splits + 1, 9), jnp.int32)
        unused = jnp.arange(splits) >= used[:7, None]
        o = jnp.where(unused[..., None, None], jnp.nan, o)
        lse = jnp.where(unused[..., None], jnp.nan, lse)
        for lse_only in (0, 2):
            want = merge_splits(o, lse, used, 5, lse_only=lse_only, implementation="reference")
            got = merge_splits(o, lse, used, 5, lse_only=lse_only, implementation="triton")
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
