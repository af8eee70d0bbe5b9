"""Compresses prompts after their prefill, if the policy evicts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jsparse.cache import ReadOnly
from jsparse.engine.program_record import NewRequest, engine_program
from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import MAX_PREFILLS, EngineSizes
from jsparse.engine.slots import Slots, no_knobs
from jsparse.models.transformer import Weights
from jsparse.runtime import room
from jsparse.runtime.compilation import inlined, note_trace
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.rereading import reread
from jsparse.runtime.shared_pages import scratch_group
from jsparse.runtime.state_axes import put_rows


class EvictRow(NamedTuple):
    """A prompt to compress into groups of its own, after its prefill.

    Attributes:
        tokens: the prompt, padded.
        slots, places: its slot, and the place of its state.
        lengths: the number of its tokens.
        groups: the groups of the uncompressed prompt.
        kept: the groups of the compressed prompt.
    """

    tokens: Int32[Array, "1 S"]
    slots: Int32[Array, "1"]
    places: Int32[Array, "1"]
    lengths: Int32[Array, "1"]
    groups: Int32[Array, "1 M"]
    kept: Int32[Array, "1 m"]


def _no_prompt(spec: EngineSpec, size: tuple[int, ...]) -> tuple[EvictRow, dict[str, Array]]:
    scratch = scratch_group(spec.cache)
    columns: dict[str, Any] = {
        "tokens": np.zeros((1, size[1] * spec.cache.page_size), np.int32),
        "slots": np.full(1, spec.sizes.num_slots, np.int32),
        "places": np.full(1, MAX_PREFILLS, np.int32),
        "lengths": np.zeros(1, np.int32),
        "groups": np.full(size, scratch, np.int32),
        "kept": np.full((1, spec.sizes.evicted_pages), scratch, np.int32),
    }
    return EvictRow(**columns), no_knobs(spec.knobs, 1)


def evict_key(sizes: EngineSizes, tokens: int) -> ProgramKey:
    """Returns the key of the program that compresses a prompt of `tokens` tokens."""
    return evict.key(1, sizes.pages_for(tokens))


def _evict_keys(sizes: EngineSizes, *_: Any) -> list[ProgramKey]:
    return [evict.key(1, pages) for pages in sizes.prompt_pages]


def _request_keys(sizes: EngineSizes, request: NewRequest) -> list[ProgramKey]:
    return [evict_key(sizes, request.end)] if sizes.evicted_pages else []


@engine_program(placeholders=_no_prompt, keys_of_engine=_evict_keys, keys_of_request=_request_keys)
def evict(
    spec: EngineSpec,
    slots: Slots,
    inputs: EvictRow,
    knobs: dict[str, Array],
    *,
    weights: Weights,
    read_only: ReadOnly,
) -> Slots:
    """Compresses a prompt into groups of its own, after its prefill.

    Its first pages are copied there before the policy modifies them, since other sequences may
    share the uncompressed prompt's groups.

    Raises:
        ValueError: the state that the policy leaves differs in size from that of decoding rows.
    """
    note_trace()
    policy, decoding, rows = spec.policy, spec.decoding, slots.rows
    pages = min(decoding.num_pages, inputs.groups.shape[1])
    kept, read = inputs.kept[:, :pages], inputs.groups[:, :pages]
    memory = rows.cache.copied(read, kept)
    # heads are compressed into the kept groups; later groups are only read
    first = jnp.where(kept == scratch_group(spec.cache), read, kept)
    groups = jnp.concatenate([first, inputs.groups[:, pages:]], axis=1)
    cache = memory.rows(groups, inputs.lengths).of_rows()
    state = spec.memory.state_of_prompts(slots, inputs.slots, inputs.places)
    state = inlined(reread)(spec.decoder, policy, weights, inputs.tokens, cache, state, read_only)
    cache, state = inlined(room.evict)(
        policy,
        cache,
        state,
        read_only._replace(knobs=knobs or None),
        pages * spec.cache.page_size,
    )
    expected = jax.eval_shape(lambda: policy.init(decoding._replace(batch=1)))
    if jax.tree.map(jax.typeof, state) != jax.tree.map(jax.typeof, expected):
        raise ValueError(
            f"policy={policy}: in an engine, after_prompt must leave a state for "
            f"{decoding.capacity} slots per head, the bound of `max_length`"
        )
    part = memory.rows(inputs.kept, inputs.lengths).by_head(cache)
    memory, state = put_rows(policy, decoding, rows.cache, rows.state, (part, state), inputs.slots)
    return slots._replace(rows=rows._replace(cache=memory, state=state))
