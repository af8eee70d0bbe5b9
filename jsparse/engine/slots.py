"""Defines the arrays of an engine's slots, where rows are prefilled and decode."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jsparse.hooks import State
from jsparse.runtime.request import Request
from jsparse.runtime.rows import Batch
from jsparse.runtime.sampling_params import OFF, SamplingParams
from jsparse.runtime.shared_pages import SharedPages


class Slots(NamedTuple):
    """All rows of an engine, with or without requests.

    Attributes:
        rows: the rows. Rows in prefill have pages and a policy state, and take part in no decode
            step.
        hidden: the hidden state of each row's newest token, during prefill.
        windows: the newest queries of prompts in prefill, per layer, by their places; as in
            PrefillCarry.
        prefill_state: the policy's state of prompts in prefill, by place, if it evicts; otherwise
            that is in `rows`.
    """

    rows: Batch[SharedPages]
    hidden: Float[Array, "B D"]
    windows: tuple[Float[Array, "places W N H"], ...]
    prefill_state: State


class PrefillRows(NamedTuple):
    """The prompts of a prefill program, which computes a chunk of each.

    A program may be compiled for more prompts than it gets: the others have no valid tokens, and a
    slot and a place past the end.

    Attributes:
        slots, places: their slots, and the places of their windows.
        fresh: whether a prompt starts here, with an empty policy state.
        start, valid: the position of the chunk's first token, and the number of its tokens.
        groups: the groups of its row.
    """

    slots: Int32[Array, "R"]
    places: Int32[Array, "R"]
    fresh: Bool[Array, "R"]
    start: Int32[Array, "R"]
    valid: Int32[Array, "R"]
    groups: Int32[Array, "R M"]


def neutral() -> Request:
    """Returns the request of an empty slot, which decodes greedily."""
    return Request(np.zeros(0, np.int32), SamplingParams(**OFF), frozenset(), 0)


def no_knobs(names: Sequence[str], rows: int) -> dict[str, Array]:
    """Returns the hyper-parameters of rows that set none of them."""
    unset = jnp.full(rows, jnp.nan, jnp.float32)
    return {name: jnp.zeros(rows, jnp.bool_) if name == "dense" else unset for name in names}
