"""Tells the device which tokens rows with a grammar may choose next."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int32, UInt32

from jsparse.engine.program_record import engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes, SamplingMode
from jsparse.engine.slots import Slots
from jsparse.policy import Policy
from jsparse.runtime.program_set import ProgramKey

MOST_ROWS = 32  # of one program


class AllowedTokens(NamedTuple):
    """The tokens that rows may choose next; slots past the end stand for no row.

    Attributes:
        slots: the slots of the rows.
        allowed: a bit for each token, as in RowSampling.
    """

    slots: Int32[Array, "n"]
    allowed: UInt32[Array, "n words"]


def _no_rows(spec: EngineSpec, size: tuple[int, ...]) -> tuple[AllowedTokens]:
    words = -(-spec.decoder.config.vocab_size // 32)
    slots: Any = np.full(size[0], spec.sizes.num_slots, np.int32)
    allowed: Any = np.zeros((size[0], words), np.uint32)
    return (AllowedTokens(slots, allowed),)


def rows_at_once(sizes: EngineSizes) -> int:
    """Returns the number of rows of the program."""
    return min(sizes.num_slots, MOST_ROWS)


def _keys(sizes: EngineSizes, _: Policy, choices: Sequence[SamplingMode]) -> list[ProgramKey]:
    return [constrain.key(rows_at_once(sizes))] if "sampled" in choices else []


@engine_program(placeholders=_no_rows, keys_of_engine=_keys)
def constrain(spec: EngineSpec, slots: Slots, inputs: AllowedTokens) -> Slots:
    """Sets the tokens that some rows may choose next."""
    given = slots.rows.given
    allowed = given.allowed.at[inputs.slots].set(inputs.allowed, mode="drop")
    return slots._replace(rows=slots.rows._replace(given=given._replace(allowed=allowed)))
