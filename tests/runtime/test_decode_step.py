"""Tests that the dense decode step is the model, and that its statistics match hand counting.

Tables, page sizes and batches vary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.builder import builder, dense
from jsparse.cache import NOTHING
from jsparse.policies.expressions import parse
from jsparse.policy import Eviction, at_layer
from jsparse.runtime import prefill
from jsparse.runtime.compilation import inlined
from jsparse.runtime.decode_step import decode_step
from jsparse.runtime.decoding import without_logits
from jsparse.runtime.rows import Batch, decode_steps, no_recent
from jsparse.runtime.sampling import greedy
from jsparse.selection import everything
from tests.support.marks import slow_except
from tests.support.tiny import (
    assert_close,
    dense_pass,
    engine_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
)

LENGTHS = (37, 18, 3)
PROMPTS = random_prompts(LENGTHS)
FORCED = random_tokens(3, 13)
PARAMS = tiny_params(num_layers=1)
step = jax.jit(decode_step, static_argnames=("decoder", "policy"))


@pytest.fixture(scope="module")
def full_pass():
    """Returns the logits of one dense pass over each whole text, [steps, B, V].

    The steps are those of decoding.
    """
    rows = []
    for prompt, forced in zip(PROMPTS, FORCED, strict=True):
        logits = dense_pass(PARAMS, [*prompt, *forced.tolist()])
        rows.append(logits[len(prompt) - 1 : len(prompt) - 1 + FORCED.shape[1]])
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("page_size", slow_except((8, 16, 32, 64), 64))
def test_prefill_and_decode_equal_one_full_pass(page_size, full_pass):
    logits = engine_logits(PARAMS, "dense", PROMPTS, FORCED, page_size=page_size)
    assert_close(logits, full_pass, rtol=1e-5)


def decode(policy, *, pool_pages=None, page_size=8, forced=FORCED, params=PARAMS):
    """Returns logits and stats of every forced step, and the final cache.

    The cache has an identity table or a shared pool.
    """
    spec = spec_of(params, len(PROMPTS), page_size=page_size, num_pages=64 // page_size)
    spec = spec._replace(pool_pages=pool_pages)
    cache = kv_cache.init(spec, fields=policy.fields)
    carry = prefill.start(params.decoder, policy, cache, policy.init(spec))
    tokens = np.zeros((3, 40), np.int32)
    for b, prompt in enumerate(PROMPTS):
        tokens[b, : len(prompt)] = prompt
    valid = jnp.asarray(LENGTHS, jnp.int32)
    carry = prefill.prefill_chunk(
        params.decoder, policy, params.weights, jnp.asarray(tokens), valid, carry, last=True
    )
    cache, state, logits, stats = carry.cache, carry.state, [], []
    for i in range(forced.shape[1]):
        out, cache, state, shares = step(
            params.decoder, policy, params.weights, jnp.asarray(forced[:, i]), cache, state
        )
        logits.append(np.asarray(out))
        stats.append(jax.tree.map(np.asarray, shares.over_layers()))
    return np.stack(logits), stats, cache


@pytest.mark.slow
def test_decoding_equals_the_full_pass_over_a_pool(full_pass):
    logits, _, _ = decode(dense(), pool_pages=60)
    assert_close(logits[:-1], full_pass[1:], rtol=1e-5)


def test_exhausted_pool_reports_overflow_and_spoils_nothing():
    """Prompts take 9 pages per head, and row 0 needs another in its fourth step.

    That step is written where no head reads.
    """
    expected, _, whole = decode(dense(), forced=FORCED[:, :4])
    pool_pages = 2 * (5 + 3 + 1) + 1
    logits, _, cache = decode(dense(), pool_pages=pool_pages, forced=FORCED[:, :4])
    assert cache.overflow.tolist() == [True, False, False]
    assert_close(logits[:3], expected[:3], rtol=1e-5)
    assert_close(logits[3, 1:], expected[3, 1:], rtol=1e-5)
    assert np.isfinite(logits).all()
    for held, other in zip(cache.layers, whole.layers, strict=True):
        for row, length in ((0, 40), (1, 22), (2, 7)):
            k, same = (
                np.asarray(kv_cache.read_heads(c.k, c))[row, :, :length] for c in (held, other)
            )
            assert_close(k, same, rtol=1e-5, row=row)
    _, _, cache = decode(dense(), pool_pages=pool_pages, forced=FORCED[:, :3])
    assert not cache.overflow.any()


def test_shares_match_hand_counting():
    """The policy is streaming(sink=3, recent=9) over pages of 8."""
    sink, recent, page = 3, 9, 8
    _, stats, _ = decode(parse(f"streaming(sink={sink}, recent={recent})"))
    for i, shares in enumerate(stats):
        for b, prompt in enumerate(PROMPTS):
            length = len(prompt) + i + 1
            slots = {s for s in range(length) if s < sink or s >= length - recent}
            pages = {s // page for s in slots}
            read = sum(min(page, length - page * p) for p in pages)
            assert shares.attended[b] == pytest.approx(len(slots) / length)
            assert shares.read[b] == pytest.approx(read / length)


def test_dense_layers_are_counted():
    """One layer of two is dense, the other attends to the 12 of streaming."""
    policy = parse("dense_layers(streaming(sink=3, recent=9), n=1)")
    _, stats, _ = decode(policy, params=tiny_params(num_layers=2))
    for i, shares in enumerate(stats):
        length = LENGTHS[0] + i + 1
        assert shares.attended[0] == pytest.approx((length + 12) / 2 / length)


@builder
def dense_until(limit: int) -> jsparse.Policy:
    """Returns a policy that is dense up to a length.

    Beyond it, select attends only to the newest token; it counts its calls.
    """
    inner = parse("streaming(sink=0, recent=1)")

    def select(state, layer, q, view):
        selection, _, _ = inner.select((), layer, q, view)
        return selection, None, at_layer(state, layer, state[layer] + 1)

    return jsparse.Policy(
        select,
        init=lambda spec: tuple(jnp.int32(0) for _ in range(spec.num_layers)),
        dense_below=lambda held: limit + 1,
        stats=lambda layer: "page_mass",
    )


def test_short_rows_are_dense_without_a_selection():
    limit = LENGTHS[0] + 5
    expected, _, _ = decode(dense())
    logits, stats, _ = decode(dense_until(limit))
    assert_close(logits[:5], expected[:5], rtol=1e-6)
    assert np.abs(logits[5] - expected[5]).max() > 0.1
    attended = [float(s.attended[0]) for s in stats]
    assert attended[:5] == pytest.approx([1.0] * 5)
    assert attended[5:] == pytest.approx(
        [1 / (LENGTHS[0] + i + 1) for i in range(5, FORCED.shape[1])]
    )


def test_current_token_is_always_attended():
    """A policy that lists only page 0 attends to that page and to the newest token."""
    policy = dense()._replace(
        select=lambda state, layer, q, cache: (
            jsparse.Selection(
                jnp.zeros((*cache.layers[layer].lengths.shape, 1), jnp.int32),
                jnp.ones_like(cache.layers[layer].lengths),
            ),
            None,
            state,
        )
    )
    _, stats, _ = decode(policy)
    for i, shares in enumerate(stats):
        for b, prompt in enumerate(PROMPTS):
            length = len(prompt) + i + 1
            assert shares.attended[b] == pytest.approx(
                min(length, 9 if length > 8 else length) / length
            )


@pytest.mark.parametrize("evicts", [False, True])
def test_values_derived_from_lengths_are_computed_once_for_all_layers(evicts):
    """Layers share one array of lengths, unless their heads may hold different tokens."""
    seen = []

    def select(state, layer, q, view):
        seen.append(view.layers[layer].lengths)
        return everything(seen[-1]), None, state

    eviction = Eviction() if evicts else None
    policy = dense()._replace(select=select, eviction=eviction)
    params = tiny_params(num_layers=2)
    spec = spec_of(params, batch=3, page_size=8, num_pages=2)
    shapes = jax.eval_shape(lambda: (kv_cache.init(spec), policy.init(spec)))
    tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
    run = partial(decode_step, params.decoder, policy)
    jax.eval_shape(run, params.weights, tokens, *shapes)
    first, second = seen
    assert (first is second) == (not evicts)


def test_loop_of_steps_carries_lengths_once():
    params, policy = tiny_params(num_layers=2), dense()
    spec = spec_of(params, batch=3, page_size=8, num_pages=2)

    def batch():
        held = kv_cache.init(spec), policy.init(spec)
        return Batch(jnp.zeros(3, jnp.int32), *held, (), jnp.int32(1), no_recent(policy, 3))

    run = partial(inlined(decode_steps), params.decoder, policy, greedy, 4, without_logits)
    traced = jax.make_jaxpr(run)(params.weights, NOTHING, jax.eval_shape(batch))
    (loop,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    carried = [x.aval for x in loop.outvars]
    lengths = [x for x in carried if x.shape == (3, spec.num_kv_heads) and x.dtype == jnp.int32]
    assert len(lengths) == 1


def test_step_keeps_the_dtypes_of_bfloat16():
    params = PARAMS
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params.weights)
    half = jsparse.Params(weights, params.config, None, {}, "half")
    logits = engine_logits(half, "streaming(sink=3, recent=60)", PROMPTS, FORCED)
    assert logits.dtype == np.float32
    expected = engine_logits(params, "dense", PROMPTS, FORCED)
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 0.08


@pytest.mark.slow
def test_pages_without_bits_are_attended_to_in_full():
    policy = "keep(oracle_top_k(budget=64, granularity='page'), sink=1, recent=1)"
    out = jsparse.generate(PARAMS, PROMPTS[0], max_new_tokens=8, policy=policy, page_size=64)
    assert out.stats.attended_fraction == pytest.approx(1.0)
