"""Runs one battery over every registered method (policy_table.py): the rules of `check-policy`.

Also tests the properties that the command does not check.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.builder import builder, dense
from jsparse.evaluation.contract_rules import NAMES
from jsparse.evaluation.policy_checks import check
from jsparse.policies import POLICIES, REGISTRY
from jsparse.policies.combinators import keep
from jsparse.policies.expressions import as_policy, parse
from jsparse.policy import Policy, Services
from jsparse.selection import Granularity, nothing
from tests.support.marks import slow_except
from tests.support.policy_table import MECHANISMS, METHODS, TABLE, at_dense, firsts, outermost
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)
from tests.support.toy_policies import bypass, even_ids, inherit, page_bound, shrink

PAGE = 8
PROMPTS = random_prompts((37, 9))
FORCED = random_tokens(2, 20)
TOYS = (page_bound(), inherit(), bypass(), shrink(), even_ids())
# by default a set with few programs; tests/engine runs over pools
FEW = [name for name in NAMES if name not in ("alone", "pool", "budget", "mass")]


def params():
    return tiny_params(num_layers=2)


def decoded(policy, prompts, forced=FORCED):
    return engine_logits(params(), policy, prompts, forced, page_size=PAGE, max_length=64)


def test_every_registered_policy_is_in_the_table():
    listed = {outermost(expression) for expression in TABLE}
    listed.add("auto")  # never runs itself: tests/policies/test_auto.py
    assert listed == set(POLICIES), "add expressions of it to tests/support/policy_table.py"


def test_evicting_methods_are_registered_as_evicting():
    built = {name: parse(expression) for name, expression in firsts(TABLE).items()}
    evicting = {name for name, policy in built.items() if policy.eviction is not None}
    assert evicting == {method.build.__name__ for method in REGISTRY if method.kind == "evicts"}, (
        "set `kind` in jsparse/policies/__init__.py"
    )


# tests/engine runs lychee_decode and the evicting one
@pytest.mark.parametrize("expression", slow_except(MECHANISMS, "twilight(all_pages(), p=0.6)"))
def test_mechanisms_keep_the_contract(expression):
    found = check(parse(expression), rules=FEW)
    assert not [finding for finding in found.findings if finding.kept is False]
    assert found.leaves_out is not False


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*TABLE, *TOYS], ids=str)
def test_all_keep_the_contract(policy):
    """Expressions of the table also leave out some tokens; otherwise they would prove little."""
    full = at_dense(policy) if isinstance(policy, str) else None
    found = check(as_policy(policy), full)
    assert not [finding for finding in found.findings if finding.kept is False]
    kept = {finding.rule.name for finding in found.findings if finding.kept}
    assert kept >= set(NAMES) - {"selections", "budget", "mass"}
    if isinstance(policy, str):
        whole = outermost(policy) in ("dense", "all_pages") or policy.startswith("keep(dense()")
        assert (found.leaves_out is False) == whole


@pytest.mark.slow
@pytest.mark.parametrize("expression", [x for x in METHODS if parse(x).evicts])
def test_evictors_at_full_budgets_equal_dense(expression):
    """The command does not check it, because drops may depend on more than a budget."""
    assert_close(decoded(at_dense(expression), PROMPTS), decoded("dense", PROMPTS), rtol=2e-5)


SHORT = tuple(x for x in METHODS if not parse(x).evicts and parse(x).offload is None)


@pytest.mark.slow
@pytest.mark.parametrize("expression", SHORT)
def test_rows_below_dense_below_have_the_bits_of_dense(expression):
    """Beside a long sparse row, and in a batch of short rows."""
    policy = parse(expression)
    short = policy._replace(dense_below=lambda held: len(PROMPTS[1]) + FORCED.shape[1])
    # corrections round differently
    exact = dense()._replace(
        services=Services(correct_every=policy.services.correct_every),
        prefill_method=policy.prefill_method,
    )
    few = [PROMPTS[1], PROMPTS[1][::-1]]
    read_only = decoded(short, PROMPTS)
    np.testing.assert_array_equal(read_only[:, 1], decoded(exact, PROMPTS)[:, 1])
    np.testing.assert_array_equal(decoded(short, few), decoded(exact, few))
    assert_close(read_only[:, 0], decoded(policy, PROMPTS)[:, 0], rtol=2e-5)


@builder
def blind(granularity: Granularity = "page", summary: bool = False) -> Policy:
    """An empty selection everywhere; with a summary that is also empty."""

    def select(state, layer, q, view):
        partial = (jnp.full(q.shape, jnp.nan), jnp.full(q.shape[:2], -jnp.inf)) if summary else None
        return nothing(view.layers[layer].lengths, granularity), partial, state

    return Policy(select)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["page", "token"])
def test_empty_selection_gives_zero(granularity):
    """With any statistics, and although an empty summary holds NaN."""
    policy = blind(granularity, True)._replace(stats=lambda layer: "page_mass")
    logits = decoded(policy, PROMPTS, FORCED[:, :3])
    assert np.isfinite(logits).all()
    without = blind(granularity, False)
    np.testing.assert_array_equal(logits, decoded(without, PROMPTS, FORCED[:, :3]))
    assert np.abs(logits - decoded("dense", PROMPTS, FORCED[:, :3])).max() > 0.1


def test_keep_refuses_policies_with_a_summary():
    """A summary may stand for kept tokens, which would then count twice."""
    with pytest.raises(ValueError, match=r"keep cannot wrap it"):
        jsparse.generate(params(), PROMPTS[0], max_new_tokens=2, policy=keep(blind("page", True)))
