"""One battery over every registered method; policy_table.py lists them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.builder import builder, dense
from jsparse.cache import StepView
from jsparse.host_memory import store
from jsparse.policies import POLICIES, REGISTRY
from jsparse.policies.combinators import keep
from jsparse.policies.expressions import as_policy, parse
from jsparse.policy import Policy, Services
from jsparse.runtime import prefill, session
from jsparse.runtime import rows as driver
from jsparse.runtime.compilation import inlined
from jsparse.runtime.correct import correct
from jsparse.runtime.decode_step import decode_step
from jsparse.runtime.owners import owners
from jsparse.selection import Granularity, nothing
from tests.support.marks import slow_except
from tests.support.policy_table import MECHANISMS, METHODS, TABLE, at_dense, firsts, outermost
from tests.support.programs import shared
from tests.support.tiny import (
    VOCAB,
    assert_close,
    engine_logits,
    forced_logits,
    pooled_logits,
    random_prompts,
    random_tokens,
    read_only,
    spec_of,
    tiny_params,
    traces,
)
from tests.support.toy_policies import bypass, even_ids, inherit, page_bound, shrink

PAGE = 8
PROMPTS = random_prompts((37, 9))
FORCED = random_tokens(2, 20)
TOYS = (page_bound(), inherit(), bypass(), shrink(), even_ids())
MAX_LENGTH = 64
every_method = pytest.mark.parametrize("expression", slow_except(TABLE, *MECHANISMS))
# what the engine's tests do over all of TABLE runs over these
SOME = (
    *MECHANISMS,
    "double_sparsity(budget=8)",
    "lfps(budget=0.2, bypass=True)",
    "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)",
)
# one that leaves pages where they are, and one that drops tokens
TWO = MECHANISMS[::3]
every_mechanism = pytest.mark.parametrize("expression", slow_except(SOME, *MECHANISMS))


def params():
    return tiny_params(num_layers=2)


@shared
def dense_logits():
    return engine_logits(params(), "dense", PROMPTS, FORCED, page_size=PAGE)


@shared
def table_logits(expression):
    """Logits of 20 steps, and of every call of select (layer, granularity, lengths, ids, count,
    bits, dense).
    """
    policy, chosen = parse(expression), []

    def select(state, layer, q, view):
        selection, summary, state = policy.select(state, layer, q, view)
        held = view.layers[layer]

        def record(*arrays):
            chosen.append(
                (
                    layer,
                    selection.granularity,
                    *(None if x is None else np.asarray(x) for x in arrays),
                )
            )

        jax.debug.callback(
            record, held.lengths, selection.ids, selection.count, selection.bits, selection.dense
        )
        return selection, summary, state

    logits = engine_logits(
        params(), policy._replace(select=select), PROMPTS, FORCED, page_size=PAGE
    )
    jax.effects_barrier()
    return logits, chosen


def test_every_registered_policy_is_in_the_table():
    listed = {outermost(expression) for expression in TABLE}
    listed.add("auto")  # never runs itself: tests/policies/test_auto.py
    assert listed == set(POLICIES), "add expressions of it to tests/support/policy_table.py"


def test_methods_are_registered_as_evicting_that_evict():
    built = {name: parse(expression) for name, expression in firsts(TABLE).items()}
    evicting = {name for name, policy in built.items() if policy.eviction is not None}
    assert evicting == {method.build.__name__ for method in REGISTRY if method.kind == "evicts"}, (
        "set `kind` in jsparse/policies/__init__.py"
    )


def decoded(expression, prompts, forced=FORCED):
    """Returns the logits of the policy itself; all batches of two share their programs."""
    return engine_logits(
        params(), expression, prompts, forced, page_size=PAGE, max_length=MAX_LENGTH
    )


@pytest.mark.parametrize("expression", slow_except(METHODS, *TWO))
def test_full_hyper_parameters_equal_dense(expression):
    policy = at_dense(expression)
    if policy is None:
        pytest.skip("names no hyper-parameters at which it is dense")
    assert_close(
        engine_logits(params(), policy, PROMPTS, FORCED, page_size=PAGE), dense_logits(), rtol=2e-5
    )


SHORT = tuple(x for x in METHODS if not parse(x).evicts and parse(x).offload is None)


@pytest.mark.slow
@pytest.mark.parametrize("expression", SHORT)
def test_rows_below_dense_below_have_the_bits_of_dense(expression):
    """Beside a long row, which attends to what the policy selects, and where all are short."""
    policy = parse(expression)
    short = policy._replace(dense_below=lambda held: len(PROMPTS[1]) + FORCED.shape[1])
    # corrections round in their own way
    exact = dense()._replace(services=Services(correct_every=policy.services.correct_every))
    few = [PROMPTS[1], PROMPTS[1][::-1]]
    beside = decoded(short, PROMPTS)
    np.testing.assert_array_equal(beside[:, 1], decoded(exact, PROMPTS)[:, 1])
    np.testing.assert_array_equal(decoded(short, few), decoded(exact, few))
    assert_close(beside[:, 0], decoded(policy, PROMPTS)[:, 0], rtol=2e-5)


@pytest.mark.slow
@every_method
def test_the_table_leaves_something_out(expression):
    """Hyper-parameters so generous that the battery would run dense attention under another name
    show nothing.
    """
    logits, _ = table_logits(expression)
    assert np.isfinite(logits).all()
    dense = outermost(expression) in ("dense", "all_pages") or expression.startswith("keep(dense()")
    assert (np.abs(logits - dense_logits()).max() < 1e-3) == dense


@every_method
def test_selections_are_well_formed(expression):
    """Ids ascend, are distinct and in range, zeros follow the count, no page is listed for tokens
    it does not hold.
    """
    _, calls = table_logits(expression)
    assert sorted(layer for layer, *_ in calls) == sorted([0, 1] * (FORCED.shape[1] - 1))
    for _, granularity, lengths, ids, count, bits, whole in calls:
        assert granularity in ("page", "token")
        unit = PAGE if granularity == "page" else 1
        assert ids.dtype == np.int32
        assert ids.shape[:2] == count.shape == lengths.shape
        assert whole is None or whole.shape == count.shape
        assert bits is None or bits.dtype == np.uint32
        assert (count >= 0).all()
        assert (count <= ids.shape[2]).all()
        for at in np.ndindex(count.shape):
            listed, used = ids[at][: count[at]], -(-lengths[at] // unit)
            assert (np.diff(listed) > 0).all(), (at, listed)
            assert ((listed >= 0) & (listed < used)).all(), (at, listed, lengths[at])
            assert (ids[at][count[at] :] == 0).all(), (at, ids[at])
            if bits is not None:
                marks = (bits[at][:, None] >> np.arange(PAGE, dtype=np.uint32)) & 1 == 1
                slots = ids[at][:, None] * PAGE + np.arange(PAGE)
                # a bit past the length counts for nothing, so it cannot be what a page is listed
                # for
                assert (marks & (slots < lengths[at]))[: count[at]].any(axis=1).all(), (at, marks)


@pytest.mark.parametrize("expression", slow_except(SOME, *TWO))
def test_a_row_does_not_depend_on_the_other_rows(expression):
    """Nor on its place among them."""
    together, _ = table_logits(expression)
    (other,) = random_prompts([29], seed=8)
    logits = decoded(expression, [PROMPTS[1], other], FORCED[::-1])
    assert_close(logits[:, 0], together[:, 1], rtol=2e-5)


@pytest.mark.slow
@every_mechanism
def test_a_row_alone_gives_what_it_gives_in_a_batch(expression):
    together, _ = table_logits(expression)
    logits = decoded(expression, PROMPTS[1:], FORCED[1:, :8])
    assert_close(logits[:, 0], together[:8, 1], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_shared_pool_of_used_pages_gives_the_same(expression):
    """Its table is scrambled, and other rows have written to its pages and given them back.

    By default, and of all others, tests/engine shows it.
    """
    identity, _ = table_logits(expression)
    pooled = pooled_logits(params(), parse(expression), PROMPTS, FORCED, page_size=PAGE)
    assert_close(pooled, identity, rtol=1e-5)


def primed(policy: Policy, batch: int = 2):
    """Returns cache and state after a prompt of 9 tokens per row."""
    p = params()
    spec = spec_of(p, batch, page_size=PAGE, num_pages=MAX_LENGTH // PAGE)
    carry = prefill.start(p.decoder, policy, *store.empty_rows(spec, policy))
    tokens = jnp.asarray(np.stack([PROMPTS[1] + [0] * 7] * batch), jnp.int32)
    valid = jnp.full(batch, len(PROMPTS[1]), jnp.int32)
    beside = read_only(p, policy)
    carry = prefill.prefill_chunk(
        p.decoder, policy, p.weights, tokens, valid, carry, beside, last=True
    )
    return carry.cache, carry.state


step = jax.jit(
    decode_step, static_argnames=("decoder", "policy"), donate_argnames=("cache", "state")
)


@pytest.mark.slow
@pytest.mark.parametrize("expression", SOME)
def test_jit_equals_eager(expression):
    p, policy = params(), parse(expression)
    cache, state = primed(policy, batch=1)
    spec = spec_of(p, 1, page_size=PAGE, num_pages=MAX_LENGTH // PAGE)
    made = session.Session(p, policy, spec, steps_per_program=1)
    copied = jax.tree.map(jnp.copy, (cache, state))
    made.adopt(session.PrefillResult(jnp.zeros((1, VOCAB)), *copied))
    _, jitted = forced_logits(made, FORCED[:1, :2])
    tokens = jnp.asarray(FORCED[:1, 0])
    if policy.eviction is not None and policy.eviction.after_prompt is not None:
        state, cache = policy.eviction.after_prompt(state, StepView(cache), MAX_LENGTH)
    beside = read_only(p, policy)
    eager, *_ = decode_step(p.decoder, policy, p.weights, tokens, cache, state, beside)
    assert_close(jitted, eager, rtol=1e-5)


@pytest.mark.parametrize("policy", slow_except((*SOME, *TOYS), *TWO), ids=str)
def test_an_inactive_row_changes_nothing_and_disturbs_nobody(policy):
    """Neither its own arrays nor a page changes, though its table still names pages."""
    p, policy = params(), as_policy(policy)
    cache, state = primed(policy)
    args = p.decoder, policy, p.weights, jnp.asarray(FORCED[:, 0])
    copied = jax.tree.map(jnp.copy, (cache, state))
    before = row_of(policy, jax.tree.map(np.asarray, (cache, state)), 1)
    beside, active = read_only(p, policy), jnp.array([True, False])
    _, *after, shares = step(*args, cache, state, beside, active)
    for was, now in zip(before, row_of(policy, after, 1), strict=True):
        np.testing.assert_array_equal(was, now)
    whole, *together, _ = step(*args, *copied, beside, jnp.array([True, True]))
    assert np.isfinite(whole).all()
    for was, now in zip(row_of(policy, together, 0), row_of(policy, after, 0), strict=True):
        np.testing.assert_array_equal(was, now)
    assert (shares.attended[:, 0] > 0).any()
    assert (shares.attended[:, 1] == 0).all()
    assert (shares.read[:, 1] == 0).all()


def row_of(policy, part, row):
    """All that one row owns in a cache of an identity table and in a state, its pages included."""
    cache, state = part
    spec = spec_of(params(), 2, page_size=PAGE, num_pages=MAX_LENGTH // PAGE)
    own = spec.pages // spec.batch

    def pages(leaf, axis=0):
        return np.take(np.asarray(leaf), range(row * own, (row + 1) * own), axis=axis)

    arrays = [
        np.take(np.asarray(leaf), row, axis=owner.axis)
        if owner.kind == "row"
        else pages(leaf, owner.axis)
        for leaf, owner in zip(jax.tree.leaves(state), owners(policy, spec), strict=True)
    ]
    for layer in cache.layers:
        arrays += [np.asarray(layer.lengths)[row], pages(layer.k), pages(layer.v)]
    return [*arrays, np.asarray(cache.positions)[row], np.asarray(cache.overflow)[row]]


@pytest.mark.parametrize("expression", slow_except(SOME, *TWO))
def test_nothing_is_traced_again_from_step_to_step(expression):
    """Nor for other prompts of the same size, nor for the same expression written otherwise."""
    jitted = (driver.decode_steps, driver.maintain, correct, prefill.prefill_chunk)
    policy = parse(expression)
    first = 2 + max(policy.services.every.values(), default=0)
    decoded(expression, PROMPTS, FORCED[:, :first])
    before = traces(*jitted)
    spaced = expression.replace("(", "( ").replace(",", " ,")
    decoded(spaced, random_prompts([35, 15], seed=8))
    assert traces(*jitted) == before


def signature(tree):
    return jax.tree.structure(tree), [
        (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)
    ]


def checked(policy: Policy, called: set[str]) -> Policy:
    """The policy, every function of which is held to leave the state's (and the cache's) tree,
    dtypes and shapes.
    """

    hooks = policy._asdict() | policy.services._asdict()

    def watch(name, state_in, state_out):
        def wrapped(*args):
            result = hooks[name](*args)
            called.add(name)
            assert signature(jax.tree.map(jax.typeof, state_in(args))) == signature(
                jax.tree.map(jax.typeof, state_out(result))
            ), name
            return result

        return wrapped

    def first(args):
        return args[0]

    return policy._replace(
        prefill=watch("prefill", first, lambda out: out),
        append=watch("append", first, lambda out: out),
        select=watch("select", first, lambda out: out[2]),
        update=watch("update", first, lambda out: out),
        services=policy.services._replace(
            maintain=watch("maintain", lambda args: (args[0], args[1].cache), lambda out: out)
        ),
    )


@pytest.mark.parametrize("policy", slow_except((*TABLE, *TOYS), *SOME), ids=str)
def test_no_function_changes_the_type_of_the_state(policy):
    p, called = params(), set()
    policy = as_policy(policy)
    watched = checked(policy, called)
    spec = spec_of(p, 2, page_size=PAGE, num_pages=4)
    tokens, count = jnp.zeros((2, 5), jnp.int32), jnp.full(2, 5, jnp.int32)
    beside = read_only(p, policy)

    def run(weights):
        cache, state = kv_cache.init(spec, fields=policy.fields), policy.init(spec)
        start = signature(jax.tree.map(jax.typeof, (cache, state)))
        for last in (False, True):
            carry = prefill.start(p.decoder, watched, cache, state)
            carry = inlined(prefill.prefill_chunk)(
                p.decoder, watched, weights, tokens, count, carry, beside, last=last
            )
            cache, state = carry.cache, carry.state
        _, cache, state, _ = decode_step(p.decoder, watched, weights, count, cache, state, beside)
        corrected = p.decoder, watched, weights, tokens[:, :3], cache, state, beside
        cache, state = inlined(correct)(*corrected)
        state, cache = watched.services.maintain(state, StepView(cache, beside.constants))
        assert signature(jax.tree.map(jax.typeof, (cache, state))) == start
        assert not any(weak for *_, weak in start[1])
        return cache, state

    jax.eval_shape(run, p.weights)
    assert called >= {"prefill", "append", "update", "maintain", "select"}


@builder
def blind(granularity: Granularity = "page", summary: bool = False) -> Policy:
    """Selects nothing anywhere; with a summary that is as empty."""

    def select(state, layer, q, view):
        partial = (jnp.full(q.shape, jnp.nan), jnp.full(q.shape[:2], -jnp.inf)) if summary else None
        return nothing(view.layers[layer].lengths, granularity), partial, state

    return Policy(select)


@pytest.mark.parametrize("kind", slow_except(["page_mass", "token_logits", None], "page_mass"))
@pytest.mark.parametrize("summary", slow_except((False, True), True))
@pytest.mark.parametrize("granularity", ["page", "token"])
def test_a_head_with_nothing_selected_gives_zero(granularity, summary, kind):
    """Whatever is asked of attention besides, and though an empty summary may hold NaN."""
    policy = blind(granularity, summary)._replace(stats=lambda layer: kind)
    cache, state = primed(policy)
    p = params()
    logits, _, _, stats = step(
        p.decoder, policy, p.weights, jnp.asarray(FORCED[:, 0]), cache, state
    )
    assert np.isfinite(logits).all()
    assert (np.asarray(stats.attended) == 0).all()
    assert (np.asarray(stats.read) == 0).all()
    assert np.abs(logits - dense_logits()[1]).max() > 0.1


def test_keep_refuses_what_it_cannot_mean():
    """A summary may stand for tokens that would be kept, and then they would count twice."""
    with pytest.raises(ValueError, match=r"keep cannot wrap it"):
        jsparse.generate(params(), PROMPTS[0], max_new_tokens=2, policy=keep(blind("page", True)))
