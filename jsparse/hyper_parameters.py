"""Checks values of hyper-parameters; the checks of `Policy.per_row` have the same form."""

import math
from collections.abc import Iterable
from typing import Any


def whole_number(name: str, value: Any, minimum: int) -> None:
    """Raises ValueError unless a hyper-parameter is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {minimum}")


def flag(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def number_in(name: str, value: Any, interval: str) -> None:
    """Raises ValueError unless a hyper-parameter is a number in an interval.

    The interval is written as in mathematics: "[0, 1)" includes 0 but not 1, and "(0, inf)" means
    all finite numbers above 0.
    """
    low, high = map(float, interval[1:-1].split(","))
    above, below = interval.startswith("("), interval.endswith(")")
    excluded = {low} if above else set()
    excluded |= {high} if below else set()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low <= value <= high and value not in excluded:
        return
    if high == math.inf:
        rule = f"a finite number {'above' if above else 'of at least'} {low:g}"
    elif above:
        rule = f"a number above {low:g} and {'below' if below else 'at most'} {high:g}"
    else:
        rule = f"a number from {low:g} to {'below ' if below else ''}{high:g}"
    raise ValueError(f"{name}={value!r}: must be {rule}")


def fraction(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in (0, 1]."""
    number_in(name, value, "(0, 1]")


def below_one(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in [0, 1)."""
    number_in(name, value, "[0, 1)")


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises ValueError unless a hyper-parameter is one of these values, and of its type."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise ValueError(f"{name}={value!r}: must be one of {list(allowed)}")
