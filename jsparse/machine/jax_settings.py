"""Runs jsparse under the jax settings that it expects, regardless of its caller's settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Sets jax's types, promotions and transfer guard to their defaults, in this thread.

    It decorates public functions, and functions that trace and compile in other threads.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield
