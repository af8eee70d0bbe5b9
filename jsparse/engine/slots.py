"""Defines the arrays of an engine's slots, in which rows are read and decode."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jsparse.cache import CacheSpec, SharedPrefixes
from jsparse.engine.sizes import MAX_READING, EngineSizes
from jsparse.hooks import State
from jsparse.runtime.request import Request
from jsparse.runtime.rows import Batch
from jsparse.runtime.sampling_params import OFF, SamplingParams
from jsparse.runtime.shared_pages import Pool, SharedPages, scratch_group


class Slots(NamedTuple):
    """Holds all rows of an engine, whether or not they hold requests.

    Attributes:
        rows: the rows. Those whose prompts are being read have pages and a policy state, and take
            part in no decode step.
        hidden: the hidden state of each row's newest token, while its prompt is being read.
        windows: the newest queries of prompts that are being read, per layer, by their places; as
            in PrefillCarry.
        reading: where the policy evicts, its state of prompts that are being read, by their places;
            else that is in `rows`.
    """

    rows: Batch[SharedPages]
    hidden: Float[Array, "B D"]
    windows: tuple[Float[Array, "places W N H"], ...]
    reading: State


class ReadRows(NamedTuple):
    """Names the prompts of which a program reads a chunk each.

    A program may be made for more prompts than there are: those beyond have no valid tokens, and a
    slot and a place behind the last.

    Attributes:
        slots, places: their slots, and the places of their windows.
        fresh: whether a prompt begins here, with an empty policy state.
        start, valid: the position of the first of its tokens, and their number.
        groups: the groups of its row.
    """

    slots: Int32[Array, "R"]
    places: Int32[Array, "R"]
    fresh: Bool[Array, "R"]
    start: Int32[Array, "R"]
    valid: Int32[Array, "R"]
    groups: Int32[Array, "R M"]


class EvictRow(NamedTuple):
    """Names a prompt that has been read, and is compressed into groups of its own.

    Attributes:
        slots, places: its slot, and the place of its state.
        lengths: the number of its tokens.
        groups: the groups that it was read into.
        kept: the groups that it goes on in.
    """

    slots: Int32[Array, "1"]
    places: Int32[Array, "1"]
    lengths: Int32[Array, "1"]
    groups: Int32[Array, "1 M"]
    kept: Int32[Array, "1 m"]


class DecodeRows(NamedTuple):
    """Names the rows of which a program runs steps.

    A program may be made for more rows than take part: those beyond have no steps, and a slot
    behind the last where a program has not all rows.

    Attributes:
        slots: their slots.
        counts: the number of first steps in which each takes part.
        first, groups: each row gets `groups` behind its first `first` ones; what lies behind the
            last group of a row is ignored.
        prefixes: what rows have in common, by their numbers in the program; None is that each reads
            its own.
    """

    slots: Int32[Array, "n"]
    counts: Int32[Array, "n"]
    first: Int32[Array, "n"]
    groups: Int32[Array, "n growth"]
    prefixes: SharedPrefixes | None


def no_reading(spec: CacheSpec, sizes: EngineSizes, rows: int) -> ReadRows:
    """Returns arrays on the host of a program that reads so many prompts, for none."""
    columns: dict[str, Any] = {
        "slots": np.full(rows, sizes.num_slots, np.int32),
        "places": np.full(rows, MAX_READING, np.int32),
        "fresh": np.zeros(rows, np.bool_),
        "start": np.zeros(rows, np.int32),
        "valid": np.zeros(rows, np.int32),
        "groups": np.full((rows, spec.num_pages), scratch_group(spec), np.int32),
    }
    return ReadRows(**columns)


def no_evicting(spec: CacheSpec, sizes: EngineSizes, pages: int) -> EvictRow:
    """Returns arrays on the host of a program that compresses a prompt of so many pages per head.

    It is for no prompt.
    """
    columns: dict[str, Any] = {
        "slots": np.full(1, sizes.num_slots, np.int32),
        "places": np.full(1, MAX_READING, np.int32),
        "lengths": np.zeros(1, np.int32),
        "groups": np.full((1, pages), scratch_group(spec), np.int32),
        "kept": np.full((1, sizes.evicted_pages), scratch_group(spec), np.int32),
    }
    return EvictRow(**columns)


def no_decoding(
    spec: CacheSpec, sizes: EngineSizes, rows: int, families: int = 0, members: int = 0
) -> DecodeRows:
    """Returns arrays on the host of a program that decodes so many rows, for none."""
    in_order, prefixes = rows == sizes.num_slots, None
    if families:
        shared: Any = np.full((families, members), rows, np.int32), np.zeros(families, np.int32)
        prefixes = SharedPrefixes(*shared)
    columns: dict[str, Any] = {
        "slots": np.arange(rows, dtype=np.int32)
        if in_order
        else np.full(rows, sizes.num_slots, np.int32),
        "counts": np.zeros(rows, np.int32),
        "first": np.full(rows, spec.num_pages, np.int32),
        "groups": np.full((rows, sizes.growth), scratch_group(spec), np.int32),
    }
    return DecodeRows(**columns, prefixes=prefixes)


class GroupPages(NamedTuple):
    """Holds the pages of some groups: K and V, and the policy's arrays of pages."""

    pools: tuple[Pool, ...]
    state: list[Array]


# pages of some groups on their way to host memory and back, as one array for each type
Parked = tuple[Shaped[Array, "..."], ...]


class MovedGroups(NamedTuple):
    """Names groups whose pages leave the device or come back.

    Attributes:
        slots: the slot of the row that has them.
        first: the number of groups that it has before them.
        groups: the groups.
    """

    slots: Int32[Array, "1"]
    first: Int32[Array, "1"]
    groups: Int32[Array, "1 moved"]


def no_moving(spec: CacheSpec, sizes: EngineSizes) -> MovedGroups:
    """Returns arrays on the host of a program that moves groups, for none."""
    columns: dict[str, Any] = {
        "slots": np.full(1, sizes.num_slots, np.int32),
        "first": np.full(1, spec.num_pages, np.int32),
        "groups": np.full((1, sizes.moved_groups), scratch_group(spec), np.int32),
    }
    return MovedGroups(**columns)


def neutral() -> Request:
    """Returns the request of an empty slot, which takes the likeliest token."""
    return Request(np.zeros(0, np.int32), SamplingParams(**OFF), frozenset(), 0)


def no_knobs(names: Sequence[str], rows: int) -> dict[str, Array]:
    """Returns the hyper-parameters of rows that set none of them."""
    unset = jnp.full(rows, jnp.nan, jnp.float32)
    return {name: jnp.zeros(rows, jnp.bool_) if name == "dense" else unset for name in names}
