"""Tests token_sparse_decode against float64 dense attention and the op over pages."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.token_sparse_decode import token_sparse_decode
from jsparse.selection import Selection, from_token_mask, nothing
from jsparse.selection.attended import token_mask
from jsparse.selection.partials import ListedLogits
from tests.kernels.cases.block_sparse_decode import Case
from tests.kernels.cases.token_sparse_decode import CASES
from tests.support.decode_checks import (
    assert_matches_dense,
    assert_reports_rounded_mean,
    assert_rounds_o,
)
from tests.support.marks import slow_except_named


@pytest.mark.parametrize(
    "case",
    slow_except_named(CASES, "few_listed", "head_dim_96", "dense_and_sparse", "scrambled", "int8"),
    ids=str,
)
def test_matches_dense_attention(case):
    assert_matches_dense(token_sparse_decode, case)


def test_o_has_the_requested_dtype():
    assert_rounds_o(token_sparse_decode, CASES[0])


def test_reported_logits_are_of_the_mean_query_rounded_to_its_dtype():
    assert_reports_rounded_mean(token_sparse_decode, "token")


def test_tokens_match_pages_with_bits():
    q, layer, selection = Case("", bits=True, table="scrambled", bias=True).build()

    @jax.jit
    def both(q, layer, selection):
        sizes = {"num_pages": layer.num_pages, "page_size": layer.page_size}
        mask = token_mask(selection, layer.lengths, **sizes)
        tokens = from_token_mask(mask, 40, page_size=16)
        return (
            block_sparse_decode(q, layer, selection, stats="page_mass"),
            token_sparse_decode(q, layer, tokens, stats="page_mass"),
        )

    by_page, by_token = both(q, layer, selection)
    for a, b in zip(jax.tree.leaves(by_page), jax.tree.leaves(by_token), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_listed_logits_leave_out_unattended_tokens():
    """Ids past the end of the list and past the head's length are left out; the newest token counts
    once.
    """
    q, layer, _ = Case("", batch=1, kv_heads=2, lengths="full", bias=True).build()
    layer = layer._replace(lengths=np.array([[40, 17]], np.int32))
    ids = np.array([[[3, 8, 39, 41, 90], [2, 5, 20, 9, 2**31 - 1]]], np.int32)
    chosen = Selection(
        *map(jax.device_put, (ids, np.array([[5, 3]], np.int32))), granularity="token"
    )
    want = [[3, 8, 39], [2, 5, 16]]
    out = jax.jit(partial(token_sparse_decode, stats="listed_logits"))(q, layer, chosen)
    assert isinstance(out.stats, ListedLogits)
    np.testing.assert_array_equal(out.stats.count, [[3, 3]])
    np.testing.assert_array_equal(out.stats.ids, [[[*slots, 0, 0, 0] for slots in want]])
    found = np.asarray(out.stats.logits)
    k, bias = (np.asarray(pool).reshape(2, 96, -1) for pool in (layer.k, layer.bias))
    grouped = np.asarray(q).reshape(2, 4, 64)
    for head, slots in enumerate(want):
        logits = grouped[head] @ k[head, slots].T / 8 + bias[head, slots, 0]
        np.testing.assert_allclose(found[0, head, :, :3], logits, rtol=1e-5, atol=1e-5)
    assert np.isneginf(found[..., 3:]).all()


def test_keys_with_given_logits_are_not_read():
    """One list has the newest token, one does not: its key is read either way."""
    q, layer, _ = Case("", batch=1, kv_heads=2, lengths="full", bias=True).build()
    layer = layer._replace(lengths=np.array([[40, 17]], np.int32))
    ids = np.array([[[3, 8, 39], [2, 5, 0]]], np.int32)
    chosen = Selection(
        *map(jax.device_put, (ids, np.array([[3, 2]], np.int32))), granularity="token"
    )
    keys = np.asarray(layer.k).reshape(2, 96, 64)
    logits = np.einsum(
        "kgh,knh->kgn", np.asarray(q).reshape(2, 4, 64), keys[np.arange(2)[:, None], ids[0]]
    )
    known = replace(chosen, logits=jax.device_put(np.asarray(logits[None] / 8, np.float32)))
    unread = np.full_like(keys, np.nan)
    for head, newest in enumerate((39, 16)):
        unread[head, newest] = keys[head, newest]
    lacking = layer._replace(k=unread.reshape(layer.k.shape))
    attend = jax.jit(partial(token_sparse_decode, stats="listed_logits"))
    want, got = attend(q, layer, chosen), attend(q, lacking, known)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_pages_are_refused():
    q, layer, _ = Case("", granularity="token").build()
    with pytest.raises(ValueError, match=r"granularity='page'.*token_sparse_decode takes 'token'"):
        token_sparse_decode(q, layer, nothing(layer.lengths))


def test_unsupported_arguments_use_the_reference():
    q, layer, chosen = Case("", granularity="token").build()
    mixed = q.astype(jnp.bfloat16), layer, chosen
    for inputs, message in (
        (Case("", group=17, granularity="token").build(), "at most 16 query heads .*, not 17"),
        (
            Case("", head_dim=320, granularity="token").build(),
            "head dimensions up to 256 .* not 320",
        ),
        (Case("", head_dim=68, granularity="token").build(), "multiples of 8, not 68"),
        (mixed, "takes q, K and V of one type of .*, not bfloat16, float32"),
    ):
        with pytest.raises(ValueError, match=f"on this backend .*{message}"):
            token_sparse_decode(*inputs, implementation="triton")
