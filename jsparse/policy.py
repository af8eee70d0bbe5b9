"""The Policy contract: how a method says what each KV head attends to. One engine runs every method
through it.

A policy is a NamedTuple of pure functions and static fields, built by a function of
hyper-parameters (`@builder`). Only `select` must be written; `dense`, the whole of it, is at the
end of this file. The functions are called while tracing, so they may branch on static things
(layer, shapes, hyper-parameters) and never on values.

The state is whatever pytree of arrays `init` returns, of fixed shapes and dtypes; by convention a
tuple with one entry a layer, so that a layer's update touches its own arrays alone. It never holds
the cache's arrays (both are donated). It is threaded through the layers in order, so what one layer
decides reaches the next.

Per prompt chunk and layer       prefill(state, layer, view) -> state
Per decode step and layer        append(state, layer, k, v, tokens, positions, cache) -> state
                                 select(state, layer, q, cache) -> (Selection, summary | None,
                                 state) [attention; `summary` is an (o, lse) partial that is merged
                                 into its result] update(state, layer, stats, cache) -> state
While a token is taken in, `cache.positions` is still its own position (of several, the first's),
and the lengths of a layer count it from `append` on; those of the layers behind may do so already.

Every `period` steps             maintain(state, cache) -> (state, cache), a jitted call of its own
Every `correct_every` steps      the engine computes the last tokens again as one dense chunk, overwrites their K and V
                                 and calls `append` for them once more: writing a position again
                                 replaces it.

How the five methods fit (papers and formulas: each method's own file, when it lands):

LycheeDecode  the state is one set, ids [B, K, C] and count, that goes through the layers. select: those ids, with
              `dense` set for retrieval heads. stats in layers whose picks the next one uses; update
              replaces the sets of their retrieval heads by one of four rules. correct_every.
LFPS          state[l]: two score tables [B, K, S] and the sink's statistics, from `view.q_window` (window=32) at the
              last chunk. select: bypass test, candidates, exact dot products, top-k as a token
              list; a bypassing head gets count 0 and a summary (sink and mean value), which is then
              its whole result. stats "token_logits"; update decays the tables and scatters the
              weights. The slash table's moving origin is in the state.
Twilight      a wrapper: init, prefill and append add an INT4 copy of K (a sidecar paged like K) to the base's state;
              select calls the base's, scores what it lists and prunes by top-p into pages, bits or
              tokens. Heads that the base makes `dense` stay so.
HARD-KV       needs=("bias", "slot_positions"); window=32; period=128: maintain scores, calibrates, drops tokens,
              rewrites a head's pages, merges groups into one slot with a bias, and truncates
              `lengths`, whose pages return to the free list. select: bits for heads not yet
              rewritten. Attended fractions count positions.
LycheeCluster prefill at the last chunk cuts the token ids into chunks and clusters the keys; append
fills a ring of the
              newest tokens and gives a full chunk to its cluster, for which it needs tokens and k;
              select walks coarse, fine, chunk and lists tokens. period: recompute radii. fallback:
              dense while the length is within budget.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jsparse import deprecated
from jsparse.cache import CacheSpec, KVCache
from jsparse.deprecated import renamed_arguments
from jsparse.partials import StatsKind
from jsparse.selection import Selection, everything
from jsparse.shapes import ChunkKV, Partial, Rows, Tokens

State = Any


class PrefillView(NamedTuple):
    """What a policy sees of one prompt chunk in one layer.

    Attributes:
        tokens, positions, k, v: the chunk, padded to T; row b's first `valid[b]` count.
        cache: with the chunk already appended; `cache.layers[layer].lengths` is right for every
            row.
        q_window: the last W queries of each row so far, aligned to the row's own end (the newest
            last), whatever the chunking or the rest of the batch; the first W - window_valid of a
            short row are 0.
        last: static; no chunk follows this one for any row.
    """

    tokens: Tokens
    positions: Tokens
    k: ChunkKV
    v: ChunkKV
    valid: Rows
    cache: KVCache
    q_window: Float[Array, "B W N H"]
    window_valid: Rows
    last: bool


def _no_state(spec: CacheSpec) -> State:
    return ()


def _keep_state(state: State, layer: int, *_: Any) -> State:
    return state


def _no_maintenance(state: State, cache: KVCache) -> tuple[State, KVCache]:
    return state, cache


def _no_stats(layer: int) -> StatsKind | None:
    return None


class Policy(NamedTuple):
    """A method, as the engine sees it.

    Attributes:
        select: (state, layer, q[B, N, H], cache) -> (Selection, summary, state).
        init: spec -> state.
        prefill, append, update, maintain: see the module's docstring; by default they change
            nothing.
        stats: layer -> what attention must report there: None, "page_mass" or "token_logits".
        fallback: (state, layer, cache) -> bool[], computed on the device: where true this step's
            layer is dense, and neither select nor sparse attention runs. None: never. It speaks for
            the whole batch: where rows differ, select must make the rows that it concerns dense
            itself.
        period: steps between calls of maintain; 0 is never.
        window: W, the last prompt queries that prefill wants.
        correct_every: steps between corrections; 0 is never. Not for methods whose maintain
            truncates heads: a correction takes all heads of a row to hold the same tokens.
        needs: optional fields of the cache that it uses (jsparse.cache.OPTIONAL_FIELDS).
        dense_at: hyper-parameters at which the method equals dense attention; None where no such
            exist.
        name: the expression that builds it.
    """

    select: Callable[..., tuple[Selection, Partial | None, State]]
    init: Callable[[CacheSpec], State] = _no_state
    prefill: Callable[[State, int, PrefillView], State] = _keep_state
    append: Callable[..., State] = _keep_state
    update: Callable[..., State] = _keep_state
    maintain: Callable[[State, KVCache], tuple[State, KVCache]] = _no_maintenance
    stats: Callable[[int], StatsKind | None] = _no_stats
    fallback: Callable[..., Array] | None = None
    period: int = 0
    window: int = 0
    correct_every: int = 0
    needs: tuple[str, ...] = ()
    dense_at: Mapping[str, Any] | None = None
    name: str = ""

    @property
    def full(self) -> Mapping[str, Any] | None:
        """The old name of `dense_at`."""
        deprecated.warn("Policy.full", "Policy.dense_at")
        return self.dense_at

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return self.name


Policy.__new__ = renamed_arguments(full="dense_at")(Policy.__new__)


def builder(build: Callable[..., Policy]) -> Callable[..., Policy]:
    """Marks a function of hyper-parameters as a method.

    Equal arguments give the same object, so that nothing is traced twice. The policy's name becomes
    the call that built it, defaults included.
    """
    signature = inspect.signature(build)

    @functools.cache
    def once(arguments: tuple[tuple[str, type, Any], ...]) -> Policy:
        policy = build(**{key: value for key, _, value in arguments})
        shown = ", ".join(f"{key}={value!r}" for key, _, value in arguments)
        dense_at = None if policy.dense_at is None else MappingProxyType(dict(policy.dense_at))
        return policy._replace(name=f"{build.__name__}({shown})", dense_at=dense_at)

    @functools.wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> Policy:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {key: _literal(value) for key, value in bound.arguments.items()}
        for key, value in given.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{key}={value!r}: must be a number, a string, an array of numbers or a policy"
                )
        # 1, 1.0 and True are equal as keys; their types tell them apart
        return once(tuple((key, type(value), value) for key, value in given.items()))

    return wrapper


def _literal(value: Any) -> Any:
    """The value as a name can spell it: paths as strings, arrays and lists as tuples of numbers, of
    masks 0 and 1.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Policy) or not isinstance(value, list | tuple):
        return value
    return tuple(int(x) if isinstance(x, bool) else _literal(x) for x in value)


def _is_plain(value: Any) -> bool:
    return (
        all(map(_is_plain, value))
        if type(value) is tuple
        else isinstance(value, int | float | str | Policy | None)
    )


def whole_number(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless a hyper-parameter is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


def fraction(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: must be a number above 0 and at most 1")


def below_one(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: must be a number from 0 to below 1")


def require_policy(name: str, value: Any) -> None:
    """Raises ValueError unless a hyper-parameter is a policy."""
    if not isinstance(value, Policy):
        raise ValueError(f"{name}={value!r}: must be a policy")


@builder
def dense() -> Policy:
    """Everything: the exact model."""

    def select(state: State, layer: int, q: Array, cache: KVCache):
        return everything(cache.layers[layer].lengths), None, state

    return Policy(select, dense_at={})
