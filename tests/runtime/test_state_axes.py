"""Tests the owners of the arrays of a policy's state, and that rows move without their pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.policies.expressions import as_policy, parse
from jsparse.policy import Policy
from jsparse.runtime.state_axes import (
    StateAxis,
    clear_rows,
    keep_inactive,
    put_rows,
    row_arrays,
    state_axes,
    take_rows,
    with_row_arrays,
)
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS
from tests.support.tiny import spec_of, tiny_params
from tests.support.toy_policies import bypass, even_ids, inherit, page_bound, shrink

SPEC = spec_of(tiny_params(num_layers=2), 3, page_size=8, num_pages=4)._replace(pool_pages=26)
TOYS = (page_bound(), inherit(), bypass(), shrink(), even_ids())


def test_every_array_has_an_owner_with_its_axis():
    sizes = {"row": SPEC.batch, "page": SPEC.pages}
    for policy in map(as_policy, [*METHODS, *TOYS]):
        state = jax.eval_shape(lambda policy=policy: policy.init(SPEC))
        for leaf, at in zip(jax.tree.leaves(state), state_axes(policy, SPEC), strict=True):
            assert leaf.shape[at.axis] == sizes[at.kind], policy
            assert leaf.size, policy  # XLA crashes on empty arrays on several devices


def test_owners_of_known_policies():
    quest, lychee = parse("quest(budget=16)"), parse("lychee_decode(((1, 1), (0, 1)), value=16)")
    assert set(state_axes(quest, SPEC)) == {StateAxis("page", 0)}
    assert set(state_axes(lychee, SPEC)) == {StateAxis("row", 0)}
    labels = state_axes(parse("double_sparsity(budget=8)"), SPEC)
    assert labels[:4] == (StateAxis("row", 0), *[StateAxis("page", 0)] * 3)
    assert state_axes(dense(), SPEC) == ()


def with_init(init) -> Policy:
    return dense()._replace(init=init, name="mine")


def test_array_without_one_owner_is_refused_by_name():
    for shape in (
        lambda spec: (),
        lambda spec: (spec.num_layers, 5),
        lambda spec: (spec.batch, spec.pages),
        lambda spec: (spec.batch, spec.batch),
        lambda spec: (spec.batch * spec.num_kv_heads, 4),
        lambda spec: (spec.batch, 2 * spec.batch),
    ):
        policy = with_init(lambda spec, shape=shape: {"steps": jnp.zeros(shape(spec))})
        said = r"policy=mine: state\['steps'\] is .* must have one axis"
        with pytest.raises(ValueError, match=said):
            state_axes(policy, SPEC)


def numbered(policy: Policy, seed: int):
    """A cache and a state of this policy filled with numbers."""
    rng = np.random.default_rng(seed)

    def filled(leaf):
        if leaf.dtype == jnp.bool_:
            return rng.random(leaf.shape) < 0.5
        return rng.integers(0, 99, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(filled, jax.eval_shape(lambda: blank(policy)))


def blank(policy: Policy):
    """An empty cache, and the initial state of this policy."""
    return kv_cache.init(SPEC, fields=policy.fields), policy.init(SPEC)


taken, put, cleared_of = (
    jax.jit(move, static_argnums=(0, 1)) for move in (take_rows, put_rows, clear_rows)
)


def of_rows(policy, cache, state, rows):
    """The arrays owned by rows, in numpy."""
    arrays = [
        np.take(np.asarray(leaf), rows, axis=at.axis)
        for leaf, at in zip(jax.tree.leaves(state), state_axes(policy, SPEC), strict=True)
        if at.kind == "row"
    ]
    held = [x for layer in cache.layers for x in (layer.lengths, layer.block_table)]
    return arrays + [np.asarray(x)[rows] for x in (*held, cache.positions, cache.overflow)]


def of_pages(policy, cache, state):
    """The arrays owned by pages, in numpy."""
    arrays = [
        leaf
        for leaf, at in zip(jax.tree.leaves(state), state_axes(policy, SPEC), strict=True)
        if at.kind == "page"
    ]
    pools = [x for layer in cache.layers for x in (layer.k, layer.v, layer.bias)]
    return [np.asarray(x) for x in (*arrays, *pools) if x is not None]


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


MOVED = ("double_sparsity(budget=8)", "twilight(tidal(budget=12, first=0, again=5), p=0.8)")


MOVING = [*MOVED, shrink(), even_ids()]


@pytest.mark.parametrize("policy", slow_except(MOVING, MOVED[1], MOVING[2]), ids=str)
def test_rows_are_taken_put_and_cleared_and_nothing_else_moves(policy):
    policy = as_policy(policy)
    cache, state = numbered(policy, 1)
    part = taken(policy, SPEC, cache, state, np.array([2, 0]))
    assert_same(of_rows(policy, *part, [0, 1]), of_rows(policy, cache, state, [2, 0]))
    assert_same(of_pages(policy, *part), of_pages(policy, cache, state))

    other = taken(policy, SPEC, *numbered(policy, 2), np.array([1]))
    joined = put(policy, SPEC, cache, state, other, np.array([2]))
    assert_same(of_rows(policy, *joined, [2]), of_rows(policy, *other, [0]))
    assert_same(of_rows(policy, *joined, [0, 1]), of_rows(policy, cache, state, [0, 1]))
    assert_same(of_pages(policy, *joined), of_pages(policy, *other))

    cleared = cleared_of(policy, SPEC, cache, state, np.array([1]))
    assert_same(of_rows(policy, *cleared, [0, 2]), of_rows(policy, cache, state, [0, 2]))
    assert_same(of_pages(policy, *cleared), of_pages(policy, cache, state))
    empty = jax.jit(blank, static_argnums=0)(policy)
    assert_same(of_rows(policy, *cleared, [1]), of_rows(policy, *empty, [1]))


def test_rows_of_an_identity_table_cannot_be_moved():
    spec = SPEC._replace(pool_pages=None)
    cache = jax.eval_shape(lambda: kv_cache.init(spec))
    for move in (take_rows, clear_rows):
        with pytest.raises(ValueError, match="must have a block table"):
            move(dense(), spec, cache, (), jnp.array([0]))
    with pytest.raises(ValueError, match="must have a block table"):
        put_rows(dense(), spec, cache, (), (cache, ()), jnp.array([0]))


def test_inactive_rows_keep_their_arrays_and_pages_keep_the_new_values():
    policy = parse("double_sparsity(budget=8)")
    (cache, old), (_, new) = numbered(policy, 1), numbered(policy, 2)
    keep = jax.jit(keep_inactive, static_argnums=(0, 1))
    kept = keep(policy, SPEC, np.array([True, False, True]), new, old)
    assert_same(of_rows(policy, cache, kept, [0, 2]), of_rows(policy, cache, new, [0, 2]))
    assert_same(of_rows(policy, cache, kept, [1]), of_rows(policy, cache, old, [1]))
    assert_same(of_pages(policy, cache, kept), of_pages(policy, cache, new))


def test_row_arrays_go_out_and_back():
    policy = parse("double_sparsity(budget=8)")
    (cache, first), (_, second) = numbered(policy, 1), numbered(policy, 2)
    mixed = with_row_arrays(policy, SPEC, second, row_arrays(policy, SPEC, first))
    assert_same(of_rows(policy, cache, mixed, [0, 1, 2]), of_rows(policy, cache, first, [0, 1, 2]))
    assert_same(of_pages(policy, cache, mixed), of_pages(policy, cache, second))
