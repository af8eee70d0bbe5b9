"""Tests that a compression moves rows in place, without a second copy of K and V."""

import re

import jax
import jax.numpy as jnp
import pytest

from jsparse import cache as kv_cache
from jsparse.policies.hard_kv import hard_kv


@pytest.mark.slow
def test_donated_cache_is_not_copied():
    policy = hard_kv(budget=64, floor=32, cap=128, window=8, period=16)
    spec = kv_cache.CacheSpec(2, 2, 4, 2, 16, 16, 12, jnp.float32)
    cache = kv_cache.init(spec, fields=policy.fields)
    program = jax.jit(policy.services.maintain, donate_argnums=(0, 1)).lower(
        policy.init(spec), kv_cache.StepView(cache)
    )
    pool = f"f32[{spec.pages},{spec.page_size},{spec.head_dim}]"
    text = program.compile().as_text()
    assert text is not None
    assert pool in text
    assert not re.findall(rf"= {re.escape(pool)}\S* copy\(", text)
