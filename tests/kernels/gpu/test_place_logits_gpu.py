"""Tests that place_logits in triton puts logits bit for bit where the reference puts them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.place_logits import place_logits
from jsparse.selection import Selection, everything
from tests.kernels.cases.place_logits import CASES, Case

pytestmark = pytest.mark.gpu
LONG = Case("long", batch=8, kv_heads=8, num_pages=8192, capacity=819)
LONG_DENSE = Case("long_dense", num_pages=2050, capacity=300, dense="mixed")


@partial(jax.jit, static_argnames=("case", "stats", "implementation"))
def place(inputs, case, stats, implementation="triton"):
    return place_logits(*inputs, stats=stats, **case.sizes, implementation=implementation)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*CASES, LONG, LONG_DENSE], ids=str)
def test_does_what_the_reference_does(case, seed):
    """The results agree in all cases, whose unread logits are NaN."""
    inputs = case.build(seed)
    want = place(inputs, case, "token_logits", "reference")
    np.testing.assert_array_equal(place(inputs, case, "token_logits"), want)
    mass, want_mass = (
        np.asarray(place(inputs, case, "page_mass", name)) for name in ("triton", "reference")
    )
    assert mass.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(mass), np.isneginf(want_mass))
    np.testing.assert_allclose(mass, want_mass, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stats", ["page_mass", "token_logits"])
def test_twenty_runs_give_the_same_bits(stats):
    inputs = LONG.build()
    first = np.asarray(place(inputs, LONG, stats))
    for _ in range(19):
        np.testing.assert_array_equal(first, place(inputs, LONG, stats))


@pytest.mark.parametrize("stats", ["page_mass", "token_logits"])
def test_the_tile_and_the_batch_change_no_bit(stats, monkeypatch):
    from jsparse.pallas_kernels.place_logits import triton_gpu

    inputs = LONG.build()
    run = partial(triton_gpu.place_logits, stats=stats, **LONG.sizes)
    together = np.asarray(run(*inputs))
    logits, selection, lengths = inputs
    chosen = Selection(selection.ids[5:6], selection.count[5:6])
    monkeypatch.setattr(triton_gpu, "TILE", 1024)
    monkeypatch.setattr(triton_gpu, "NUM_WARPS", 2)
    np.testing.assert_array_equal(run(logits[40:48], chosen, lengths[5:6]), together[5:6])


@pytest.mark.parametrize("dense", ["none", "mixed", "all"])
def test_heads_longer_than_their_room_read_nothing_else(dense):
    # after an overflow lengths exceed the capacity; results count for nothing, but no memory
    # beyond may be read
    case = Case("", num_pages=700, lengths="full", listed="newest", capacity=2, dense=dense)
    inputs = case.build()
    longer = inputs._replace(lengths=inputs.lengths + 1000)
    for stats in ("page_mass", "token_logits"):
        np.testing.assert_array_equal(place(longer, case, stats), place(inputs, case, stats))


def test_more_than_two_to_the_31_logits_in_and_out():
    pairs, pages, size = 9, 1 << 24, 16
    lengths = jnp.full((1, pairs), pages * size, jnp.int32)
    sizes = {"num_pages": pages, "page_size": size, "implementation": "triton"}

    @jax.jit
    def last():
        logits = jnp.arange(pairs * 2 * size, dtype=jnp.float32).reshape(pairs, -1)
        listed = Selection(jnp.full((1, pairs, 1), pages - 1, jnp.int32), jnp.ones_like(lengths))
        placed = place_logits(logits, listed, lengths, stats="token_logits", **sizes)
        many = jnp.full((pairs, pages * size), -jnp.inf).at[-1, -1].set(7.0)
        mass = place_logits(many, everything(lengths), lengths, stats="page_mass", **sizes)
        return placed[0, -1, -size:], logits[-1, :size], mass[0, -1, -2:]

    placed, want, mass = last()
    np.testing.assert_array_equal(placed, want)
    np.testing.assert_array_equal(mass, [-np.inf, 7.0])
