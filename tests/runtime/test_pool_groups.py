"""Tests how much of a device's memory an engine takes for K and V."""

import jax
import pytest

from jsparse.machine import memory
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity
from tests.support.tiny import tiny_params

ROWS, LONGEST, PAGE = 3, 64, 8


@pytest.mark.parametrize(
    ("backend", "policy", "all_of_it"),
    [
        ("gpu", "dense", True),
        ("cpu", "dense", False),
        ("gpu", "double_sparsity(budget=16, channels=2)", False),
    ],
)
def test_a_gpu_is_filled_where_prompts_can_be_kept(backend, policy, all_of_it, monkeypatch):
    params = tiny_params(num_layers=1)
    spec = capacity.cache_spec(params, [[]] * ROWS, [0] * ROWS, LONGEST, PAGE)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 2**24)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    groups = capacity.pool_groups(spec, policy := parse(policy), None, 0.9)
    assert (groups > ROWS * LONGEST // PAGE + 1) == all_of_it
    if all_of_it:
        pools = [spec._replace(pool_pages=n * spec.num_kv_heads) for n in (groups, groups + 1)]
        fitting, larger = (capacity.device_bytes(pool, policy) for pool in pools)
        assert fitting <= 2**24 < larger
    else:
        assert groups == ROWS * LONGEST // PAGE + 1
