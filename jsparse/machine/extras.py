"""Describes how to install optional packages; this module imports nothing."""


def install(extra: str) -> str:
    """Returns the end of an error message about a missing package of an extra.

    jsparse is on no package index yet, so an extra is installed from a clone.
    """
    return (
        f"in a clone of jsparse, run `pip install '.[{extra}]'`, or commands with "
        f"`python3 -m uv run --extra {extra}`"
    )
