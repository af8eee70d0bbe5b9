"""Tests the checks of hyper-parameters: accepted values, and messages for the rest."""

import math

import pytest

from jsparse.hyper_parameters import flag, number_in

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("interval", "within", "without", "rule"),
    [
        ("(0, 1]", [1e-9, 1, 0.5], [0, 1.1, -1], "a number above 0 and at most 1"),
        ("(0, 1)", [1e-9, 0.5], [0, 1, 1.0], "a number above 0 and below 1"),
        ("[0, 1)", [0, 0.0, 0.999], [1, -1e-9], "a number from 0 to below 1"),
        ("[0, 1]", [0, 1, 0.25], [1.0001, -0.1], "a number from 0 to 1"),
        ("(0, inf)", [1e-30, 1e30], [0, math.inf], "a finite number above 0"),
        ("[1, inf)", [1, 2.5], [0.5, math.inf], "a finite number of at least 1"),
    ],
)
def test_a_number_in_an_interval(interval, within, without, rule):
    for value in within:
        number_in("share", value, interval)
    for value in [*without, math.nan, True, "0.5", None]:
        with pytest.raises(ValueError, match="share=") as error:
            number_in("share", value, interval)
        assert str(error.value) == f"share={value!r}: must be {rule}"


def test_flag_is_not_a_number():
    flag("merge", True)
    flag("merge", False)
    for value in (0, 1, None, "True"):
        with pytest.raises(ValueError, match="merge=.*: must be True or False"):
            flag("merge", value)
