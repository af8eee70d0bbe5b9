"""Tests capacities, and that caches that do not fit are refused."""

import jax.numpy as jnp
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.builder import dense
from jsparse.cache import CacheSpec
from jsparse.machine import memory
from jsparse.policy import Policy
from jsparse.runtime import capacity
from tests.support.tiny import tiny_params

SPEC = CacheSpec(
    num_layers=2,
    batch=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    num_pages=64,
    dtype=jnp.bfloat16,
)


@settings(max_examples=300)
@given(st.integers(1, 2**24), st.sampled_from([8, 16, 32, 64]))
def test_bucket_holds_the_tokens_in_whole_pages_with_little_to_spare(tokens, page_size):
    size = capacity.bucket(tokens, page_size)
    assert size >= tokens
    assert size % page_size == 0
    assert size <= 512 or size < 2 * tokens
    assert size <= 8192 or size - tokens < tokens / 8 + 1
    assert capacity.bucket(size, page_size) == size


def test_buckets_are_few():
    assert {capacity.bucket(tokens, 16) for tokens in range(1, 2**13, 7)} == {
        2**n for n in range(9, 14)
    }
    assert len({capacity.bucket(tokens, 16) for tokens in range(1, 2**17, 7)}) <= 5 + 8 * 4


def test_buckets_of_a_gpu_are_close(monkeypatch):
    monkeypatch.setattr(capacity.jax, "default_backend", lambda: "gpu")
    sizes = [capacity.bucket(tokens, 16) for tokens in (1, 64, 65, 600, 5000)]
    assert sizes == [64, 64, 128, 640, 5120]


def test_slots_left_after_the_prompt_are_close_to_those_needed(monkeypatch):
    """Or all of them, if a bucket would take that."""
    monkeypatch.setattr(capacity.jax, "default_backend", lambda: "gpu")
    assert SPEC.capacity == 1024
    needed = (1, 640, 641, 896, 897, 961, 5000)
    left = [capacity.slots_left(tokens, SPEC) for tokens in needed]
    assert left == [64, 640, 704, 896, 960, 1024, 1024]


def test_few_sizes_remain_after_the_prompt_on_a_cpu():
    left = {capacity.slots_left(tokens, SPEC) for tokens in range(1, 2000)}
    assert left == {64, 128, 256, 512, 1024}


def test_cache_may_hold_a_single_token():
    spec = capacity.cache_spec(tiny_params(num_layers=1), [[]], 1, 1, 8)
    assert spec.capacity == 8


def test_available_bytes_of_a_cpu_are_the_hosts():
    assert 0 < memory.available_bytes() <= psutil.virtual_memory().total


STATEFUL = Policy(
    dense().select, init=lambda spec: (jnp.zeros((spec.batch, 1000)), jnp.zeros(8, jnp.int8))
)
KEPT = (
    (dense(), 0),
    (STATEFUL, 3 * 1000 * 4 + 8),  # bytes of the two arrays
    (
        STATEFUL._replace(needs=("bias", "slot_positions")),
        3 * 1000 * 4 + 8 + 2 * 4 * 2 * 3 * 2 * 1024,
    ),
)


def test_cache_and_policy_state_must_fit_to_the_byte(monkeypatch):
    said = r"max_length=1024 for 3 prompt\(s\) takes \S+ MiB of cache: must fit in the \S+ MiB"
    for policy, kept in KEPT:
        needed = SPEC.nbytes + kept
        assert capacity.policy_bytes(SPEC, policy) == kept
        monkeypatch.setattr(memory, "available_bytes", lambda needed=needed, **_: needed)
        capacity.require_fit(SPEC, policy)
        monkeypatch.setattr(memory, "available_bytes", lambda needed=needed, **_: needed - 1)
        with pytest.raises(ValueError, match=said):
            capacity.require_fit(SPEC, policy)


def test_huge_cache_is_refused_before_it_is_allocated():
    with pytest.raises(ValueError, match=r"max_length=\d+ for 3 prompt"):
        capacity.require_fit(SPEC._replace(num_pages=2**40), dense())
