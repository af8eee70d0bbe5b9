"""Checks values of hyper-parameters; the checks of `Policy.per_row` have the same form."""

from collections.abc import Iterable
from typing import Any


def whole_number(name: str, value: Any, minimum: int) -> None:
    """Raises ValueError unless a hyper-parameter is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {minimum}")


def flag(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be true or false")


def fraction(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: must be a number above 0 and at most 1")


def below_one(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: must be a number from 0 to below 1")


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises ValueError unless a hyper-parameter is one of these values, and of its type."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise ValueError(f"{name}={value!r}: must be one of {list(allowed)}")
