"""Copies the tails of rows to and from host memory, if K and V are stored there."""

from typing import Any

from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly
from jsparse.engine.decode_programs import past_end
from jsparse.engine.program_record import NewRequest, engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes
from jsparse.engine.slots import Slots
from jsparse.host_memory.pages import Leaving
from jsparse.runtime.compilation import note_trace
from jsparse.runtime.host_store import with_newest
from jsparse.runtime.program_set import ProgramKey


def _refill_key(sizes: EngineSizes, *_: Any) -> list[ProgramKey]:
    return [refill.key(1)] if sizes.tail_tokens else []


@engine_program(placeholders=past_end, keys_of_engine=_refill_key, keys_of_request=_refill_key)
def refill(
    spec: EngineSpec, slots: Slots, which: Int32[Array, "n"], *, read_only: ReadOnly
) -> Slots:
    """Fills the tails of rows from host memory, after their prefill."""
    note_trace()
    rows = slots.rows
    part = rows.cache.take(which)
    cache = with_newest(part.of_rows(), read_only.host, resident=True)
    memory = rows.cache.put(part.after(cache), which)
    return slots._replace(rows=rows._replace(cache=memory))


def _leave_key(sizes: EngineSizes, *_: Any) -> list[ProgramKey]:
    return [leave.key(1)] if sizes.tail_tokens else []


def _request_keys(sizes: EngineSizes, request: NewRequest) -> list[ProgramKey]:
    return _leave_key(sizes) if sizes.tail_tokens < request.new_tokens else []


@engine_program(
    placeholders=past_end, keys_of_engine=_leave_key, keys_of_request=_request_keys, donates=False
)
def leave(spec: EngineSpec, slots: Slots, which: Int32[Array, "n"]) -> tuple[Leaving, ...]:
    """Returns the newest pages of decoding rows, by layer, for host memory."""
    note_trace()
    return spec.memory.tails_leaving(slots.rows.cache, which)
