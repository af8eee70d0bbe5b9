"""Checks the arrays of functions against their annotations, if JSPARSE_CHECK_TYPES is set."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

with_numbers = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is also a float


def checked(function):
    """Returns a function that checks its arguments, or the function itself if a Protocol prevents
    that.
    """
    try:
        return with_numbers(function)
    except BeartypeDecorHintException:
        return function
