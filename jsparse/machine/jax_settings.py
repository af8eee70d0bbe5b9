"""Runs jsparse under the jax settings that it is written for, whatever its caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Sets jax's types, promotions and transfer guard to their defaults, in this thread.

    Used as a decorator of public functions, and where other threads trace and compile.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield
