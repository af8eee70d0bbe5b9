"""Tests the bytes that selecting reads against sizes worked out by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jsparse.builder import dense
from jsparse.cache import read_pages
from jsparse.evaluation.selection_bytes import selection_bytes
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity
from jsparse.selection import everything
from tests.support.tiny import tiny_params

LAYERS, KV_HEADS, WIDTH, BATCH, LENGTH, PAGE = 2, 2, 16, 3, 64, 8
HEADS = LAYERS * KV_HEADS * BATCH
KEY = 4 * WIDTH  # bytes in float32


def read(policy, **changes):
    params = replace(tiny_params(num_layers=LAYERS), **changes)
    spec = capacity.spec_of(params, BATCH, LENGTH, PAGE)
    policy = parse(policy) if isinstance(policy, str) else policy
    return selection_bytes(params, policy, spec) / HEADS


def test_bytes_of_methods():
    pages = LENGTH // PAGE
    for expression, of_head in (
        ("dense", 0),
        ("streaming(sink=1, recent=8)", 0),
        ("snapkv(budget=16)", 0),
        ("oracle_top_k(budget=8)", LENGTH * KEY),
        ("quest(budget=16)", pages * 2 * KEY),
        ("quest(budget=32)", pages * 2 * KEY),
        ("keep(quest(budget=16))", pages * 2 * KEY),
        ("dense_layers(quest(budget=16), n=1)", pages * 2 * KEY / 2),
        # half a byte per channel, and a scale and a zero point of two bytes each
        ("twilight(all_pages())", LENGTH * (WIDTH / 2 + 4)),
        # of the base's pages only
        ("twilight(quest(budget=16))", pages * 2 * KEY + 16 * (WIDTH / 2 + 4)),
        # two tables in two bytes; and the keys of three times the budget
        ("lfps(budget=0.125)", LENGTH * 4),
        ("lfps(budget=0.125, exact=True)", LENGTH * 4 + 24 * KEY),
        # codes of a byte, a quarter's norms, the mean; K and V of samples are read to attend
        ("magic_pig(bits=4, tables=8)", LENGTH * 8 + LENGTH // 4 * 4 + KEY),
        # landmarks; coefficients of two chunks and the basis; an outlier and two numbers
        (
            "shadow_kv(budget=16, rank=4, chunk=8, outliers=1)",
            LENGTH // 8 * KEY + (16 + WIDTH) * 4 * 4 + 4 / KV_HEADS + 2 * 4,
        ),
    ):
        assert read(expression) == of_head, expression


def test_keys_in_8_bits_have_their_size():
    assert read("oracle_top_k(budget=8)", kv_cache_dtype="int8") == LENGTH * (WIDTH + 2)


def reader(of_state):
    """A policy of one array of ten numbers per row, from which each layer reads `of_state`."""

    def select(state, layer, q, view):
        changed, seen = of_state(state, view.layers[layer])
        count = everything(view.layers[layer].lengths)
        return replace(count, count=count.count + jnp.sum(seen).astype(jnp.int32)), None, changed

    return dense()._replace(select=select, init=lambda spec: jnp.zeros((spec.batch, 10)))


@pytest.mark.parametrize(
    ("of_state", "numbers"),
    [
        (lambda x, kv: (x, x), 10),
        (lambda x, kv: (x.at[:, 3].set(1), jnp.zeros(1)), 0),
        (lambda x, kv: (x, x.T.reshape(5, -1)[:1]), 4),
        (lambda x, kv: (x, jax.lax.dynamic_slice_in_dim(x, kv.lengths[0, 0], 2, 1)), 4),
        (lambda x, kv: (x, jax.jit(lambda y: y[:, :2])(x)), 4),
        (lambda x, kv: (jax.jit(lambda y: y)(x), jnp.zeros(1)), 0),
        (lambda x, kv: (x, jax.lax.cond(kv.lengths[0, 0] > 1, jnp.sum, lambda y: y[0, 0], x)), 10),
        (
            lambda x, kv: (
                jax.lax.cond(kv.lengths[0, 0] > 1, lambda y: y, lambda y: y, x),
                x[:, :1],
            ),
            2,
        ),
        (lambda x, kv: (x, jax.lax.map(jnp.sum, x)), 10),
    ],
    ids=["all", "write", "view", "dynamic", "call", "returned", "branch", "kept", "loop"],
)
def test_bytes_of_operations(of_state, numbers):
    """Both layers read; the whole array counts once."""
    assert read(reader(of_state)) * HEADS == 4 * BATCH * numbers


def test_pages_count_once_each():
    def select(state, layer, q, view):
        kv = view.layers[layer]
        pages = read_pages(kv.v, kv, jnp.zeros((*kv.lengths.shape, 3), jnp.int32))
        chosen = everything(kv.lengths)
        return replace(chosen, count=chosen.count + jnp.sum(pages).astype(jnp.int32)), None, state

    assert read(dense()._replace(select=select)) == 3 * PAGE * KEY
