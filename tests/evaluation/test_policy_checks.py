"""Tests that the policy checks find each broken rule by its name, and no other."""

import inspect
from pathlib import Path

import jax.numpy as jnp
import pytest

from jsparse.evaluation.contract_rules import NAMES
from jsparse.evaluation.contract_violations import leaves_out
from jsparse.evaluation.policy_checks import check
from jsparse.evaluation.policy_trial import PAGE, LayerSelection, random_model
from jsparse.policies.expressions import parse
from jsparse.policies.own_code import with_budget
from jsparse.policy import Reread, at_layer
from jsparse.selection import Selection
from tests.support import broken_policies
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS, outermost

# further rules that the policy that breaks a rule also breaks
FOLLOWS = {
    "rows": {"alone"},
    "finite": set(NAMES) - {"types", "runs", "owners", "selections"},
    **{name: {"mass"} for name in ("pool", "inactive")},  # they choose pages without the query
}


def checked(name, rules):
    """The findings for the policy that breaks the rule `name`."""
    build, full = getattr(broken_policies, name), None
    policy = build(16) if name == "budget" else build()
    if name == "budget":
        full = build(2**20)
    return check(policy, full, params=random_model(1), rules=rules)


SLOW = ("budget", "pool", "alone", "pieces", "rows", "selections")


@pytest.mark.parametrize("name", slow_except(NAMES, *(name for name in NAMES if name not in SLOW)))
def test_broken_rule_is_found_by_its_name(name):
    [finding] = checked(name, [name]).findings
    assert finding.rule.name == name
    assert finding.kept is False, finding
    assert finding.detail
    assert "\n" not in finding.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_other_rule_is_found_broken(name):
    found = set(checked(name, NAMES).broken)
    assert {name} <= found <= {name} | FOLLOWS.get(name, set())


@pytest.mark.slow  # the default run checks only broken policies
@pytest.mark.parametrize("expression", METHODS)
def test_methods_keep_all_rules(expression):
    full = with_budget(expression, 2**20)
    found = check(parse(expression), full, params=random_model(2))
    assert found.broken == []
    assert (found.leaves_out is False) == (expression in ("dense()", "all_pages()"))
    asked = {finding.rule.name for finding in found.findings if finding.kept}
    assert asked >= set(NAMES) - {"selections", "budget", "mass"}
    assert ("mass" in asked) == (found.leaves_out is True)
    assert "budget" in asked or outermost(expression) != "quest"


def test_second_pass_over_a_prompt_is_checked():
    def score(state, layer, view):
        return at_layer(state, layer, state[layer]._replace(tracked=None))

    policy = parse("kvzip(budget=8, sink=1, recent=2)")
    assert policy.eviction is not None
    eviction = policy.eviction._replace(reread=Reread(16, score))
    found = check(policy._replace(eviction=eviction), params=random_model(1), rules=["types"])
    assert found.broken == ["types"]
    assert "reread turns state[0].tracked from float32" in found.findings[0].detail


@pytest.mark.parametrize("types", [True, False])
def test_rules_that_cannot_be_checked_give_the_reason(types):
    name = "types" if types else "runs"
    found = checked(name, ["types", "runs", "rows", "budget"])
    why = {finding.rule.name: finding.detail for finding in found.findings if finding.kept is None}
    other = {"runs": "the state changes its types"} if types else {}
    other |= {} if types else {"types": "the policy does not run"}
    assert why == other | dict.fromkeys(["rows", "budget"], "the policy does not run")
    assert found.leaves_out is None


@pytest.mark.parametrize(("granularity", "tokens"), [("page", PAGE), ("token", 1)])
def test_list_of_all_held_tokens_leaves_nothing_out(granularity, tokens):
    ids, share = jnp.arange(3, dtype=jnp.int32)[None, None], jnp.ones((1, 1), jnp.float32)
    chosen = Selection(ids, jnp.full((1, 1), 3, jnp.int32), granularity=granularity)
    for held, left_out in ((3 * tokens, False), (3 * tokens + 1, True)):
        lengths = jnp.full((1, 1), held, jnp.int32)
        assert leaves_out(LayerSelection(chosen, lengths, share, share)) == left_out


def test_error_names_the_line_of_the_policy():
    [finding] = checked("runs", ["runs"]).findings
    lines, first = inspect.getsourcelines(broken_policies.runs)
    at = first + next(i for i, line in enumerate(lines) if ".max() > 8" in line)
    assert finding.detail.startswith("TracerBoolConversionError: ")
    assert finding.detail.endswith(f"({Path(broken_policies.__file__)}:{at})")
