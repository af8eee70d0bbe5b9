"""Tests the triton backend of token_sparse_decode against the float32 reference."""

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import physical_pages, read_slots
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.partials import StatsKind
from jsparse.selection import Selection
from tests.kernels.cases.block_sparse_decode import JUNK, Case, Inputs
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
    with jax.default_matmul_precision("highest"):  # else the reference's float32 is TF32
        return token_sparse_decode(
            *inputs, sm_scale=sm_scale, stats=stats, implementation=implementation
        )


def cast(inputs: Inputs, dtype) -> Inputs:
    """Converts the inputs to another type, clipping JUNK, for which float16 has no room."""
    top = float(jnp.finfo(dtype).max)
    k, v = (jnp.clip(pool, -top, top).astype(dtype) for pool in (inputs.layer.k, inputs.layer.v))
    return Inputs(inputs.q.astype(dtype), inputs.layer._replace(k=k, v=v), inputs.selection)


def assert_near(got, want, dtype):
    """Checks results to within the rounding of weights to the type of V.

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
    assert_near(attend(inputs, "triton", case.sm_scale, stats), want, inputs.q.dtype)


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_is_at_most_twice_as_far_off_as_plain_jnp(head_dim, group, dtype):
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
def test_o_comes_in_the_type_that_is_asked_for():
    assert_rounds_o(partial(token_sparse_decode, implementation="triton"), by_name["bfloat16"])


@gpu
def test_logits_reported_are_those_of_the_mean_query_in_the_queries_type():
    assert_reports_rounded_mean(
        partial(token_sparse_decode, implementation="triton"), "token", off=2e-4
    )


@gpu
@pytest.mark.parametrize("name", ["tokens", "dense_and_sparse", "scrambled", "long_lists_of_all"])
def test_what_is_not_attended_to_is_not_read(name):
    """NaN in tokens that are not attended to does no harm."""
    inputs = by_name[name].build()
    k, v = (
        jnp.where(jnp.abs(pool) == JUNK, jnp.nan, pool) for pool in (inputs.layer.k, inputs.layer.v)
    )
    assert bool(jnp.isnan(k).any())
    assert_same(attend(inputs._replace(layer=inputs.layer._replace(k=k, v=v))), attend(inputs))


@gpu
def test_ids_behind_the_list_may_be_anything():
    q, layer, chosen = by_name["scrambled"].build()
    behind = jnp.arange(chosen.ids.shape[-1]) >= chosen.count[..., None]
    ids = jnp.where(behind, 2**31 - 1, chosen.ids)
    assert_same(
        attend(
            Inputs(q, layer, Selection(ids, chosen.count, granularity="token")),
            stats="listed_logits",
        ),
        attend((q, layer, chosen), stats="listed_logits"),
    )


@gpu
def test_equal_logits_weigh_the_same():
    q, layer, chosen = TokenCase("", num_pages=40, lengths="full").build()
    inputs = Inputs(jnp.zeros_like(q), layer, chosen)
    got = attend(inputs)
    assert_near(got, attend(inputs, "reference"), "float32")
    count = chosen.count + ~(chosen.ids == layer.capacity - 1).any(-1)
    np.testing.assert_allclose(got.lse, np.repeat(np.log(count), 4, axis=1), rtol=1e-6)


@gpu
@pytest.mark.parametrize("stats", ["token_logits", "listed_logits"])
@pytest.mark.parametrize("case", [MANY_HEADS, LONG], ids=str)
def test_a_row_alone_gives_the_same_bits(case, stats):
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
def test_the_same_call_gives_the_same_bits(stats, case):
    inputs = case.build()
    first = attend(inputs, stats=stats)
    for _ in range(50):
        assert_same(attend(inputs, stats=stats), first)


@gpu
@pytest.mark.parametrize("sm_scale", [1.0, 0.0])
def test_round_scales(sm_scale):
    inputs = by_name["tokens"].build()
    assert_near(
        attend(inputs, "triton", sm_scale), attend(inputs, "reference", sm_scale), "float32"
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (TokenCase("", group=17), "takes at most 16 query heads .* per KV head, not 17"),
        (TokenCase("", head_dim=320), "takes head dimensions up to 256 .* not 320"),
        (TokenCase("", head_dim=68), "multiples of 8, not 68"),
    ],
)
def test_what_the_kernel_cannot_do_is_the_references(case, message):
    with pytest.raises(
        ValueError,
        match=f"implementation='triton': token_sparse_decode on this backend .*{message}",
    ):
        token_sparse_decode(*case.build(), implementation="triton")
    assert token_sparse_decode(*case.build()).o.shape == (2, 2 * case.group, case.head_dim)


def test_mixed_types_are_refused():
    q, layer, chosen = by_name["tokens"].build()
    with pytest.raises(
        ValueError, match="takes q, K and V of one type of .*, not bfloat16, float32"
    ):
        token_sparse_decode(q.astype(jnp.bfloat16), layer, chosen, implementation="triton")


@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_whose_logits_come_with_the_list_are_not_read(dtype):
    """Keys of tokens other than the newest are NaN; a head of several units is among them."""
    case = TokenCase("", head_dim=128, num_pages=300, listed="all", table="scrambled", bias=True)
    inputs = cast(case.build(), dtype)
    q, layer, chosen = inputs
    grouped = q.reshape(*layer.lengths.shape, -1, q.shape[-1])
    newest = jnp.maximum(layer.lengths - 1, 0)[..., None]
    page, slot = physical_pages(layer, newest // layer.page_size), newest % layer.page_size
    read = jnp.full_like(layer.k, jnp.nan).at[page, slot].set(layer.arrays[0][page, slot])
    logits = products(grouped, layer.k, layer, chosen.ids) * q.shape[-1] ** -0.5
    known = Inputs(q, layer._replace(k=read), replace(chosen, logits=logits))
    got = attend(known, stats="listed_logits")
    assert_near(got, attend(inputs, "reference", stats="listed_logits"), dtype)


@gpu
@pytest.mark.parametrize("number", [1, 5, 64, 1000])
@pytest.mark.parametrize(("dtype", "head_dim", "group"), [("bfloat16", 128, 4), ("float32", 96, 7)])
def test_products_are_those_of_the_gathered_rows(dtype, head_dim, group, number):
    case = TokenCase("", head_dim=head_dim, group=group, num_pages=100, table="scrambled")
    q, layer, _ = cast(case.build(), dtype)
    slots = np.random.default_rng(number).integers(
        layer.capacity, size=(*layer.lengths.shape, number)
    )
    slots = jax.device_put(slots.astype(np.int32))
    grouped = q.reshape(*layer.lengths.shape, -1, head_dim)
    got = jax.jit(products)(grouped, layer.k, layer, slots)
    rows = read_slots(layer.k, layer, slots).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        want = jnp.einsum("bkgh,bknh->bkgn", grouped.astype(jnp.float32), rows)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
