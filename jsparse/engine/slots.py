"""Defines the arrays of an engine's requests: rows that decode, and prompts that are being read."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jsparse.policy import Policy
from jsparse.runtime.request import Request
from jsparse.runtime.rows import Batch
from jsparse.runtime.sampling_params import OFF, SamplingParams
from jsparse.runtime.shared_pages import SharedPages

# All rows of an engine, whether or not they hold requests.
Slots = Batch[SharedPages]


class OpenPrompt(NamedTuple):
    """State of a prompt that is being read, beside its pages.

    Attributes:
        rows: the arrays of the policy's state that rows own, for one row.
        last_hidden, windows: as in PrefillCarry.
    """

    rows: list[Array]
    last_hidden: Float[Array, "1 D"]
    windows: tuple[Float[Array, "1 W N H"], ...]


def neutral() -> Request:
    """Returns the request of an empty slot, which takes the likeliest token."""
    return Request([], SamplingParams(**OFF), frozenset(), 0)


def no_recent(policy: Policy, rows: int) -> Int32[Array, "B n"]:
    """Returns the newest tokens of rows that have none."""
    return jnp.zeros((rows, policy.services.correct_every), jnp.int32)


def no_knobs(names: Sequence[str], rows: int) -> dict[str, Array]:
    """Returns the hyper-parameters of rows that set none of them."""
    unset = jnp.full(rows, jnp.nan, jnp.float32)
    return {name: jnp.zeros(rows, jnp.bool_) if name == "dense" else unset for name in names}
