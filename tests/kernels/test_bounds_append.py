"""Tests bounds_append: bounds are those of the tokens that their pages hold."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse import cache as kv
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import PageBounds, PageBounds8, init
from jsparse.pallas_kernels.page_bounds import page_bounds
from tests.kernels.cases.page_bounds import CASES, build, frame_for
from tests.support.histories import after_each, histories, step
from tests.support.key_checks import of, physical
from tests.support.marks import slow_except
from tests.support.small_cache import B, K, M, P, T, small_spec

ragged = next(case for case in CASES if case.name == "ragged")
H = 2
SPEC = small_spec(head_dim=H)


@partial(jax.jit, static_argnums=(0, 1))
def made(spec, form):
    return kv.init(spec), init(spec, form=form)


def keep(bounds, layer, _, valid, first):
    return bounds_append(bounds, layer, valid, first, max_new=T)


@pytest.mark.parametrize(
    "form", slow_except([PageBounds, PageBounds8], PageBounds8), ids=lambda form: form.__name__
)
@settings(max_examples=25)
@given(history=histories, paged=st.booleans(), seed=st.integers(0, 2**16))
def test_bounds_depend_only_on_the_current_tokens(form, history, paged, seed):
    """They stay tight after chunks and rewrites, and those of other pages do not change."""
    made_of = made(SPEC._replace(pool_pages=B * K * M + 1 if paged else None), form)
    for cache, bounds in after_each(history, seed, *made_of, keep=keep):
        layer = cache.layers[0]
        keys = np.asarray(layer.k)
        for b, n, page in np.ndindex(B, K, M):
            held = min(max(int(layer.lengths[b, n]) - page * P, 0), P)
            if held:
                lies = physical(layer, b, n, page)
                want = of(form, keys[lies, :held].min(0), keys[lies, :held].max(0))
                for kept, tightest in zip(bounds, want, strict=True):
                    np.testing.assert_array_equal(np.asarray(kept)[lies], tightest)


def test_only_written_pages_are_touched():
    cache, bounds = made(SPEC, PageBounds)
    ones = np.ones((B, T, K, H), np.float32)
    cache, bounds = step(cache, bounds, ones, np.array([5, 0], np.int32), keep=keep)
    cache = kv.replace_layer(
        cache, 0, cache.layers[0]._replace(k=np.asarray(cache.layers[0].k) + 1)
    )  # K changes without an append
    _, bounds = step(cache, bounds, 4 * ones, np.array([1, 2], np.int32), keep=keep)
    np.testing.assert_array_equal(
        np.asarray(bounds.high)[:, 0].reshape(B, K, M), [[[1, 4, 0]] * 2, [[4, 0, 0]] * 2]
    )
    np.testing.assert_array_equal(
        np.asarray(bounds.low)[:, 0].reshape(B, K, M), [[[1, 2, 0]] * 2, [[4, 0, 0]] * 2]
    )


def test_tokens_without_room_change_no_page_of_another_head():
    cache, bounds = made(SPEC, PageBounds)
    for value in (1, 2):
        full = np.full((B, T, K, H), value, np.float32)
        cache, bounds = step(cache, bounds, full, np.array([T, 0], np.int32), keep=keep)
    full = np.full((B, T, K, H), 9, np.float32)
    cache, bounds = step(cache, bounds, full, np.array([T, 0], np.int32), keep=keep)
    assert cache.overflow.tolist() == [True, False]
    np.testing.assert_array_equal(
        np.asarray(bounds.high)[:, 0].reshape(B, K, M), [[[1, 2, 2]] * 2, [[0, 0, 0]] * 2]
    )
    out = jax.jit(page_bounds)(np.ones((B, 4, H), np.float32), cache.layers[0], bounds)
    assert out.shape == (B, K, M)
    assert np.isneginf(np.asarray(out)[1]).all()


def test_bounds_in_ks_dtype_have_no_frame():
    _, layer, bounds = build(ragged)
    frame, valid = frame_for(ragged), np.ones(ragged.batch, np.int32)
    message = "frame: must be None with PageBounds, which bound K as it is"
    with pytest.raises(ValueError, match=message):
        bounds_append(bounds, layer, valid, np.asarray(layer.lengths) - 1, max_new=1, frame=frame)
    with pytest.raises(
        ValueError, match="frame: must have 32 pairs of channels and 1 spans, not 32 and 0"
    ):
        bounds_append(
            of(PageBounds8, *bounds),
            layer,
            valid,
            np.asarray(layer.lengths) - 1,
            max_new=1,
            frame=frame._replace(angles=np.asarray(frame.angles)[:0]),
        )
