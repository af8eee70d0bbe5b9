"""Tests rope_append: rotation against complex numbers, and that each slot is written once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import read_slots
from jsparse.pallas_kernels.rope_append import rope_append
from tests.kernels.cases.rope_append import CASES, Case
from tests.support.marks import slow_except_named

by_name = {case.name: case for case in CASES}


@partial(jax.jit, static_argnames="dtype")
def turned_and_kept(qkv, table, scales, layer, positions, valid, dtype="float32"):
    heads = Case("any").build().heads._replace(qkv=qkv, table=table, scales=scales)
    heads = heads._replace(num_heads=qkv.shape[-2] - 2 * layer.lengths.shape[1], dtype=dtype)
    return rope_append(heads, layer, positions, valid)


@pytest.mark.parametrize(
    "case",
    slow_except_named(
        [x for x in CASES if not x.broken and x.kept != "int8"], "paged", "several", "parts"
    ),
    ids=str,
)
def test_heads_are_rotated_and_stored_in_the_newest_slot(case):
    heads, layer, positions, valid = case.build()
    given = heads.qkv, heads.table, heads.scales, layer, positions, valid
    q, k, v, kept = turned_and_kept(*given, dtype=case.dtype)
    # k is as the cache holds it
    rounding = 8 * float(max(jnp.finfo(x).eps for x in (case.dtype, case.kept)))
    qkv = np.asarray(heads.qkv)
    if case.parts is not None:
        qkv = sum(qkv).astype(heads.dtype)
    qkv = qkv.astype(np.float64)
    split = np.split(qkv, [case.heads, case.heads + case.kv_heads], axis=2)
    half = case.head_dim // 2
    # angles are float32: at positions in the thousands they are slightly off
    frequencies = (1e4 ** (-np.arange(half) / half)).astype(np.float32)
    angles = np.asarray(positions, np.float32)[..., None] * frequencies
    turn = 1.1 * np.exp(1j * angles.astype(np.float64))[:, :, None]
    for got, own, nth in ((q, split[0], 0), (k, split[1], 1)):
        if case.normed:
            size = np.sqrt(np.mean(own**2, axis=-1, keepdims=True) + 1e-5)
            own = own / size * np.asarray(heads.scales[nth], np.float64)
        wanted = (own[..., :half] + 1j * own[..., half:]) * turn
        wanted = np.concatenate([wanted.real, wanted.imag], axis=-1)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, rtol=0, atol=rounding * np.abs(wanted).max()
        )
    np.testing.assert_array_equal(v, split[2].astype(layer.v.dtype))
    pools = [np.asarray(pool, np.float64).copy() for pool in (layer.k, layer.v)]
    written = np.zeros(pools[0].shape[:2], bool)
    for row, head, nth in np.ndindex(*layer.lengths.shape, case.tokens):
        if nth >= valid[row]:
            continue
        slot = int(layer.lengths[row, head] - valid[row]) + nth
        if slot >= case.pages * case.page_size:
            continue
        page = (row * case.kv_heads + head) * case.pages + slot // case.page_size
        if case.paged:
            page = int(layer.block_table[row, head, slot // case.page_size])
        written[page, slot % case.page_size] = True
        for pool, new in zip(pools, (k, v), strict=True):
            pool[page, slot % case.page_size] = new[row, nth, head].astype(layer.k.dtype)
    np.testing.assert_array_equal(kept.k, pools[0])
    np.testing.assert_array_equal(kept.v, pools[1])
    np.testing.assert_array_equal(kept.lengths, layer.lengths)
    if case.beside:
        np.testing.assert_array_equal(kept.bias, np.where(written, 0.0, 1.0))
        assert (np.asarray(kept.slot_positions) >= 0).sum() == written.sum()


def test_heads_in_8_bits_are_returned_as_they_are_held():
    heads, layer, positions, valid = by_name["int8"].build()
    given = heads.qkv, heads.table, heads.scales
    zeros = jnp.zeros(layer.k.shape, jnp.float32)
    exact = turned_and_kept(*given, layer._replace(k=zeros, v=zeros), positions, valid)
    q, k, v, kept = turned_and_kept(*given, layer, positions, valid)
    np.testing.assert_array_equal(q, exact[0])
    np.testing.assert_array_equal(kept.bias, exact[3].bias)
    newest = jnp.maximum(layer.lengths - 1, 0)[..., None]
    written = np.asarray((valid > 0)[:, None] & (layer.lengths <= layer.capacity))
    for pool, held, own in zip(kept[:2], (k, v), exact[1:3], strict=True):
        wanted = pool.rounded(own.swapaxes(1, 2))
        np.testing.assert_array_equal(held.swapaxes(1, 2), wanted)
        assert np.abs(wanted - own.swapaxes(1, 2)).max() > 0
        read = read_slots(pool, layer, newest)
        np.testing.assert_array_equal(read[written], wanted[written])
        before = read_slots(layer.k if pool is kept.k else layer.v, layer, newest)
        np.testing.assert_array_equal(read[~written], before[~written])


def test_arguments_that_do_not_fit_are_refused():
    heads, layer, positions, valid = Case("given").build()
    none = heads._replace(qkv=jnp.zeros((0, *heads.qkv.shape)))
    with pytest.raises(ValueError, match=r"qkv=float32\[0, 3, 1, 10, 32\]: must have 4 axes, or"):
        rope_append(none, layer, positions, valid)
    for wrong in (4, 5):
        with pytest.raises(ValueError, match=f"of {wrong} query heads: must fit lengths of shape"):
            rope_append(heads._replace(num_heads=wrong), layer, positions, valid)
    narrow = heads._replace(table=(heads.table[0], heads.table[1][..., 1:]))
    with pytest.raises(ValueError, match=r"sin.shape=\(3, 1, 15\): must be \[B, T, H / 2\]"):
        rope_append(narrow, layer, positions, valid)
    with pytest.raises(ValueError, match="scales: must be of the heads' width, 32"):
        rope_append(heads._replace(scales=(jnp.ones(16),) * 2), layer, positions, valid)


def test_nan_and_infinities_become_zeros_in_the_cache():
    heads, *rest = Case("broken", broken=True).build()
    whole = Case("broken").build().heads
    out, expected = (turned_and_kept(x.qkv, x.table, x.scales, *rest) for x in (heads, whole))
    changed = 0
    for got, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(got).all()
        at = np.asarray(got) != np.asarray(wanted)
        assert not np.asarray(got)[at].any()
        changed += at.sum()
    # RoPE pairs channels of K, so that each number affects two outputs and two cache entries
    assert changed == (2 + 2 + 1) * 2
