"""Tests how much of a device's memory an engine allocates for K and V."""

import jax
import pytest

from jsparse.engine.options import EngineOptions
from jsparse.engine.pool_size import pool_groups
from jsparse.engine.row_memory import DeviceRows
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
def test_gpu_memory_is_filled_where_prompts_can_be_cached(backend, policy, all_of_it, monkeypatch):
    params = tiny_params(num_layers=1)
    spec = capacity.cache_spec(params, [[]] * ROWS, [0] * ROWS, LONGEST, PAGE)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 2**24)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows = DeviceRows(parse(policy), spec, spec)
    groups = pool_groups(rows, EngineOptions())
    assert (groups > ROWS * LONGEST // PAGE + 1) == all_of_it
    if all_of_it:
        fitting, larger = map(rows.device_bytes, (groups, groups + 1))
        assert fitting <= 2**24 < larger
    else:
        assert groups == ROWS * LONGEST // PAGE + 1
