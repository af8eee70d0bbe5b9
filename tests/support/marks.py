"""Marks some parameters of a test slow, so that the default run covers a share of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns the values as parameters; all but the kept ones are marked slow."""
    values = list(values)
    assert all(value in values for value in kept), kept
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


def slow_except_named(cases: Iterable[Any], *names: str) -> list[Any]:
    """Returns the cases as parameters; those without one of these names are marked slow."""
    cases = list(cases)
    kept = [case for case in cases if case.name in names]
    assert len(kept) == len(names), names
    return slow_except(cases, *kept)
