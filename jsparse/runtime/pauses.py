"""Says when rows must be stopped between decode steps, and how many steps a program runs till then.

Every period of a service, or of a store, is a number of tokens that a row decodes.
"""

from collections.abc import Iterable, Mapping


def due(periods: Mapping[str, int], age: int) -> list[str]:
    """Returns the names of what is due for a row that has decoded `age` tokens."""
    return [name for name, period in periods.items() if age % period == 0]


def until_due(periods: Iterable[int], age: int) -> list[int]:
    """Returns the steps until each period ends, for a row that has decoded `age` tokens."""
    return [period - age % period for period in periods]


def steps_per_program(most: int, steps: Iterable[int]) -> int:
    """Returns `most` if all of these numbers of steps are at least that, else 1.

    There are only two programs, since each takes long to compile.
    """
    return most if min(steps, default=most) >= most else 1
