"""Decodes rows, by steps or by verification rounds, and runs services between steps."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly, SharedPrefixes
from jsparse.engine.packing import CHOICES, Packed, pack_for, pack_round
from jsparse.engine.program_record import NewRequest, engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import EngineSizes, SamplingMode
from jsparse.engine.slots import Slots
from jsparse.models.transformer import Weights
from jsparse.policy import Policy, ServiceKind
from jsparse.runtime.compilation import inlined
from jsparse.runtime.draft_length import MOST_STEPS
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.rows import Batch, decode_steps, put, serviced, take
from jsparse.runtime.shared_pages import SharedPages, scratch_group
from jsparse.runtime.speculation import speculate, verify_steps
from jsparse.runtime.spread_programs import REPLICATED, SHARDED


class DecodeRows(NamedTuple):
    """The rows of a decode program.

    A program may be compiled for more rows than take part. The others have no steps, and a slot
    past the end unless the program has all rows.

    Attributes:
        slots: their slots.
        counts: the number of steps in which each takes part, the first ones.
        first, groups: each row gets `groups` after its first `first` groups; entries past its last
            group are ignored.
        prefixes: the prefixes that rows share, by their indices in the program; None: each row
            reads its own.
    """

    slots: Int32[Array, "n"]
    counts: Int32[Array, "n"]
    first: Int32[Array, "n"]
    groups: Int32[Array, "n growth"]
    prefixes: SharedPrefixes | None


def _no_rows(spec: EngineSpec, size: tuple[int, ...]) -> tuple[DecodeRows]:
    (rows, *shared), sizes, prefixes = size, spec.sizes, None
    if shared:
        found: Any = np.full(shared, rows, np.int32), np.zeros(shared[0], np.int32)
        prefixes = SharedPrefixes(*found)
    in_order = rows == sizes.num_slots
    columns: dict[str, Any] = {
        "slots": np.arange(rows, dtype=np.int32)
        if in_order
        else np.full(rows, sizes.num_slots, np.int32),
        "counts": np.zeros(rows, np.int32),
        "first": np.full(rows, spec.decoding.num_pages, np.int32),
        "groups": np.full((rows, sizes.growth), scratch_group(spec.decoding), np.int32),
    }
    return (DecodeRows(**columns, prefixes=prefixes),)


def decode_key(choice: SamplingMode, *size: int, drafts: int | None = None) -> ProgramKey:
    """Returns the key of a decode program.

    The size is the number of rows. If rows read shared prefixes together, the most prefixes and the
    most rows of each follow. With `drafts`, the program is a verification round with room for that
    number of drafts, or several rounds without drafts if it is 0; otherwise it runs decode steps.
    """
    if drafts is None:
        return decode.key(*size, choice=choice)
    return draft_and_verify.key(*size, choice=choice, drafts=drafts)


def decode_keys(
    choices: Iterable[SamplingMode], *size: int, drafts: int | None = None
) -> list[ProgramKey]:
    """Returns the keys of decode programs with these sampling modes."""
    return [decode_key(choice, *size, drafts=drafts) for choice in choices]


def _decoding_keys(
    sizes: EngineSizes, _: Policy, choices: Sequence[SamplingMode]
) -> list[ProgramKey]:
    return [
        decode_key(choice, rows, drafts=sizes.drafts_for(rows))
        for rows, choice in product(sizes.rows, choices)
    ]


def _request_keys(sizes: EngineSizes, request: NewRequest) -> list[ProgramKey]:
    rows = sizes.rows_for(request.rows)
    key = decode_key(request.choice, rows, drafts=sizes.drafts_for(rows))
    return [key] if request.new_tokens > 1 else []


@engine_program(
    "choice",
    placeholders=_no_rows,
    keys_of_engine=_decoding_keys,
    keys_of_request=_request_keys,
    out=(SHARDED, REPLICATED),
)
def decode(
    spec: EngineSpec,
    slots: Slots,
    inputs: DecodeRows,
    *,
    choice: SamplingMode,
    weights: Weights,
    read_only: ReadOnly,
) -> tuple[Slots, Packed]:
    """Runs decode steps of some rows; a program of all rows has them in slot order."""
    decoder, steps = spec.decoder, spec.sizes.steps
    static = decoder, spec.policy, CHOICES[choice], steps, pack_for(spec, choice)
    run = partial(inlined(decode_steps), *static, weights, read_only)
    return _decoded(spec, slots, inputs, lambda part: run(part, inputs.counts))


@engine_program("choice", "drafts", placeholders=_no_rows, out=(SHARDED, REPLICATED))
def draft_and_verify(
    spec: EngineSpec,
    slots: Slots,
    inputs: DecodeRows,
    *,
    choice: SamplingMode,
    drafts: int,
    weights: Weights,
    read_only: ReadOnly,
) -> tuple[Slots, Packed]:
    """Runs a verification round of some rows, as `decode` runs steps; several without drafts."""
    keep = pack_for(spec, choice, pack_round)
    static = spec.decoder, spec.policy, CHOICES[choice]

    def run(part: Batch[SharedPages]) -> tuple[Batch[SharedPages], Packed]:
        given = weights, read_only, part.made + inputs.counts
        if drafts:
            return inlined(speculate)(*static, drafts, keep, *given, jnp.int32(drafts), part)
        steps = min(spec.sizes.steps, MOST_STEPS)
        return inlined(verify_steps)(*static, steps, keep, *given, part)

    return _decoded(spec, slots, inputs, run)


def _decoded(
    spec: EngineSpec,
    slots: Slots,
    inputs: DecodeRows,
    run: Callable[[Batch[SharedPages]], tuple[Batch[SharedPages], Packed]],
) -> tuple[Slots, Packed]:
    """Returns the slots after `run` has decoded these rows as a batch, and its results."""
    policy, rows = spec.policy, slots.rows
    which, of_all = inputs.slots, inputs.slots.size == spec.decoding.batch
    places = which[:, None], inputs.first[:, None] + jnp.arange(inputs.groups.shape[1])
    rows = rows._replace(cache=rows.cache.with_groups(*places, inputs.groups))
    part = rows if of_all else take(policy, spec.decoding, rows, which)
    part, packed = run(part._replace(cache=part.cache.with_prefixes(inputs.prefixes)))
    part = part._replace(cache=part.cache.with_prefixes(None))
    rows = part if of_all else put(policy, spec.decoding, rows, part, which)
    return slots._replace(rows=rows), packed


def service_keys(sizes: EngineSizes, policy: Policy, *_: Any) -> list[ProgramKey]:
    """Returns the keys of the programs that service rows between steps."""
    if sizes.drafts:  # a verification round includes its services
        return []
    rows = sizes.service_rows
    return [service.key(rows, service=name) for name in policy.services.every]


def past_end(spec: EngineSpec, size: tuple[int, ...]) -> tuple[np.ndarray]:
    """Returns placeholder inputs: the index past the last row, for each row of a program."""
    return (np.full(size[0], spec.sizes.num_slots, np.int32),)


@engine_program("service", placeholders=past_end, keys_of_engine=service_keys)
def service(
    spec: EngineSpec,
    slots: Slots,
    which: Int32[Array, "n"],
    *,
    service: ServiceKind,
    weights: Weights,
    read_only: ReadOnly,
) -> Slots:
    """Runs one of the policy's services on some rows.

    A row may be listed several times, unless the policy evicts: its tokens would move twice.
    Indices past the last row then stand for no row.
    """
    part = spec.memory.due(slots.rows, which)
    static = service, spec.decoder, spec.policy
    part = serviced(*static, weights, read_only, part, within=True)
    return slots._replace(rows=spec.memory.after_service(slots.rows, part, which))
