"""Tests that old names still work until 0.3, and say so."""

import importlib
import subprocess
import sys

import pytest

import jsparse
from jsparse import deprecated
from jsparse.hyper_parameters import whole_number
from jsparse.policies.expressions import as_policy, parse

GATES = ((1, 1), (0, 1))


@pytest.mark.parametrize(("old", "new"), deprecated.MOVED.items())
def test_a_module_that_moved_is_found_under_its_old_name(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new}; the old name goes"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__spec__ is not None and found.__spec__.name == new


def test_a_module_within_one_that_moved_is_the_same_module(monkeypatch):
    for name in ("jsparse.pallas_kernels.select", "jsparse.pallas_kernels.select.cases"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match="jsparse.pallas_kernels.select"):
        found = importlib.import_module("jsparse.pallas_kernels.select.cases")
    assert found is importlib.import_module("jsparse.pallas_kernels.threshold_select.cases")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("jsparse.policies", "parse", parse),
        ("jsparse.policies", "as_policy", as_policy),
        ("jsparse.policies.all_pages", "full", jsparse.all_pages),
        ("jsparse.policy", "dense", jsparse.dense),
        ("jsparse.policy", "whole_number", whole_number),
    ],
)
def test_a_name_that_moved_is_found_where_it_was(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now jsparse."):
        assert getattr(importlib.import_module(module), old) is new
    with pytest.raises(AttributeError, match="has no attribute 'lru'"):
        _ = importlib.import_module(module).lru


def test_the_warning_points_at_the_line_that_imports():
    code = "import jsparse\nfrom jsparse.evaluation.forcing import force\n"
    command = [sys.executable, "-W", "always::DeprecationWarning", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stderr.startswith("<string>:2: DeprecationWarning: jsparse.evaluation.forcing is")


def test_the_policy_full_is_all_pages():
    with pytest.warns(DeprecationWarning, match="jsparse.full is now jsparse.all_pages"):
        assert jsparse.full is jsparse.all_pages
    for expression in ("full", "full()", "twilight(full(), p=0.9)"):
        with pytest.warns(DeprecationWarning, match="the policy full is now all_pages"):
            assert parse(expression) is parse(expression.replace("full", "all_pages"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"budget": 64}, {"value": 64}),
        ({"select": "top_p", "p": 0.9}, {"rule": "top_p", "value": 0.9}),
        (
            {"select": "threshold", "threshold": 0.1, "unit": "token"},
            {"rule": "threshold", "value": 0.1, "granularity": "token"},
        ),
        ({"select": "ratio", "ratio": 0.5, "p": None}, {"rule": "ratio", "value": 0.5}),
    ],
)
def test_lychee_decode_takes_its_old_arguments(old, new):
    with pytest.warns(DeprecationWarning, match="= (is|are) now "):
        assert jsparse.lychee_decode(GATES, **old) is jsparse.lychee_decode(GATES, **new)


def test_the_name_of_a_saved_result_builds_the_policy_again():
    saved = (
        "lychee_decode(gates=((1, 1), (0, 1)), budget=512, select='top_k', p=None, "
        "threshold=None, ratio=None, unit='page', correct_every=0)"
    )
    with pytest.warns(
        DeprecationWarning,
        match="budget=, select=, p=, threshold=, ratio=, unit= are now value=, rule=, ",
    ):
        assert parse(saved) is jsparse.lychee_decode(GATES, 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "ratio", "p": 0.9}, "p=0.9: must not be given where rule='ratio'"),
        (
            {"rule": "top_p", "threshold": 0.1},
            "threshold=0.1: must not be given where rule",
        ),
        ({"ratio": 0.5}, "ratio=0.5: must not be given where rule='top_k'"),
    ],
)
def test_an_old_argument_of_another_rule_is_refused(arguments, message):
    with (
        pytest.warns(DeprecationWarning, match="now "),
        pytest.raises(ValueError, match=f"^{message}"),
    ):
        jsparse.lychee_decode(GATES, **arguments)


def test_two_old_arguments_of_one_new_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="budget= is now value="),
        pytest.raises(ValueError, match="budget=5: must not be given beside value=8"),
    ):
        jsparse.lychee_decode(GATES, value=8, budget=5)


def test_the_op_select_is_threshold_select():
    from jsparse.pallas_kernels import threshold_select as op

    with pytest.warns(DeprecationWarning, match="threshold_select.select is now"):
        assert op.select is op.threshold_select
    with pytest.raises(AttributeError, match="no attribute 'selects'"):
        _ = op.selects
