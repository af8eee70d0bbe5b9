"""Tests that old names still work until 0.3, and say so."""

import importlib
import subprocess
import sys

import pytest

import jsparse
from jsparse import deprecated
from jsparse.policies.expressions import parse
from jsparse.policy import Policy

GATES = ((1, 1), (0, 1))


@pytest.mark.parametrize(("old", "new"), deprecated.MOVED.items())
def test_a_module_that_moved_is_found_under_its_old_name(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new}; the old name goes"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)


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
    with pytest.warns(DeprecationWarning, match=r"= is now (value|rule)="):
        assert jsparse.lychee_decode(GATES, **old) is jsparse.lychee_decode(GATES, **new)


def test_the_name_of_a_saved_result_builds_the_policy_again():
    saved = (
        "lychee_decode(gates=((1, 1), (0, 1)), budget=512, select='top_k', p=None, "
        "threshold=None, ratio=None, unit='page', correct_every=0)"
    )
    with pytest.warns(
        DeprecationWarning,
        match="budget=, select=, p=, threshold=, ratio=, unit= is now value=, rule=, ",
    ):
        assert parse(saved) is jsparse.lychee_decode(GATES, 512)


def test_two_old_arguments_of_one_new_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="p= is now value="),
        pytest.raises(ValueError, match="p=0.5: must not be given beside value=8"),
    ):
        jsparse.lychee_decode(GATES, value=8, p=0.5)


def test_a_policy_may_still_say_full():
    with pytest.warns(DeprecationWarning, match="full= is now dense_at="):
        policy = Policy(jsparse.dense().select, full={"budget": 1})
    assert policy.dense_at == {"budget": 1}
    with pytest.warns(DeprecationWarning, match=r"Policy.full is now Policy.dense_at"):
        assert policy.full is policy.dense_at


def test_the_op_select_is_threshold_select():
    from jsparse.pallas_kernels import threshold_select as op

    with pytest.warns(DeprecationWarning, match="the op select is now threshold_select"):
        assert op.select is op.threshold_select
    with pytest.raises(AttributeError, match="no attribute 'selects'"):
        _ = op.selects
