"""Runs the prefill of prompts, and chooses their first tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly
from jsparse.engine.packing import CHOICES, Packed, pack_for, pack_scores
from jsparse.engine.program_record import NewRequest, engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import MAX_PREFILLS, EngineSizes, SamplingMode
from jsparse.engine.slots import PrefillRows, Slots, neutral, no_knobs
from jsparse.host_memory.pages import Leaving
from jsparse.models.transformer import Weights, to_logits
from jsparse.policy import Policy
from jsparse.runtime.compilation import inlined, note_trace
from jsparse.runtime.prefill import PrefillCarry, prefill_tokens, replay_chunk
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.rows import Batch, first_tokens, no_recent
from jsparse.runtime.sampling import RowSampling, row_sampling
from jsparse.runtime.shared_pages import scratch_group
from jsparse.runtime.spread_programs import REPLICATED, SHARDED
from jsparse.runtime.state_axes import keep_inactive, row_arrays, with_row_arrays
from jsparse.shapes import Rows


def _start_key(*_: Any) -> list[ProgramKey]:
    return [start.key()]


@engine_program(placeholders=lambda spec, size: (), keys_of_engine=_start_key, donates=False)
def start(spec: EngineSpec) -> Slots:
    """Returns empty slots."""
    policy, decoder, rows = spec.policy, spec.decoder, spec.cache.batch
    config, zeros = decoder.config, jnp.zeros(rows, jnp.int32)
    options = row_sampling([neutral()], spec.decoder.config.vocab_size)
    cache, state, prefill_state = spec.memory.empty()
    batch = Batch(
        tokens=zeros,
        cache=cache,
        state=state,
        given=jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), options),
        made=zeros,
        recent=no_recent(policy, rows),
        knobs=no_knobs(spec.knobs, rows),
    )
    window = jnp.zeros(
        (MAX_PREFILLS, policy.window, config.num_heads, config.head_dim), decoder.dtype
    )
    return Slots(
        batch,
        jnp.zeros((rows, config.hidden_size), decoder.dtype),
        tuple(window for _ in range(config.num_layers if policy.window else 0)),
        prefill_state,
    )


def no_chunks(spec: EngineSpec, size: tuple[int, ...]) -> tuple[np.ndarray, PrefillRows]:
    """Returns placeholder inputs of a prefill program of size (prompts, tokens)."""
    rows, cache = size[0], spec.cache
    columns: dict[str, Any] = {
        "slots": np.full(rows, spec.sizes.num_slots, np.int32),
        "places": np.full(rows, MAX_PREFILLS, np.int32),
        "fresh": np.zeros(rows, np.bool_),
        "start": np.zeros(rows, np.int32),
        "valid": np.zeros(rows, np.int32),
        "groups": np.full((rows, cache.num_pages), scratch_group(cache), np.int32),
    }
    return np.zeros(size, np.int32), PrefillRows(**columns)


def prefill_keys(sizes: EngineSizes, *_: Any, scored: bool = False) -> list[ProgramKey]:
    """Returns the keys of all programs; prompts with log-probabilities are prefilled alone."""
    full = sizes.full_sizes
    return [
        prefill.key(rows, size, last=last, scored=scored)
        for rows in ((1,) if scored else sizes.prefill_rows)
        for size in {*full, *sizes.tails}
        if rows == 1 or size <= sizes.packed_tokens
        for last in ((True, False) if size in full else (True,))
    ]


def _chunk_keys(sizes: EngineSizes, request: NewRequest) -> list[ProgramKey]:
    chunks = sizes.chunks(request.start, request.end)
    return [prefill.key(1, size, last=last, scored=request.scored) for size, last in chunks]


@engine_program(
    "last",
    "scored",
    placeholders=no_chunks,
    keys_of_engine=prefill_keys,
    keys_of_request=_chunk_keys,
    out=(SHARDED, REPLICATED, REPLICATED),
)
def prefill(
    spec: EngineSpec,
    slots: Slots,
    tokens: Int32[Array, "R T"],
    inputs: PrefillRows,
    *,
    last: bool,
    scored: bool,
    weights: Weights,
    read_only: ReadOnly,
) -> tuple[Slots, Rows | Packed, tuple[Leaving, ...]]:
    """Prefills one chunk of each of some prompts.

    Also returns the log-probabilities of its tokens if `scored`, else where the next chunks start,
    and the pages of the chunks, by layer, if K and V are in host memory.
    """
    note_trace()
    size = tokens.shape[1]
    before = carry_of(spec, slots, inputs, inputs.start, size)
    carry, hidden = prefill_tokens(
        spec.decoder, spec.policy, weights, tokens, inputs.valid, before, read_only, last=last
    )
    leaving = spec.memory.leaving(carry.cache, inputs.start, size)
    slots, end = _after(spec, slots, inputs, carry)
    if not scored:
        return slots, end, leaving
    # the first token follows the last chunk's newest one
    hidden = jnp.concatenate([before.last_hidden[:, None], hidden[:, :-1]], axis=1)
    return slots, pack_scores(spec.decoder, weights, hidden, tokens), leaving


def _replay_keys(sizes: EngineSizes, policy: Policy, *_: Any) -> list[ProgramKey]:
    return [replay.key(1, size) for size in sizes.full_sizes if policy.shares == "keys"]


@engine_program(
    placeholders=no_chunks, keys_of_engine=_replay_keys, out=(SHARDED, REPLICATED, REPLICATED)
)
def replay(
    spec: EngineSpec,
    slots: Slots,
    tokens: Int32[Array, "R T"],
    inputs: PrefillRows,
    *,
    read_only: ReadOnly,
) -> tuple[Slots, Rows, tuple[Leaving, ...]]:
    """Builds the policy's state from chunks with cached K and V; results are as for `prefill`."""
    note_trace()
    carry = carry_of(spec, slots, inputs, inputs.start + inputs.valid, tokens.shape[1])
    carry = carry._replace(cache=spec.memory.with_newest(carry.cache, read_only))
    carry = replay_chunk(spec.decoder, spec.policy, tokens, inputs.valid, carry, read_only)
    return *_after(spec, slots, inputs, carry), ()


def carry_of(
    spec: EngineSpec, slots: Slots, inputs: PrefillRows, lengths: Rows, size: int
) -> PrefillCarry:
    """Returns prompts with `lengths` tokens, and room for `size` new ones, as a batch.

    Prompts that start here have an empty state, regardless of earlier contents of their slots.
    """
    policy, rows = spec.policy, spec.cache
    cache, state = spec.memory.of_prompts(slots, inputs, lengths, size)
    no_pages = rows._replace(batch=inputs.slots.size, pool_pages=rows.num_kv_heads)
    empty = row_arrays(policy, rows, policy.init(no_pages))
    empty = with_row_arrays(policy, rows, state, empty)
    fresh = inputs.fresh[:, None, None, None]
    return PrefillCarry(
        cache,
        keep_inactive(policy, rows, ~inputs.fresh, state, empty),
        jnp.where(inputs.fresh[:, None], 0, slots.hidden.at[inputs.slots].get(mode="clip")),
        tuple(
            jnp.where(fresh, 0, each.at[inputs.places].get(mode="clip")) for each in slots.windows
        ),
    )


def _after(
    spec: EngineSpec, slots: Slots, inputs: PrefillRows, carry: PrefillCarry
) -> tuple[Slots, Rows]:
    """Returns the slots after a chunk of these prompts, and where their next chunks start."""
    end = inputs.start + inputs.valid
    rows, prefill_state = spec.memory.after_prefill(slots, inputs, end, carry)
    windows = (
        each.at[inputs.places].set(new)
        for each, new in zip(slots.windows, carry.windows, strict=True)
    )
    hidden = slots.hidden.at[inputs.slots].set(carry.last_hidden)
    return Slots(rows, hidden, tuple(windows), prefill_state), end


def _no_firsts(spec: EngineSpec, size: tuple[int, ...]) -> tuple[Any, ...]:
    rows = size[0]
    sampling = row_sampling([neutral()] * rows, spec.decoder.config.vocab_size)
    return np.full(rows, spec.sizes.num_slots, np.int32), sampling, no_knobs(spec.knobs, rows)


def _join_keys(sizes: EngineSizes, _: Policy, choices: Sequence[SamplingMode]) -> list[ProgramKey]:
    return [join.key(rows, choice=choice) for choice in choices for rows in sizes.prefill_rows]


def _join_key(_: EngineSizes, request: NewRequest) -> list[ProgramKey]:
    return [join.key(1, choice=request.choice)]


@engine_program(
    "choice",
    placeholders=_no_firsts,
    keys_of_engine=_join_keys,
    keys_of_request=_join_key,
    out=(SHARDED, REPLICATED),
)
def join(
    spec: EngineSpec,
    slots: Slots,
    which: Int32[Array, "R"],
    sampling: RowSampling,
    knobs: dict[str, Array],
    *,
    choice: SamplingMode,
    weights: Weights,
) -> tuple[Slots, Packed]:
    """Chooses the first tokens of rows after their prefill; they decode from now on."""
    note_trace()
    hidden = slots.hidden.at[which].get(mode="clip")
    logits = to_logits(spec.decoder, weights, hidden)
    tokens, sampling, packed = inlined(first_tokens)(
        CHOICES[choice],
        pack_for(spec, choice),
        sampling,
        logits,
        jnp.zeros(which.size, jnp.bool_),
    )
    rows = slots.rows
    new = rows._replace(
        tokens=tokens,
        given=sampling,
        made=jnp.ones(which.size, jnp.int32),
        recent=no_recent(spec.policy, which.size),
        knobs=knobs,
        cache=(),
        state=(),
    )
    old = rows._replace(cache=(), state=())
    joined = jax.tree.map(lambda x, new: x.at[which].set(new), old, new)
    return slots._replace(rows=joined._replace(cache=rows.cache, state=rows.state)), packed
