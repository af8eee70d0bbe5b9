"""Prefills the rows of a session, in the first turn and in further ones."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, ReadOnly
from jsparse.hooks import State
from jsparse.models.transformer import to_logits
from jsparse.runtime import chunk_attention, prefill
from jsparse.runtime.admission import Deployment
from jsparse.runtime.compilation import program
from jsparse.runtime.prefill import OnChunk, PrefillCarry
from jsparse.runtime.spread_programs import REPLICATED, by_rank
from jsparse.runtime.state_axes import row_arrays, with_row_arrays
from jsparse.shapes import Rows

# the tokens of each row; rows may have different lengths
TokenRows = Sequence[Sequence[int] | np.ndarray]

first_logits = program(
    to_logits, static_argnames=("decoder",), sharded=("weights", "hidden"), out=REPLICATED
)


class PrefillResult(NamedTuple):
    """The result of prefill: the logits after the prompts, the cache and the policy's state."""

    logits: Float32[Array, "B V"]
    cache: KVCache
    state: State


class PromptEnd(NamedTuple):
    """The state that a further turn starts from, besides K, V and page arrays."""

    positions: np.ndarray
    last_hidden: Array
    windows: tuple[Array, ...]
    rows: list[Array]


class Prompts(NamedTuple):
    """All rows' prompt ids, padded, [B, T], and their lengths, [B]."""

    tokens: np.ndarray
    lengths: np.ndarray


class SessionPrefill:
    """Prefill of all rows of one cache.

    Attributes:
        resumable: whether to keep the state that a further turn starts from.
    """

    def __init__(self, deployment: Deployment, *, resumable: bool) -> None:
        """Sets up prefill; nothing is allocated."""
        self._deployment, self.resumable = deployment, resumable

    def run(
        self,
        prompts: Prompts,
        before: tuple[PrefillResult, PromptEnd] | None,
        start: np.ndarray,
        report: OnChunk,
    ) -> tuple[PrefillResult, PromptEnd | None]:
        """Prefills an empty cache, or continues after the first tokens of `before`.

        `before` is donated; row b keeps its first `start[b]` tokens. Returns the result, and the
        state that a further turn starts from.
        """
        params, policy, spec, store, *_ = self._deployment
        decoder, weights = params.decoder, params.weights
        carry = store.committed(self._begin() if before is None else self._resume(*before, start))
        carry = prefill.prefill_prompts(
            decoder,
            policy,
            weights,
            prompts.tokens,
            prompts.lengths,
            carry,
            chunk=chunk_attention.chunk_tokens(spec, policy.prefill_method),
            read_only=ReadOnly(self._deployment.constants(report)),
            store=store,
            report=report,
            mesh=params.mesh,
        )
        end = None
        if self.resumable:
            arrays = [jnp.copy(x) for x in row_arrays(policy, spec, carry.state)]
            end = PromptEnd(start + prompts.lengths, carry.last_hidden, carry.windows, arrays)
        logits = first_logits.on(params.mesh)(decoder, weights, carry.last_hidden)
        return PrefillResult(logits, carry.cache, carry.state), end

    def _begin(self) -> PrefillCarry:
        """Returns the carry of the first turn."""
        params, policy, spec, store, *_ = self._deployment
        empty = store.begin(chunk_attention.chunk_tokens(spec, policy.prefill_method))
        sharded, static = ("cache", "state"), ("decoder", "policy")
        start = by_rank(prefill.start, params.mesh, sharded=sharded, static=static)
        return start(params.decoder, policy, *empty)

    def _resume(self, prefilled: PrefillResult, end: PromptEnd, start: np.ndarray) -> PrefillCarry:
        """Returns the carry of a further turn: rows are truncated to their first `start` tokens."""
        params, policy, spec, store, *_ = self._deployment
        cut = by_rank(cut_back, params.mesh, sharded=("cache",), donated=("cache",))
        cache = store.after_cut(cut(prefilled.cache, jnp.asarray(start)))
        state = prefilled.state
        if (start == end.positions).all():
            state = with_row_arrays(policy, spec, state, end.rows)
        return PrefillCarry(cache, state, end.last_hidden, end.windows)


def padded(rows: TokenRows, spec: CacheSpec, start: np.ndarray | int = 0) -> Prompts:
    """Pads and checks prompts that follow the first `start[b]` tokens of each row.

    Raises:
        ValueError: there is not one list of tokens per row, or they do not fit in the cache.
    """
    lengths = np.array([len(ids) for ids in rows], np.int32)
    if len(rows) != spec.batch:
        raise ValueError(f"rows has {len(rows)} entries: must be {spec.batch}")
    if not lengths.any():
        raise ValueError(f"rows={[*map(list, rows)]}: must not all be empty")
    total = start + lengths
    if total.max() > spec.capacity:
        raise ValueError(
            f"rows of {total.tolist()} tokens: must fit in the {spec.capacity} of the cache"
        )
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for b, ids in enumerate(rows):
        tokens[b, : len(ids)] = ids
    return Prompts(tokens, lengths)


@partial(jax.jit, donate_argnames=("cache",))
def cut_back(cache: KVCache, positions: Rows) -> KVCache:
    """Drops all tokens from these positions on; a row's heads must hold the same tokens."""
    lengths = jnp.broadcast_to(positions[:, None], cache.layers[0].lengths.shape)
    layers = (kv_cache.truncate(layer, lengths) for layer in cache.layers)
    return cache._replace(
        layers=tuple(layers), positions=positions, overflow=jnp.zeros_like(cache.overflow)
    )
