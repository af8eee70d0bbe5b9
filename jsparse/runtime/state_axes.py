"""Finds the axis of rows or pages in each array of a policy's state, and moves rows' arrays.

A request that joins a running batch brings its row arrays; pages stay where they are, in a pool
that all requests share. So every array must have an axis of rows or an axis of pages. The axis is
found by comparing the shapes that `init` gives at two batch sizes and two pool sizes.

The cache is divided in the same way: lengths, block tables, positions and overflow belong to rows,
everything else to the pool.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jsparse.cache import CacheSpec, KVCache
from jsparse.hooks import State
from jsparse.policy import Policy
from jsparse.runtime.shared_pages import SharedPages

# primes, so that no other axis has one of these sizes by chance
_BATCHES, _POOLS = (2, 3), (53, 59)


class StateAxis(NamedTuple):
    """The axis of rows or of pages in an array; `kind` is "row" or "page"."""

    kind: str
    axis: int


@functools.cache
def state_axes(policy: Policy, spec: CacheSpec) -> tuple[StateAxis, ...]:
    """Returns the axis of each array of the policy's state, in the order of its leaves.

    Raises:
        ValueError: an array has neither an axis of the batch nor one of the pool's pages, or has
            both.
    """

    def leaves(batch: int, pool: int) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        sizes = spec._replace(batch=batch, pool_pages=pool)
        state = jax.eval_shape(lambda: policy.init(sizes))
        return jax.tree_util.tree_leaves_with_path(state)

    first, more_rows, more_pages = (
        leaves(batch, pool)
        for batch, pool in (
            (_BATCHES[0], _POOLS[0]),
            (_BATCHES[1], _POOLS[0]),
            (_BATCHES[0], _POOLS[1]),
        )
    )
    return tuple(
        _state_axis(policy, jax.tree_util.keystr(path), leaf.shape, by_row.shape, by_page.shape)
        for (path, leaf), (_, by_row), (_, by_page) in zip(
            first, more_rows, more_pages, strict=True
        )
    )


def _state_axis(
    policy: Policy,
    name: str,
    shape: tuple[int, ...],
    by_row: tuple[int, ...],
    by_page: tuple[int, ...],
) -> StateAxis:
    found = [
        StateAxis(kind, axis)
        for kind, sizes, other in (("row", _BATCHES, by_row), ("page", _POOLS, by_page))
        for axis in range(len(shape))
        if (shape[axis], other[axis]) == sizes
    ]
    changes = sum(a != b for other in (by_row, by_page) for a, b in zip(shape, other, strict=True))
    if len(found) != 1 or changes != 1:
        raise ValueError(
            f"policy={policy}: state{name} is {list(shape)} for {_BATCHES[0]} rows and "
            f"{_POOLS[0]} pages: must have one axis of spec.batch or one of spec.pages"
        )
    return found[0]


def take_rows[Memory: (KVCache, SharedPages)](
    policy: Policy, spec: CacheSpec, cache: Memory, state: State, rows: Int32[Array, "n"]
) -> tuple[Memory, State]:
    """Returns cache and state of some rows as a separate batch over the same pages.

    Raises:
        ValueError: the cache has no block table, so its pages cannot be separated from its rows.
    """
    return cache.take(rows), take_state(policy, spec, state, rows)


def take_state(
    policy: Policy,
    spec: CacheSpec,
    state: State,
    rows: Int32[Array, "n"],
    pages: Int32[Array, "m"] | None = None,
) -> State:
    """Returns the state of some rows as that of a separate batch.

    It uses the same pages; if `pages` is given, it has a copy of these pages only.
    """
    return _map_by_axis(
        policy,
        spec,
        lambda axis, leaf: jnp.take(leaf, rows, axis=axis, mode="clip"),
        lambda axis, leaf: leaf if pages is None else jnp.take(leaf, pages, axis=axis),
        state,
    )


def put_rows[Memory: (KVCache, SharedPages)](
    policy: Policy,
    spec: CacheSpec,
    cache: Memory,
    state: State,
    part: tuple[Memory, State],
    rows: Int32[Array, "n"],
) -> tuple[Memory, State]:
    """Puts rows into the slots `rows` of a batch, after `take_rows` or a separate prefill.

    Pages are those of `part`, which may have written to them.

    Raises:
        ValueError: the cache has no block table.
    """
    return cache.put(part[0], rows), put_state(policy, spec, state, part[1], rows)


def put_state(
    policy: Policy,
    spec: CacheSpec,
    state: State,
    part: State,
    rows: Int32[Array, "n"],
    pages: Int32[Array, "m"] | None = None,
) -> State:
    """Returns the state with that of a part from `take_state` in these rows and pages."""
    return _map_by_axis(
        policy,
        spec,
        lambda axis, leaf, new: _put(leaf, new, rows, axis),
        lambda axis, leaf, new: new if pages is None else _put(leaf, new, pages, axis),
        state,
        part,
    )


def take_pages(
    policy: Policy, spec: CacheSpec, state: State, pages: Int32[Array, "n"]
) -> list[Array]:
    """Returns these pages of the state's page arrays."""
    found = zip(jax.tree.leaves(state), state_axes(policy, spec), strict=True)
    return [jnp.take(leaf, pages, at.axis) for leaf, at in found if at.kind == "page"]


def put_pages(
    policy: Policy, spec: CacheSpec, state: State, pages: Int32[Array, "n"], taken: list[Array]
) -> State:
    """Returns the state with the arrays from `take_pages` in these pages."""
    rest, leaves = iter(taken), []
    for leaf, at in zip(jax.tree.leaves(state), state_axes(policy, spec), strict=True):
        if at.kind == "page":
            leaf = _put(leaf, next(rest), pages, at.axis)
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def clear_rows(
    policy: Policy, spec: CacheSpec, cache: KVCache, state: State, rows: Int32[Array, "n"]
) -> tuple[KVCache, State]:
    """Clears the slots `rows`: no tokens, no pages, and the initial state.

    `spec` has the current sizes of cache and state. To return pages to a free list, call
    `cache.truncate` first.

    Raises:
        ValueError: the cache has no block table.
    """
    state = _map_by_axis(
        policy,
        spec,
        lambda axis, leaf, fresh: _put(leaf, jnp.take(fresh, rows, axis=axis), rows, axis),
        lambda axis, leaf, fresh: leaf,
        state,
        policy.init(spec),
    )
    return cache.clear(rows), state


def keep_inactive(
    policy: Policy, spec: CacheSpec, active: Bool[Array, "B"], new: State, old: State
) -> State:
    """Returns `new`, with the row arrays of `old` for inactive rows."""

    def chosen(axis: int, after: Array, before: Array) -> Array:
        if after is before:
            return after
        return jnp.where(
            jnp.expand_dims(active, [i for i in range(after.ndim) if i != axis]), after, before
        )

    return _map_by_axis(policy, spec, chosen, lambda axis, after, before: after, new, old)


def row_arrays(policy: Policy, spec: CacheSpec, state: State) -> list[Array]:
    """Returns the state's row arrays."""
    found = zip(jax.tree.leaves(state), state_axes(policy, spec), strict=True)
    return [leaf for leaf, at in found if at.kind == "row"]


def with_row_arrays(policy: Policy, spec: CacheSpec, state: State, arrays: list[Array]) -> State:
    """Returns the state with its row arrays replaced, in the order of `row_arrays`."""
    rest = iter(arrays)
    return _map_by_axis(policy, spec, lambda axis, leaf: next(rest), lambda axis, leaf: leaf, state)


def _map_by_axis(
    policy: Policy,
    spec: CacheSpec,
    of_rows: Callable[..., Array],
    of_pages: Callable[..., Array],
    *states: State,
) -> State:
    """Maps of_rows(axis, *leaves) or of_pages(axis, *leaves) over states of one structure."""
    leaves, tree = jax.tree.flatten(states[0])
    columns = zip(leaves, *map(jax.tree.leaves, states[1:]), strict=True)
    made = [
        (of_rows if at.kind == "row" else of_pages)(at.axis, *column)
        for column, at in zip(columns, state_axes(policy, spec), strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def _put(x: Array, new: Array, rows: Int32[Array, "n"], axis: int) -> Array:
    return x.at[(slice(None),) * axis + (rows,)].set(new)
