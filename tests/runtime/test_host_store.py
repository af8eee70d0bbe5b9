"""Tests that K and V in host memory give the same results as on the device, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.evaluation.attention_metrics import measured
from jsparse.host_memory import pages as host_pages
from jsparse.host_memory.pool import HostPool
from jsparse.host_memory.tails import refilled
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity, chunk_attention, host_attention, host_store
from jsparse.runtime import rows as driver
from jsparse.runtime.host_store import OnHost
from jsparse.runtime.session import Session
from jsparse.runtime.store import store_of
from tests.support.host_layers import in_host_memory, lent
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.small_cache import B, K, M, P, small_spec
from tests.support.tiny import (
    engine_logits,
    forced_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
    traces,
)

PAGE = TAIL = CHUNK = 8
PROMPTS, FORCED = random_prompts((37, 9)), random_tokens(2, 29)
LFPS, QUEST = "lfps(budget=0.3)", "quest(budget=16)"
GATES = "((0, 1), (1, 0))"
POLICIES = (
    LFPS,
    QUEST,
    f"retrieval_heads({LFPS}, {GATES})",
    "double_sparsity(budget=8)",
    f"twilight({LFPS}, p=0.7, prune='token')",
    "twilight(all_pages(), p=0.7)",
    "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)",
)


def params():
    return tiny_params(num_layers=2)


@shared
def logits(expression, forced=FORCED.shape[1]):
    return engine_logits(
        params(), expression, PROMPTS, FORCED[:, :forced], page_size=PAGE, chunk=CHUNK
    )


def offloaded(expression, **options):
    given = "".join(f", {name}={value!r}" for name, value in ({"tail": TAIL} | options).items())
    return f"offloaded({expression}{given})"


@pytest.mark.parametrize("expression", slow_except(POLICIES, QUEST))
def test_host_memory_gives_the_bits_of_the_device(expression):
    """Prompts are prefilled in chunks, and the tail is copied to host memory three times.

    All steps are one program.
    """
    tail, want = max(TAIL, parse(expression).reads or 0), logits(expression)
    before = traces(driver.decode_steps)[0]
    np.testing.assert_array_equal(logits(offloaded(expression, tail=tail)), want)
    assert traces(driver.decode_steps)[0] <= before + 1


@pytest.mark.slow
@pytest.mark.parametrize("expression", POLICIES)
def test_host_memory_gives_the_bits_of_the_device_in_8_bits(expression):
    rounded = replace(params(), kv_cache_dtype="int8")
    tail = max(TAIL, parse(expression).reads or 0)
    want, got = (
        engine_logits(rounded, each, PROMPTS, FORCED[:, :20], page_size=PAGE, chunk=CHUNK)
        for each in (expression, offloaded(expression, tail=tail))
    )
    np.testing.assert_array_equal(got, want)
    assert np.abs(want - logits(expression)[:20]).max() > 0


@pytest.mark.slow
def test_prefetched_rows_give_the_same_results():
    got, want = logits(offloaded(LFPS, reads="gather")), logits(LFPS)
    np.testing.assert_array_equal(got, want)


def further_turn(expression, second=((5, 8, 13), (21, 34))):
    spec = spec_of(params(), 2, page_size=PAGE, num_pages=12)
    held = Session(params(), parse(expression), spec, resumable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: CHUNK)
        held.prefill(PROMPTS)
        first = forced_logits(held, FORCED[:, :20])
        held.prefill(second)
    return first, forced_logits(held, FORCED[:, :11])


@pytest.mark.slow
def test_further_turn_continues():
    """The generated tokens are cut off, although the tail and host memory still have them."""
    for got, want in zip(further_turn(offloaded(QUEST)), further_turn(QUEST), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_prompt_prefilled_on_the_device_moves_to_host_memory():
    p, spec = params(), spec_of(params(), 2, page_size=PAGE, num_pages=12)
    expression = f"retrieval_heads({QUEST}, {GATES})"
    on_device = Session(p, parse(expression), spec)
    on_device.prefill(PROMPTS)
    adopted = Session(p, parse(offloaded(expression)), spec)
    adopted.adopt(jax.tree.map(jnp.copy, on_device.prefilled))
    first = adopted.prefilled.cache.layers[0].k
    assert isinstance(first, HostPool)
    assert first.heads == (1,)
    np.testing.assert_array_equal(forced_logits(adopted, FORCED), forced_logits(on_device, FORCED))


def test_device_holds_the_tail_and_dense_heads():
    spec = spec_of(params(), 2, page_size=PAGE)._replace(num_pages=1000)
    own, chunk = spec.nbytes, 64
    tail = parse(offloaded(QUEST, tail=64))
    dense = parse(offloaded(f"retrieval_heads({QUEST}, {GATES})", tail=64))
    ring, layer = own * 10 // 1000, own // 2
    assert store_of(parse(QUEST), spec).device_bytes(chunk) == own
    assert store_of(tail, spec).device_bytes(chunk) == ring + layer
    assert store_of(dense, spec).device_bytes(chunk) == ring + layer + own // 2


def test_too_small_host_memory_is_refused_before_anything_moves(monkeypatch):
    monkeypatch.setattr(host_store, "available_host_bytes", lambda: 1000)
    policy, spec = parse(offloaded(QUEST, tail=64)), spec_of(params(), 2, page_size=PAGE)
    message = r"max_length=128 for 2 prompt\(s\) takes 128.00 KiB of host memory: must fit in"
    with pytest.raises(ValueError, match=message + r" the 1000 B that are free"):
        Session(params(), policy, spec)
    with pytest.raises(ValueError, match=r"KiB of host memory: must fit in the 1000 B"):
        jsparse.generate(params(), PROMPTS[0], policy=policy)
    with pytest.raises(ValueError, match=r"KiB of host memory: must fit in the 1000 B"):
        capacity.require_fit(spec, policy)
    assert not capacity.fits(spec, policy)


@pytest.mark.slow
def test_gpu_reads_no_pages_in_place(monkeypatch):
    policy = parse(offloaded(QUEST, reads="in_place"))
    held = Session(params(), policy, spec_of(params(), 2, page_size=PAGE, num_pages=12))
    held.prefill(PROMPTS)
    monkeypatch.setattr(host_attention.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="reads='in_place': must be None or 'gather' for a"):
        forced_logits(held, FORCED[:, :3])


def test_device_without_pinned_memory_is_refused(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "Abacus"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(host_pages.jax, "local_devices", lambda: [Device()])
    with pytest.raises(ValueError, match=r"device Abacus: must address pinned_host memory"):
        host_pages.host_sharding()


def test_lengths_determine_the_pages_in_the_ring():
    """A page that is not in host memory yet is read from the tail; host memory is ignored."""
    spec = spec_of(params(), 1, page_size=PAGE, num_pages=8)
    host = OnHost(parse(offloaded(QUEST, tail=16)), spec)
    cache, _ = host.begin(8)
    assert host.pages is not None
    layer = cache.layers[0]._replace(lengths=jnp.full((1, 2), 41, jnp.int32))
    pool = layer.k
    assert isinstance(pool, HostPool)
    pages = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (1, 2, 8))
    assert pool.ring_pages(layer) == 4
    np.testing.assert_array_equal(pool.on_ring(layer, pages)[0, 0], [0, 0, 1, 1, 1, 1, 1, 1])
    there = jnp.full(pool.shape, 2.0)
    filled = replace(pool, ring=pool.ring + 1.0).with_host(there)
    assert set(np.unique(filled.read_pages(layer, pages)[:, :, :2])) == {2.0}
    assert set(np.unique(filled.read_pages(layer, pages)[:, :, 2:])) == {1.0}
    assert set(np.unique(filled.with_host(None).read_pages(layer, pages))) == {1.0}


def test_wrong_arguments_are_refused():
    for expression, message in (
        ("offloaded(oracle_top_k(8))", r"policy=oracle_top_k\(budget=8, .*\): must decode without"),
        ("offloaded(dense())", r"policy=dense\(\): .* reads K or V of all tokens"),
        ("offloaded(snapkv(budget=64))", "but evicts tokens"),
        ("offloaded(twilight(quest(), dense_below=20))", "but has dense rows"),
        ("offloaded(offloaded(quest()))", "must not be offloaded already"),
        ("offloaded(quest(), tail=0)", "tail=0: must be an integer of at least 1"),
        ("offloaded(quest(), reads='slowly')", "reads='slowly': must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(expression)


def test_wrong_sessions_are_refused():
    spec, quest = spec_of(params(), 1), parse(offloaded(QUEST))
    page_mass = quest._replace(stats=lambda layer: "page_mass")
    pooled = spec._replace(pool_pages=40)
    for policy, sizes, options, message in (
        (parse("offloaded(lychee_cluster(budget=256), tail=64)"), spec, {}, "tail=64: .*least 144"),
        (
            parse(offloaded(QUEST, tail=4)),
            spec_of(params(), 1, page_size=PAGE),
            {},
            "tail=4: must be at least 8, .* pages of 8 tokens",
        ),
        (measured(parse(offloaded(LFPS))), spec, {}, "but reads K or V of all tokens"),
        (page_mass, spec, {}, "no statistics but listed_logits .* not page_mass"),
        (
            parse(offloaded(f"retrieval_heads({QUEST}, ((0, 1),))")),
            spec,
            {},
            "gates=.* is for 1 × 2",
        ),
        (quest, spec, {"steps_per_program": 8}, "steps_per_program=8: must be 1 with K and V in"),
        (quest, pooled, {}, "pool_pages=40: must be None with K and V in host"),
    ):
        with pytest.raises(ValueError, match=message):
            Session(params(), policy, sizes, **options)


def test_heads_resident_on_the_device_get_all_their_pages():
    """As a row of an engine needs them; only GPU kernels read them there."""
    rng, (layer,) = np.random.default_rng(0), kv_cache.init(small_spec(8)).layers
    k, v = (jnp.asarray(rng.normal(size=layer.k.shape), jnp.float32) for _ in range(2))
    lengths = jnp.array([[9, 5], [4, 12]], jnp.int32)
    held, pages = in_host_memory(layer._replace(k=k, v=v, lengths=lengths), 1, heads=(1,))
    empty = (replace(pool, resident=jnp.zeros_like(pool.resident)) for pool in (held.k, held.v))
    held = held._replace(**dict(zip("kv", empty, strict=True)))
    filled = jax.jit(lambda *given: refilled(lent(*given), resident=True))(held, pages)
    used = np.arange(M) * P < np.asarray(lengths)[:, 1:]
    for pool, x in ((filled.k, k), (filled.v, v)):
        expected = np.asarray(x).reshape(B, K, M, P, 8)[:, 1] * used[..., None, None]
        np.testing.assert_array_equal(pool.resident.reshape(expected.shape), expected)
