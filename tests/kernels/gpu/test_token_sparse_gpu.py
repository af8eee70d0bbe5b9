"""Tests the triton backend of token_sparse_decode against the float32 reference."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.selection.partials import StatsKind
from tests.kernels.cases.block_sparse_decode import JUNK, Case, Inputs
from tests.kernels.cases.named import as_type
from tests.kernels.cases.token_sparse_decode import CASES
from tests.support.decode_checks import assert_reports_rounded_mean, assert_rounds_o

gpu = pytest.mark.gpu
by_name = {case.name: case for case in CASES}
TokenCase = partial(Case, granularity="token")
MANY_HEADS = TokenCase(
    "many_heads", batch=40, kv_heads=8, num_pages=16, dtype="bfloat16", table="scrambled"
)
# a head of 64 units of more than two blocks each, beside an empty one, one of a single token and
# one with a list
LONG = TokenCase(
    "long", head_dim=128, num_pages=1300, dense="mixed", dtype="bfloat16", table="scrambled"
)
LONG_LISTS = TokenCase("long_lists", head_dim=128, num_pages=1300, listed="all", dtype="bfloat16")


@partial(jax.jit, static_argnames=("implementation", "sm_scale", "stats"))
def attend(inputs, implementation="triton", sm_scale=None, stats=None):
    with jax.default_matmul_precision("highest"):  # otherwise the reference's float32 is TF32
        return token_sparse_decode(
            *inputs, sm_scale=sm_scale, stats=stats, implementation=implementation
        )


def cast(inputs: Inputs, dtype) -> Inputs:
    """Converts the inputs to another dtype, clipping JUNK, which float16 cannot represent."""
    top = float(jnp.finfo(dtype).max)
    k, v = (as_type(pool, dtype, top) for pool in inputs.layer[:2])
    return Inputs(inputs.q.astype(dtype), inputs.layer._replace(k=k, v=v), inputs.selection)


def assert_near(got, want, dtype):
    """Checks results to within the rounding of weights to the dtype of V.

    It is 2^-9 in bfloat16 and 2^-12 in float16.
    """
    error = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}[str(dtype)]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == np.int32:
            np.testing.assert_array_equal(a, b)
            continue
        assert a.dtype == np.float32
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(a, b, rtol=max(error, 1e-5), atol=error)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@gpu
@pytest.mark.parametrize("stats", [None, *get_args(StatsKind)])
@pytest.mark.parametrize("case", [*CASES, MANY_HEADS, LONG, LONG_LISTS], ids=str)
def test_matches_the_reference(case, stats):
    inputs = case.build()
    want = attend(cast(inputs, jnp.float32), "reference", case.sm_scale, stats)
    # queries for integer keys have 15 bits
    coarser = case.int8 and inputs.q.dtype == jnp.float32
    error_of = jnp.dtype(jnp.float16) if coarser else inputs.q.dtype
    assert_near(attend(inputs, "triton", case.sm_scale, stats), want, error_of)


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_error_is_at_most_twice_that_of_plain_jnp(head_dim, group, dtype):
    case = TokenCase(
        "",
        head_dim=head_dim,
        group=group,
        num_pages=40,
        dense="mixed",
        table="scrambled",
        bias=True,
    )
    inputs = cast(case.build(head_dim + group), dtype)
    want = attend(cast(inputs, jnp.float32), "reference")
    got, plain = attend(inputs), attend(inputs, "reference")
    assert_near(got, want, dtype)
    assert jnp.linalg.norm(got.o - want.o) <= 2 * jnp.linalg.norm(plain.o - want.o)


@gpu
def test_o_has_the_requested_dtype():
    assert_rounds_o(partial(token_sparse_decode, implementation="triton"), by_name["bfloat16"])


@gpu
def test_reported_logits_are_of_the_mean_query_rounded_to_its_dtype():
    assert_reports_rounded_mean(
        partial(token_sparse_decode, implementation="triton"), "token", off=2e-4
    )


@gpu
@pytest.mark.parametrize("name", ["tokens", "dense_and_sparse", "scrambled", "long_lists_of_all"])
def test_tokens_outside_the_selection_are_not_read(name):
    """They are NaN."""
    inputs = by_name[name].build()
    k, v = (
        jnp.where(jnp.abs(pool) == JUNK, jnp.nan, pool) for pool in (inputs.layer.k, inputs.layer.v)
    )
    assert bool(jnp.isnan(k).any())
    assert_same(attend(inputs._replace(layer=inputs.layer._replace(k=k, v=v))), attend(inputs))


@gpu
@pytest.mark.parametrize("stats", ["token_logits", "listed_logits"])
@pytest.mark.parametrize("case", [MANY_HEADS, LONG], ids=str)
def test_row_has_the_same_bits_alone_and_in_a_batch(case, stats):
    q, layer, chosen = case.build()
    whole = attend(Inputs(q, layer, chosen), stats=stats)
    for row in range(min(case.batch, 3)):
        at = slice(row, row + 1)
        alone = Inputs(
            q[at],
            layer._replace(lengths=layer.lengths[at], block_table=layer.block_table[at]),
            jax.tree.map(lambda x, at=at: x[at], chosen),
        )
        assert_same(attend(alone, stats=stats), jax.tree.map(lambda x, at=at: x[at], whole))


@gpu
@pytest.mark.parametrize("case", [LONG, LONG_LISTS], ids=str)
@pytest.mark.parametrize("stats", ["token_logits", "listed_logits"])
def test_repeated_calls_give_the_same_bits(stats, case):
    inputs = case.build()
    first = attend(inputs, stats=stats)
    for _ in range(50):
        assert_same(attend(inputs, stats=stats), first)
