"""Tests admission: one order of checks, no allocations, and memory checks only for allocators."""

import jax
import jax.numpy as jnp
import pytest

from jsparse.builder import dense
from jsparse.machine import memory
from jsparse.policies.expressions import as_policy, parse
from jsparse.runtime.admission import admit
from jsparse.runtime.host_store import OnHost
from jsparse.runtime.session import Session
from jsparse.runtime.store import OnDevice
from tests.support.tiny import spec_of, tiny_params
from tests.support.toy_policies import page_bound


def asked(policy="dense", **options):
    params = tiny_params(num_layers=2)
    return admit(params, as_policy(policy), spec_of(params, 2), **options)


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda *_, **__: 1000)


def test_nothing_is_allocated():
    params = tiny_params(num_layers=2)
    before = {id(array) for array in jax.live_arrays()}
    admit(params, parse("quest(budget=16)"), spec_of(params, 2), further_turns=True)
    assert {id(array) for array in jax.live_arrays()} <= before


def test_alias_is_admitted_as_the_resolved_policy():
    assert asked("auto").policy is dense()


def test_k_and_v_are_stored_as_the_policy_asks():
    assert isinstance(asked().store, OnDevice)
    assert isinstance(asked("offloaded(quest(budget=16), tail=64)").store, OnHost)


def test_steps_per_program_are_as_requested():
    for policy, steps in (("dense", 3), ("offloaded(quest(), tail=64)", 1)):
        assert asked(policy, steps_per_program=steps).max_steps == steps


def test_memory_is_checked_last_and_only_if_allocated(no_memory):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        asked(steps_per_program=0)
    with pytest.raises(ValueError, match=r"max_length=128 .* must fit in the 1000 B"):
        asked()
    assert asked(allocates=False).policy is dense()
    params = tiny_params(num_layers=2)
    with pytest.raises(ValueError, match="must fit in the 1000 B"):
        Session(params, dense(), spec_of(params, 2))
    assert Session(params, dense(), spec_of(params, 2), adopts=True).deployment.policy is dense()


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("snapkv(budget=64)", {"further_turns": True}, "must not change the cache after the"),
        ("dense", {"rows_join": True, "per_request": "p"}, "per_request='p': must be a list"),
        ("dense", {"rows_join": True, "per_request": ["p"]}, r"must be among \['dense'\]"),
    ],
)
def test_unsupported_policies_are_refused(policy, options, message):
    with pytest.raises(ValueError, match=message):
        asked(policy, **options)


def test_joining_rows_own_all_state_if_the_policy_evicts():
    """The pages of the prefill are freed, and their arrays with them."""
    policy = parse("snapkv(budget=64)")
    asked(policy, rows_join=True)
    with pytest.raises(ValueError, match=r"per_request=\('dense',\): must be among \[\]"):
        asked(policy, rows_join=True, per_request=["dense"])
    paged = policy._replace(init=lambda spec: (jnp.zeros(spec.pages),))
    with pytest.raises(ValueError, match="must have no page arrays in its state"):
        asked(paged, rows_join=True)


def test_corrections_cannot_be_combined_with_eviction():
    evicts = parse("snapkv(budget=64)")
    policy = evicts._replace(services=evicts.services._replace(correct_every=4))
    params = tiny_params(num_layers=2)
    with pytest.raises(ValueError, match="correct_every=4: must be 0 if the policy evicts"):
        admit(params, policy, spec_of(params, 2))


def test_missing_constants_are_reported_before_memory(no_memory):
    policy = page_bound()._replace(needs=("tides",))
    params = tiny_params(num_layers=2)
    with pytest.raises(ValueError, match="needs 'tides': must be among the constants"):
        admit(params, policy, spec_of(params, 2))
