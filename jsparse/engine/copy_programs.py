"""Copies blocks of page groups out of the device and back, and resumes rows that have lost them."""

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

Groups = Int32[Array, "1 M"]


class BlockPages(NamedTuple):
    """The pages of a block: K and V, and the policy's arrays of pages."""

    pools: tuple[Pool, ...]
    state: list[Array]


# the pages of a block, as one array for each type
PackedBlock = tuple[Shaped[Array, "..."], ...]


def no_groups(spec: EngineSpec, _: tuple[int, ...] = ()) -> tuple[Groups]:
    """Returns placeholder groups of a block."""
    return (_scratch(spec, spec.sizes.block_groups),)


def no_row(spec: EngineSpec, _: tuple[int, ...] = ()) -> tuple[Int32[Array, "1"], Groups]:
    """Returns a placeholder slot of a row, and its groups."""
    slots: Any = np.full(1, spec.sizes.num_slots, np.int32)
    return slots, _scratch(spec, spec.decoding.num_pages)


def _scratch(spec: EngineSpec, count: int) -> Any:
    return np.full((1, count), scratch_group(spec.decoding), np.int32)


def _no_block(spec: EngineSpec, _: tuple[int, ...]) -> tuple[Groups, PackedBlock]:
    (groups,) = no_groups(spec)
    slots = jax.eval_shape(lambda: start.body(spec))
    return groups, jax.eval_shape(lambda slots: copy_out.body(spec, slots, groups), slots)


def _host_keys(name: str) -> Any:
    def keys(sizes: EngineSizes, *_: Any) -> list[ProgramKey]:
        return [ProgramKey.of(name, 1)] if sizes.host_blocks else []

    return keys


@engine_program(placeholders=no_groups, keys_of_engine=_host_keys("copy_out"), donates=False)
def copy_out(spec: EngineSpec, slots: Slots, groups: Groups) -> PackedBlock:
    """Returns the pages of a block, whose groups others use afterwards."""
    note_trace()
    return joined(_pages(spec, slots, groups))


@engine_program(placeholders=_no_block, keys_of_engine=_host_keys("copy_in"))
def copy_in(spec: EngineSpec, slots: Slots, groups: Groups, block: PackedBlock) -> Slots:
    """Writes pages that `copy_out` returned into other groups."""
    note_trace()
    rows, pages = slots.rows, slots.rows.cache.pages_of(groups)
    back = parted(block, jax.eval_shape(lambda: _pages(spec, slots, groups)))
    cache = rows.cache.put_groups(groups, back.pools)
    state = put_pages(spec.policy, spec.decoding, rows.state, pages, back.state)
    return slots._replace(rows=rows._replace(cache=cache, state=state))


@engine_program(placeholders=no_row, keys_of_engine=_host_keys("resume"))
def resume(spec: EngineSpec, slots: Slots, which: Int32[Array, "1"], groups: Groups) -> Slots:
    """Gives a row other groups; the rest of its state has stayed on the device."""
    note_trace()
    places = jnp.arange(groups.shape[1])[None]
    cache = slots.rows.cache.with_groups(which[:, None], places, groups)
    return slots._replace(rows=slots.rows._replace(cache=cache))


def _pages(spec: EngineSpec, slots: Slots, groups: Groups) -> BlockPages:
    rows = slots.rows
    state = take_pages(spec.policy, spec.decoding, rows.state, rows.cache.pages_of(groups))
    return BlockPages(rows.cache.take_groups(groups), state)
