"""Tests `jsparse check-policy`: its output and exit codes."""

from pathlib import Path

from typer.testing import CliRunner

from jsparse.cli.app import app
from jsparse.evaluation import policy_checks
from jsparse.evaluation.contract_rules import RULES
from jsparse.evaluation.policy_checks import CheckResult, Finding

BROKEN = Path(__file__).parents[1] / "support" / "broken_policies.py"


def run(*args):
    return CliRunner().invoke(app, ["check-policy", *map(str, args)])


def test_broken_rule_is_named_with_its_fix():
    ran = run(f"{BROKEN}:types")
    assert (ran.exit_code, ran.stderr) == (1, "")
    first, *lines = ran.stdout.splitlines()
    assert first == f"{BROKEN}:types"
    assert lines[:4] == [
        "BROKEN  types       the state keeps its shapes and types",
        f"{'':20}seen: append turns state[0] from int32[2] into float32[2]",
        f"{'':20}rule: {RULES[0].contract}",
        f"{'':20}fix: {RULES[0].fix}",
    ]
    assert f"{'':20}not checked: the state changes its types" in lines
    assert lines[-1] == "broken: types"


def test_reference_without_a_policy_is_refused_in_one_line():
    for policy, said in [
        ("nope", "unknown policy 'nope'"),
        ("absent.py:mine", "absent.py cannot be imported"),
        (f"{BROKEN}:absent", "has no absent"),
        ("quest(budget=0)", "budget=0: must be an integer of at least 1"),
    ]:
        ran = run(policy)
        assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), policy
        assert said in ran.stderr, policy


def test_budget_is_small_unless_given(monkeypatch):
    """The policy breaks no rule and leaves out no token."""
    calls, arkvale = [], "arkvale(budget={}, volume='cuboid')"

    def check(policy, full):
        calls.append((str(policy), full and str(full)))
        return CheckResult([Finding(rule, True) for rule in RULES], leaves_out=False)

    monkeypatch.setattr(policy_checks, "check", check)
    for given, small, full in [
        ("arkvale", arkvale.format(16), arkvale.format(2**20)),
        ("arkvale(8)", arkvale.format(8), arkvale.format(2**20)),
        ("streaming(1, 4)", "streaming(sink=1, recent=4)", None),
        (f"{BROKEN}:budget", f"{BROKEN}:budget(budget=16)", f"{BROKEN}:budget(budget=1048576)"),
    ]:
        ran = run(given)
        assert calls.pop() == (small, full)
        shown = ran.stdout.splitlines()
        assert (ran.exit_code, shown[0], shown[-1]) == (0, small, "no rule is broken"), given
        assert ran.stderr.startswith("note: it attends to all tokens of these short prompts")
        assert ran.stderr.count("\n") == 1, given
