"""Computes when rows pause for services, and the number of decode steps until then.

Every period of a service or a store is a number of tokens that a row decodes.
"""

from collections.abc import Iterable, Mapping


def due[Name: str](periods: Mapping[Name, int], age: int) -> list[Name]:
    """Returns the names of the services due for a row that has decoded `age` tokens."""
    return [name for name, period in periods.items() if age % period == 0]


def until_due(periods: Iterable[int], age: int) -> list[int]:
    """Returns the steps until each period ends, for a row that has decoded `age` tokens."""
    return [period - age % period for period in periods]


def next_steps(max_steps: int, steps: Iterable[int]) -> int:
    """Returns the steps of the next program: `max_steps` if none of `steps` is less, else 1.

    There are only two programs, since each takes long to compile.
    """
    return max_steps if min(steps, default=max_steps) >= max_steps else 1
