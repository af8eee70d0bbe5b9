"""Tests MagicPIG against a slow numpy model, its sampling probability and its estimates against
simulations.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import CacheSpec, LayerCache
from jsparse.policies.magic_pig import (
    FLOOR,
    Hashes,
    Settings,
    collisions,
    estimated,
    hashed,
    in_blocks,
    magic_pig,
    no_hashes,
    sampling_probability,
)
from jsparse.selection import nothing
from tests.support.slow_model import SlowModel, SlowRow, attend
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

H, PAGE, SLOTS, LENGTH = 8, 8, 64, 60
PROMPTS, FORCED = random_prompts((37, 9)), random_tokens(2, 8)
BITS, TABLES, SINK, RECENT, SEED = 2, 5, 2, 4, 3


def chance(cosine, bits, tables):
    """Section 4.2: not in no table and not in exactly one."""
    p = 1 - np.arccos(cosine) / np.pi
    return 1 - (1 - p**bits) ** tables - tables * p**bits * (1 - p**bits) ** (tables - 1)


@pytest.mark.parametrize(("bits", "tables"), [(2, 3), (3, 12)])
def test_probability_is_the_share_of_random_planes_that_sample(bits, tables):
    rng, angles = np.random.default_rng(0), np.array([0.3, 1.0, 1.8])
    planes = rng.normal(size=(40_000, tables, bits, 2))
    side_of_query = planes[..., 0] > 0
    for angle in angles:
        side = planes @ [np.cos(angle), np.sin(angle)] > 0
        equal = (side == side_of_query).all(-1).sum(-1)
        u = sampling_probability(jnp.float32([np.cos(angle)]), bits, tables)
        np.testing.assert_allclose(np.mean(equal >= 2), u[0], atol=0.01)


@pytest.mark.parametrize(("bits", "tables"), [(10, 150), (8, 75), (1, 2)])
def test_probability_is_accurate_in_float32(bits, tables):
    cosines = np.linspace(-1, 1, 41)
    u = sampling_probability(jnp.float32(cosines), bits, tables)
    np.testing.assert_allclose(u, chance(cosines, bits, tables), rtol=1e-4, atol=1e-6)
    assert (u[0], u[-1]) == (0, 1)


def layer_of(rng):
    """K and V of two heads, keys far from 0, and the queries of two groups of two."""
    k, v = rng.normal(size=(2, 2, SLOTS, H))
    k += 3 * rng.normal(size=(2, 1, H))
    q = rng.normal(size=(1, 4, H))
    kv = LayerCache(
        *(jnp.asarray(x.reshape(-1, PAGE, H), jnp.float32) for x in (k, v)),
        jnp.full((1, 2), LENGTH, jnp.int32),
    )
    return kv, k, v, jnp.asarray(q, jnp.float32)


def hashes_of(settings, kv, k):
    """The hashes of a layer whose tokens were all in the prompt."""
    spec = CacheSpec(1, 1, 4, 2, H, PAGE, k.shape[1] // PAGE, jnp.float32)
    mean = jnp.mean(k[None, :, settings.sink : LENGTH], axis=2)
    empty = no_hashes(settings, spec)._replace(mean=mean)
    return hashed(settings, empty, kv, k[None], kv.lengths[:, 0], jnp.zeros_like(kv.lengths))


@partial(jax.jit, static_argnums=0)
def select_of(settings, kv, k, q):
    """The selection and the summary of a layer without sinks and newest tokens."""
    return estimated(settings, nothing(kv.lengths), q, kv, hashes_of(settings, kv, k))


def test_estimates_are_unbiased():
    """The sums of exp(logit) and of exp(logit)·v, over seeds, against those over all tokens."""
    kv, k, v, q = layer_of(np.random.default_rng(1))
    settings = Settings(3, 8, sink=2, recent=4, limit=1.0, seed=0)

    def estimate(seed):
        with_seed = settings._replace(seed=seed)
        hashes = hashes_of(with_seed, kv, jnp.asarray(k, jnp.float32))
        _, summary = estimated(with_seed, nothing(kv.lengths), q, kv, hashes)
        total = jnp.exp(summary.lse)[0, :, None]
        return jnp.concatenate([total, total * summary.o[0]], axis=-1), summary.attended

    number = 2000
    seeds = jnp.arange(number)
    found, sampled = jax.jit(lambda seeds: jax.lax.map(estimate, seeds, batch_size=100))(seeds)
    found = np.asarray(found, np.float64)
    assert 0.1 < np.mean(sampled) / LENGTH < 0.9
    for head in range(4):
        own = slice(2, LENGTH - 4)
        keys, values = k[head // 2, own], v[head // 2, own]
        centred = keys - k[head // 2, 2:LENGTH].mean(0)
        query = np.asarray(q[0, head], np.float64)
        cosine = centred @ query / np.linalg.norm(centred, axis=1) / np.linalg.norm(query)
        u = chance(cosine, 3, 8)
        weights = np.exp(keys @ query / H**0.5) * u / (u + FLOOR)
        expected = np.concatenate([[weights.sum()], weights @ values])
        error = found[:, head].std(0) / number**0.5
        assert (np.abs(found[:, head].mean(0) - expected) < 4 * error).all()
        assert (error < 0.05 * weights.sum()).all()


def test_a_head_with_more_samples_than_the_limit_is_dense():
    kv, k, v, q = layer_of(np.random.default_rng(2))
    settings, k = Settings(2, 4, sink=2, recent=4, limit=1.0, seed=0), np.float32(k)
    _, whole = select_of(settings, kv, k, q)
    few, many = sorted(np.asarray(whole.attended)[0])  # of 60 tokens, in 64 slots
    assert few < many
    limited = settings._replace(limit=float(few / LENGTH))
    dense = np.asarray(whole.attended)[0] == many
    for more in (0, SLOTS):  # a row's samples do not depend on the capacity
        wide = [np.pad(np.float32(x), ((0, 0), (0, more), (0, 0))) for x in (k, v)]
        pages = (jnp.asarray(x.reshape(-1, PAGE, H)) for x in wide)
        selection, summary = select_of(limited, LayerCache(*pages, kv.lengths), wide[0], q)
        assert selection.dense is not None
        np.testing.assert_array_equal(selection.dense[0], dense)
        np.testing.assert_array_equal(summary.attended[0], np.where(dense, 0, few))
    o, lse, of_all = (np.asarray(x)[0] for x in (summary.o, summary.lse, whole.o))
    assert np.isneginf(lse.reshape(2, 2)[dense]).all()
    kept = np.repeat(~dense, 2)
    np.testing.assert_allclose(o[kept], of_all[kept], rtol=1e-5)


class SlowHashes:
    """The rule of one row: its own planes' codes, with the mean of the prompt's keys."""

    def __init__(self, row):
        c = row.model.config
        shape = c.head_dim, TABLES, BITS
        self.planes = np.asarray(jax.random.normal(jax.random.key(SEED), shape), np.float64)
        self.row, self.sampled = row, 0
        self.means = {
            (layer, head): np.mean(row.k[layer][head][SINK:], axis=0)
            for layer, head in product(range(c.num_layers), range(c.num_kv_heads))
        }

    def codes(self, x):
        """The side of each plane, by table."""
        return np.einsum("h,hli->li", x, self.planes) > 0

    def rule(self, layer, q):
        return [self.attended(layer, n, query) for n, query in enumerate(q)]

    def attended(self, layer, n, query):
        head = n // self.row.group
        keys, values = self.row.k[layer][head], self.row.v[layer][head]
        listed, minus_log_u = [], []
        for slot, key in enumerate(keys):
            if slot < SINK or slot >= len(keys) - RECENT:
                listed.append(slot)
                minus_log_u.append(0.0)
                continue
            centred = key - self.means[layer, head]
            equal = (self.codes(query) == self.codes(centred)).all(axis=1).sum()
            if equal >= 2:
                cosine = query @ centred / np.linalg.norm(query) / np.linalg.norm(centred)
                listed.append(slot)
                minus_log_u.append(-np.log(chance(cosine, BITS, TABLES) + FLOOR))
                self.sampled += 1
        return attend(
            query, [keys[slot] for slot in listed], [values[slot] for slot in listed], minus_log_u
        )


def test_decoding_matches_the_slow_model():
    """Ragged rows, groups of query heads, and new tokens that are sampled once they are older."""
    params = tiny_params(num_layers=2)
    policy = magic_pig(BITS, TABLES, SINK, RECENT, limit=1.0, seed=SEED)
    logits = engine_logits(params, policy, PROMPTS, FORCED, page_size=PAGE, max_length=64)
    for row, (prompt, forced) in enumerate(zip(PROMPTS, FORCED, strict=True)):
        slow = SlowRow(SlowModel(params), prompt)
        hashes = SlowHashes(slow)
        expected = [slow.logits, *(slow.push(token, hashes.rule) for token in forced[:-1])]
        assert_close(logits[:, row], np.array(expected), rtol=1e-3)
        assert hashes.sampled > 0


@pytest.mark.slow
def test_many_tables_of_one_bit_equal_dense_attention():
    params = tiny_params(num_layers=2)
    dense = engine_logits(params, "dense", PROMPTS, FORCED, page_size=PAGE, max_length=64)
    for limit, rtol in ((1.0, 1e-3), (0.02, 2e-5)):  # all are sampled, or too many
        policy = magic_pig(1, 80, SINK, RECENT, limit=limit)
        found = engine_logits(params, policy, PROMPTS, FORCED, page_size=PAGE, max_length=64)
        assert_close(found, dense, rtol=rtol)


def test_codes_of_nine_bits_collide_where_they_are_equal():
    kv, k, _, q = layer_of(np.random.default_rng(4))
    settings = Settings(9, 3, 2, 4, 1.0, 0)
    x = np.arange(2 * 11 * 3).reshape(1, 2, 11, 3)

    @jax.jit
    def found(kv, k, q, x):
        hashes = hashes_of(settings, kv, k)
        in_pieces = in_blocks(lambda x: (x[..., 0], x * 2), x, 4)
        return hashes, collisions(settings, q.reshape(1, 2, 2, H), kv, hashes), in_pieces

    hashes, marks, (first, second) = jax.tree.map(np.asarray, found(kv, np.float32(k), q, x))
    np.testing.assert_array_equal(first, x[..., 0])
    np.testing.assert_array_equal(second, x * 2)
    assert hashes.codes.dtype == np.uint16
    of_queries = hashed_queries(settings, q, hashes)
    codes = np.asarray(hashes.codes).reshape(2, 1, SLOTS, 3)
    np.testing.assert_array_equal(marks[0], (codes == of_queries).sum(-1) >= 2)


def hashed_queries(settings: Settings, q, hashes: Hashes):
    """The codes of the queries, bit i of a table's code from its plane i, [K, G, 1, L]."""
    shape = H, settings.tables, settings.bits
    planes = np.asarray(jax.random.normal(jax.random.key(settings.seed), shape))
    sides = np.einsum("nh,hli->nli", np.asarray(q[0]), planes) > 0
    codes = (sides << np.arange(settings.bits)).sum(-1)
    return codes.astype(hashes.codes.dtype).reshape(2, 2, 1, -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits=0: must be an integer of at least 1"),
        ({"bits": 17}, "bits=17: must be at most 16"),
        ({"tables": 1}, "tables=1: must be an integer of at least 2"),
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"recent": 0}, "recent=0: must be an integer of at least 1"),
        ({"limit": 0.0}, "limit=0.0: must be a number above 0 and at most 1"),
        ({"seed": -1}, "seed=-1: must be an integer of at least 0"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be below"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        magic_pig(**arguments)
