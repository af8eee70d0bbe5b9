"""Checks the arrays of functions against their annotations, where JSPARSE_CHECK_TYPES is set."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

with_numbers = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, too


def checked(function):
    """Returns a function that checks its arguments, or itself where a Protocol forbids it."""
    try:
        return with_numbers(function)
    except BeartypeDecorHintException:
        return function
