"""Tests that prefill in any chunks gives the same cache, query windows and hidden states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.cache import LayerCache
from jsparse.models.transformer import to_logits
from jsparse.policy import at_layer
from jsparse.runtime import chunk_attention, prefill
from jsparse.runtime.correct import correct
from jsparse.runtime.store import empty_rows
from tests.support.marks import slow_except
from tests.support.slow_model import SlowModel, SlowRow
from tests.support.tiny import assert_close, random_prompts, spec_of, tiny_params

LENGTHS = (37, 18, 3)
PROMPTS = random_prompts(LENGTHS)
PAGE = 8


def windowed(size: int):
    """Attends densely; the state is every layer's query windows and the number of valid queries."""

    def init(spec):
        shape = (spec.batch, size, spec.num_heads, spec.head_dim)
        return tuple(
            (jnp.zeros(shape), jnp.zeros(spec.batch, jnp.int32)) for _ in range(spec.num_layers)
        )

    def take(state, layer, view):
        entry = view.q_window.astype(jnp.float32), view.window_valid
        return at_layer(state, layer, entry)

    return dense()._replace(window=size, init=init, prefill=take)


def run(params, policy, sizes, *, prompts=PROMPTS, pool_pages=None):
    """Returns the carry after prompts in chunks of `sizes`."""
    lengths = np.array([len(p) for p in prompts])
    tokens = np.zeros((len(prompts), sum(sizes)), np.int32)
    for b, prompt in enumerate(prompts):
        tokens[b, : len(prompt)] = prompt
    spec = spec_of(params, len(prompts), page_size=PAGE)._replace(pool_pages=pool_pages)
    carry, done = prefill.start(params.decoder, policy, *empty_rows(spec, policy)), 0
    for size in sizes:
        carry = prefill.prefill_chunk(
            params.decoder,
            policy,
            params.weights,
            jnp.asarray(tokens[:, done : done + size]),
            jnp.asarray(np.clip(lengths - done, 0, size), jnp.int32),
            carry,
            last=bool(done + size >= lengths.max()),
        )
        done += size
    return carry


def held_rows(layer: LayerCache):
    """Returns K and V of every head up to its length, as lists over rows."""
    k, v = (np.asarray(kv_cache.read_heads(pool, layer)) for pool in (layer.k, layer.v))
    lengths = np.asarray(layer.lengths)
    return [(k[at][: lengths[at]], v[at][: lengths[at]]) for at in np.ndindex(lengths.shape)]


@pytest.fixture(scope="module")
def slow_rows():
    model = SlowModel(tiny_params(num_layers=2))
    return [SlowRow(model, prompt) for prompt in PROMPTS]


CUTS = (40,), (16, 16, 16), (5,) * 8, (32, 1, 4, 1)


@pytest.mark.parametrize("window", slow_except((4, 32), 32))
@pytest.mark.parametrize("sizes", slow_except(CUTS[2:], CUTS[3]), ids=str)
def test_every_chunking_matches_the_slow_model(sizes, window, slow_rows):
    """Cache, lengths, positions, logits and query windows are equal.

    Some prompts are shorter than the window.
    """
    params = tiny_params(num_layers=2)
    carry = run(params, windowed(window), sizes)
    logits = to_logits(params.decoder, params.weights, carry.last_hidden)
    assert carry.cache.positions.tolist() == list(LENGTHS)
    for b, row in enumerate(slow_rows):
        assert_close(logits[b], row.logits, rtol=1e-5, row=b)
        for layer, held in enumerate(carry.cache.layers):
            assert (np.asarray(held.lengths[b]) == LENGTHS[b]).all()
            for head in range(2):
                k, v = held_rows(held)[2 * b + head]
                assert_close(k, row.k[layer][head], rtol=1e-5, layer=layer, head=head)
                assert_close(v, row.v[layer][head], rtol=1e-5, layer=layer, head=head)
            queries, valid = carry.state[layer]
            count = min(LENGTHS[b], window)
            assert int(valid[b]) == count
            assert_close(
                queries[b, window - count :], row.q[layer][-count:], rtol=1e-5, layer=layer, row=b
            )
            assert (np.asarray(queries[b, : window - count]) == 0).all()


def test_padding_and_finished_rows_write_nothing():
    """Slots past a head's length keep their bytes, and so does a row without valid tokens."""
    params = tiny_params(num_layers=2)
    carry = run(params, dense(), (40,))
    before = jax.tree.map(np.asarray, (carry.cache, carry.last_hidden))
    after = prefill.prefill_chunk(
        params.decoder, dense(), params.weights, jnp.ones((3, 4), jnp.int32),
        jnp.array([0, 2, 0], jnp.int32), carry, last=True,
    )  # fmt: skip
    assert after.cache.positions.tolist() == [37, 20, 3]
    for layer, old in zip(after.cache.layers, before[0].layers, strict=True):
        pages = np.asarray(layer.k).reshape(3, -1), old.k.reshape(3, -1)
        for row in (0, 2):
            np.testing.assert_array_equal(pages[0][row], pages[1][row])
        heads, old_heads = (
            np.asarray(kv_cache.read_heads(c.k, c))
            for c in (layer, old._replace(k=jnp.asarray(old.k)))
        )
        np.testing.assert_array_equal(heads[1, :, :18], old_heads[1, :, :18])
        assert (heads[1, :, 20:] == 0).all()
    for row in (0, 2):
        np.testing.assert_array_equal(after.last_hidden[row], before[1][row])


@jax.jit
def spoil(layer, noise, first):
    """The layer with noise for K and V from each head's slot `first` on."""
    rows, count = noise.shape[:2]
    positions, valid = jnp.zeros((rows, count), jnp.int32), jnp.full(rows, count)
    return kv_cache.write(layer, noise, -noise, positions, valid, first)


@pytest.mark.parametrize("pool_pages", slow_except([None, 100], 100))
def test_correct_restores_what_dense_prefill_gives(pool_pages):
    """The newest K and V are corrupted, as by sparse decoding; the rest of the cache is intact."""
    params, count = tiny_params(num_layers=2), 3
    carry = run(params, dense(), (16, 16, 8), pool_pages=pool_pages)
    expected = [held_rows(layer) for layer in carry.cache.layers]
    cache = carry.cache
    for i, layer in enumerate(cache.layers):
        noise = np.full((3, count, 2, 16), 3.0 + i, np.float32)
        spoilt = spoil(layer, noise, np.asarray(layer.lengths) - count)
        cache = kv_cache.replace_layer(cache, i, spoilt)
    assert np.abs(held_rows(cache.layers[1])[0][0] - expected[1][0][0]).max() > 1
    appended = []

    def append(state, layer, k, v, tokens, positions, view):
        appended.append((layer, k.shape, tokens.shape, positions.shape))
        return state

    policy = dense()._replace(append=append)
    newest = jnp.asarray([prompt[-count:] for prompt in PROMPTS], jnp.int32)
    cache, _ = correct(params.decoder, policy, params.weights, newest, cache, carry.state)
    assert cache.positions.tolist() == list(LENGTHS)
    for layer, rows in zip(cache.layers, expected, strict=True):
        assert (np.asarray(layer.lengths) == np.array(LENGTHS)[:, None]).all()
        for (k, v), (old_k, old_v) in zip(held_rows(layer), rows, strict=True):
            assert_close(k, old_k, rtol=1e-5)
            assert_close(v, old_v, rtol=1e-5)
    assert appended == [(layer, (3, count, 2, 16), (3, count), (3, count)) for layer in range(2)]


@pytest.mark.parametrize("pages", [3, 9])
def test_attend_chunk_over_several_blocks(pages, monkeypatch):
    """A chunk of 4 follows 0, 11 and 60 tokens, in blocks of `pages` pages.

    The blocks need not divide the 8 pages.
    """
    monkeypatch.setattr(chunk_attention, "PLAIN_CHUNK", 3 * pages * PAGE)  # shared by the 3 rows
    rng = np.random.default_rng(5)
    lengths, valid = np.array([0, 11, 60]), np.array([4, 2, 4])
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    k_all, v_all, q = draw(3, 64, 2, 16), draw(3, 64, 2, 16), draw(3, 4, 4, 16)
    spec = spec_of(tiny_params(num_layers=1), 3, page_size=PAGE, num_pages=8)._replace(num_layers=1)
    chunk = []
    for pool in (k_all, v_all):
        chunk.append(
            np.stack(
                [
                    np.pad(pool[b], ((0, 4), (0, 0), (0, 0)))[n : n + 4]
                    for b, n in enumerate(lengths)
                ]
            )
        )
    everything = np.broadcast_to(np.arange(64, dtype=np.int32), (3, 64))
    total = (lengths + valid).astype(np.int32)

    @jax.jit
    def attended(q, k, v, valid, *held):
        cache = kv_cache.append(kv_cache.init(spec), 0, *held)
        return chunk_attention.attend_chunk(q, k, v, cache.layers[0], valid)

    held = k_all, v_all, everything, total
    o = np.asarray(attended(q, *chunk, valid.astype(np.int32), *held))
    for b, t, n in np.ndindex(3, 4, 4):
        if t < valid[b]:
            seen = slice(0, lengths[b] + t + 1)
            logits = k_all[b, seen, n // 2] @ q[b, t, n] / 4.0
            weights = np.exp(logits - logits.max())
            np.testing.assert_allclose(
                o[b, t, n], weights @ v_all[b, seen, n // 2] / weights.sum(), atol=1e-5
            )


def test_chunk_sizes(monkeypatch):
    monkeypatch.setattr(chunk_attention.jax, "default_backend", lambda: "gpu")
    for length, chunk, sizes in (
        (1, 512, [64]), (64, 512, [64]), (65, 512, [128]), (513, 512, [512, 64]),
        (1700, 512, [512, 512, 512, 256]), (127, 64, [64, 64]), (5, 8, [8]),
    ):  # fmt: skip
        assert chunk_attention.chunk_sizes(length, chunk) == sizes


def sizes_of_chunks(batches, pages=256):
    spec = spec_of(tiny_params(num_layers=2), 1, page_size=16)._replace(num_pages=pages)
    return [chunk_attention.chunk_tokens(spec._replace(batch=batch)) for batch in batches]


def test_chunks_shrink_with_the_batch_and_stay_powers_of_two(monkeypatch):
    monkeypatch.setattr(chunk_attention.jax, "default_backend", lambda: "gpu")
    assert sizes_of_chunks((1, 2, 3, 8, 10_000)) == [512, 256, 128, 64, 64]


def test_chunks_on_a_cpu_have_one_size_per_capacity():
    for pages, size in ((4, 64), (32, 64), (64, 128), (100, 128), (512, 512)):
        assert sizes_of_chunks((1,), pages) == [size]
        assert chunk_attention.chunk_sizes(size + 1, size) == [size, size]


def test_corrections_skip_rows_that_ran_out_of_room():
    params = tiny_params(num_layers=2)
    carry = run(params, dense(), (16, 16, 8))
    cache = carry.cache._replace(overflow=jnp.array([True, False, False]))
    before = [held_rows(layer) for layer in cache.layers]
    positions = np.asarray(cache.positions).tolist()
    tokens = jnp.full((3, 2), 7, jnp.int32)
    cache, _ = correct(params.decoder, dense(), params.weights, tokens, cache, carry.state)
    assert np.asarray(cache.positions).tolist() == positions
    for layer, rows in zip(cache.layers, before, strict=True):
        heads = len(rows) // 3
        for nth, (was, now) in enumerate(zip(rows, held_rows(layer), strict=True)):
            assert (nth < heads) == all(map(np.array_equal, was, now))
