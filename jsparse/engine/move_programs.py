"""Swaps the pages of sequences out to host memory, and back in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from jsparse.engine.packing import joined, parted
from jsparse.engine.prefill_programs import start
from jsparse.engine.program_record import engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes
from jsparse.engine.slots import Slots
from jsparse.runtime.compilation import note_trace
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.shared_pages import Pool, scratch_group
from jsparse.runtime.state_axes import put_pages, take_pages


class MovedGroups(NamedTuple):
    """Groups whose pages are swapped out or in.

    Attributes:
        slots: the slot of their row.
        first: the number of groups before them in the row.
        groups: the groups.
    """

    slots: Int32[Array, "1"]
    first: Int32[Array, "1"]
    groups: Int32[Array, "1 moved"]


class GroupPages(NamedTuple):
    """The pages of some groups: K and V, and the policy's arrays of pages."""

    pools: tuple[Pool, ...]
    state: list[Array]


# swapped pages of some groups, as one array for each type
SwappedPages = tuple[Shaped[Array, "..."], ...]


def no_groups(spec: EngineSpec, _: tuple[int, ...] = ()) -> tuple[MovedGroups]:
    """Returns placeholder inputs of a program that moves groups."""
    columns: dict[str, Any] = {
        "slots": np.full(1, spec.sizes.num_slots, np.int32),
        "first": np.full(1, spec.decoding.num_pages, np.int32),
        "groups": np.full((1, spec.sizes.moved_groups), scratch_group(spec.decoding), np.int32),
    }
    return (MovedGroups(**columns),)


def _no_pages(spec: EngineSpec, _: tuple[int, ...]) -> tuple[MovedGroups, SwappedPages]:
    (moved,) = no_groups(spec)
    slots = jax.eval_shape(lambda: start.body(spec))
    return moved, jax.eval_shape(lambda slots: swap_out.body(spec, slots, moved), slots)


def _swap_keys(sizes: EngineSizes, *_: Any) -> list[ProgramKey]:
    return [swap_out.key(1), swap_in.key(1)] if sizes.host_groups else []


@engine_program(placeholders=no_groups, keys_of_engine=_swap_keys, donates=False)
def swap_out(spec: EngineSpec, slots: Slots, moved: MovedGroups) -> SwappedPages:
    """Returns the pages of some groups, which other sequences use afterwards."""
    note_trace()
    return joined(_pages(spec, slots, moved))


@engine_program(placeholders=_no_pages)
def swap_in(spec: EngineSpec, slots: Slots, moved: MovedGroups, swapped: SwappedPages) -> Slots:
    """Writes pages that `swap_out` returned into new groups of their row."""
    note_trace()
    rows, pages = slots.rows, slots.rows.cache.pages_of(moved.groups)
    back = parted(swapped, jax.eval_shape(lambda: _pages(spec, slots, moved)))
    places = moved.first[:, None] + jnp.arange(moved.groups.shape[1])
    cache = rows.cache.put_groups(moved.groups, back.pools)
    cache = cache.with_groups(moved.slots[:, None], places, moved.groups)
    state = put_pages(spec.policy, spec.decoding, rows.state, pages, back.state)
    return slots._replace(rows=rows._replace(cache=cache, state=state))


def _pages(spec: EngineSpec, slots: Slots, moved: MovedGroups) -> GroupPages:
    rows, pages = slots.rows, slots.rows.cache.pages_of(moved.groups)
    state = take_pages(spec.policy, spec.decoding, rows.state, pages)
    return GroupPages(rows.cache.take_groups(moved.groups), state)
