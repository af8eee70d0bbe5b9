"""Tests the Mosaic GPU kernel on any machine.

Its body is interpreted, its code lowered for CUDA, and its schedule checked numerically.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsparse.cache import LayerCache
from jsparse.pallas_kernels import dispatch
from jsparse.pallas_kernels.block_sparse_decode import api, heads, mosaic, schedule
from jsparse.pallas_kernels.block_sparse_decode.api import block_sparse_decode
from jsparse.selection import Selection
from tests.kernels.cases.block_sparse_decode import Case
from tests.support.dense_attention import expected
from tests.support.marks import slow_except

# two blocks of two teams; every head of up to four tiles is cut into single tiles
TILES = schedule.Tiles(blocks=2, splits=(4, 2, 1), min_tiles=1, many=1)
BASE = Case("base", num_pages=9, dtype="bfloat16")
CASES = [
    BASE,
    replace(
        BASE, name="bits_dense_scrambled", bits=True, dense="mixed", table="scrambled", bias=True
    ),
    replace(BASE, name="past_the_length", listed="all", head_dim=64, group=3, table="shared"),
    replace(BASE, name="newest_alone", listed="newest", page_size=8, kv_heads=3),
    replace(BASE, name="newest_missing", listed="first", page_size=64, num_pages=3, group=16),
    replace(BASE, name="nothing", listed="none"),
    replace(BASE, name="bias", bias=True, page_size=32, num_pages=5),
    replace(BASE, name="many_queries", group=63, dense="all", batch=1),
    replace(BASE, name="wide_dense", head_dim=256, dense="all", page_size=32, num_pages=5),
]


# all features at once
SOME = (CASES[1],)


@pytest.mark.parametrize("case", slow_except(CASES, *SOME), ids=str)
def test_interpreted_body_matches_dense_attention(case):
    inputs = case.build()
    tiles = TILES if case.head_dim <= 128 else TILES._replace(teams=1)
    stats = "token_logits"
    run = partial(
        mosaic.block_sparse_decode, sm_scale=0.1, stats=stats, tiles=tiles, interpret=True
    )
    out = jax.jit(run)(*inputs)
    want = expected(inputs, 0.1)
    close = partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2)
    assert out.stats is not None
    close(out.o, want.o)
    close(out.lse, want.lse)
    np.testing.assert_array_equal(np.asarray(out.o)[np.isneginf(want.lse)], 0)
    np.testing.assert_array_equal(np.isneginf(out.stats.scores), np.isneginf(want.token_logits))
    close(out.stats.scores, want.token_logits)
    close(out.stats.lse, want.stats_lse)


def test_newest_page_is_added_unless_listed():
    """The list may end before that page, with it, or past it."""
    sizes = SimpleNamespace(pairs=1, capacity=6, page_size=16)
    arrays = SimpleNamespace(ids=jnp.array([[1, 2, 4, 5, 7, 8]], jnp.int32))

    @jax.jit
    @jax.vmap
    def lacks(count, length):
        head = heads.Head(splits=1, tiles=1, dense=jnp.int32(0), length=length, count=count)
        last = heads.last_listed(sizes, arrays, 0, head)
        return heads.lacks_newest(sizes, arrays, 0, head, last)

    pairs = np.array([*product(range(1, 7), range(1, 160))], np.int32)
    wanted = [(length - 1) // 16 not in arrays.ids[0, :n].tolist() for n, length in pairs.tolist()]
    np.testing.assert_array_equal(lacks(*pairs.T), wanted)


SIZES = [  # heads and pages: each value at least once, the extremes together
    *((192, 16), (128, 16), (64, 8), (64, 64), (128, 32), (128, 64), (256, 8), (256, 64)),
]


@pytest.mark.parametrize("sizes", slow_except(SIZES, SIZES[0]), ids=str)
@pytest.mark.parametrize(
    "full", slow_except([False, True], True), ids=["list", "everything_else_too"]
)
def test_lowers_for_cuda(sizes, full):
    """Lowering checks layouts, alignment and shared memory, and needs no GPU."""
    head_dim, page_size = sizes
    batch, heads, group, pages, capacity = 3, 2, 63 if full else 3, 40, 7
    spec = jax.ShapeDtypeStruct
    pool = spec((batch * heads * pages, page_size, head_dim), jnp.float16 if full else jnp.bfloat16)
    table = spec((batch, heads, pages), jnp.int32) if full else None
    bias = spec(pool.shape[:2], jnp.float32) if full else None
    layer = LayerCache(pool, pool, spec((batch, heads), jnp.int32), table, bias)
    listed = spec((batch, heads, capacity), jnp.int32)
    chosen = (
        listed,
        spec((batch, heads), jnp.int32),
        spec(listed.shape, jnp.uint32) if full and page_size <= 32 else None,
        spec((batch, heads), jnp.bool_) if full else None,
    )
    tiles = schedule.tiles(head_dim, mixed=full)

    def attend(q, layer, chosen):
        stats, selection = "page_mass" if full else None, Selection(*chosen)
        return mosaic.block_sparse_decode(
            q, layer, selection, sm_scale=0.1, stats=stats, tiles=tiles
        )

    q = spec((batch, heads * group, head_dim), pool.dtype)
    lowered = jax.jit(attend).trace(q, layer, chosen).lower(lowering_platforms=("cuda",))
    assert "block_sparse_decode" in lowered.as_text()


FINE = schedule.Tiles(1, splits=(12, 6, 3), min_tiles=2, many=2)
beginning = jax.jit(schedule.beginning)


@jax.jit
def splits_of(num_tiles):
    return schedule.num_splits(num_tiles, FINE)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=40), st.integers(1, 50))
def test_every_split_belongs_to_one_share(tiles_of, blocks):
    t = FINE._replace(blocks=blocks)
    splits = splits_of(np.pad(np.array(tiles_of, np.int32), (0, 40 - len(tiles_of))))
    splits = np.asarray(splits)[: len(tiles_of)]
    total, bases = sum(tiles_of), np.concatenate([[0], np.cumsum(tiles_of)[:-1]])
    begins = [bases[h] + i * tiles_of[h] // n for h, n in enumerate(splits) for i in range(n)]
    assert begins == sorted(set(begins)), "a split without tiles"
    assert max(splits) <= schedule.max_splits(max(tiles_of), t)
    for h, n in enumerate(splits):
        for before in (0, 1, tiles_of[h] // 2, tiles_of[h]):
            expected_count = sum(i * tiles_of[h] // n < before for i in range(n))
            assert int(beginning(*map(np.int32, (tiles_of[h], n, before)))) == expected_count
    edges = [i * total // t.shares for i in range(t.shares + 1)]
    taken = [sum(a <= b < e for b in begins) for a, e in pairwise(edges)]
    assert sum(taken) == len(begins)


@pytest.mark.parametrize("mixed", [False, True])
def test_splits_depend_only_on_the_head_and_grow_with_it(mixed):
    t = schedule.tiles(128, mixed)
    counts = np.asarray(jax.jit(lambda n: schedule.num_splits(n, t))(np.arange(5000)))
    assert counts[0] == 0
    assert (np.diff(counts) >= 0).all()
    assert counts.max() == max(t.splits)
    assert [schedule.max_splits(n, t) for n in range(1, 5000, 7)] == counts[1:5000:7].tolist()


def test_refusals_give_the_reason():
    inputs = BASE.build()
    for name in ("mosaic", "triton"):
        with pytest.raises(ValueError, match=rf"implementation='{name}': .*needs an NVIDIA GPU"):
            block_sparse_decode(*inputs, implementation=name)
    names = r"\['mosaic', 'triton', 'reference'\]"
    with pytest.raises(ValueError, match=rf"implementation='cuda': .*has {names}"):
        block_sparse_decode(*inputs, implementation="cuda")


def on_a_gpu(monkeypatch, capability):
    monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)


def test_pages_use_the_kernel_of_the_gpu(monkeypatch):
    """Hopper's kernel supports 16-bit dtypes, the other one all."""
    rest = {"stats": None, "sm_scale": 1.0, "dtype": jnp.float32}
    for here, dtype, takes in (
        ((9, 0), "bfloat16", "mosaic"),
        ((9, 0), "float32", "triton"),
        ((8, 0), "bfloat16", "triton"),
        ((12, 0), "float16", "triton"),
    ):
        on_a_gpu(monkeypatch, here)
        inputs = replace(BASE, dtype=dtype).build()
        runs = [b.name for b in api.BACKENDS if b.refusal(*inputs, **rest) is None]
        assert runs[0] == takes, (here, dtype)
    on_a_gpu(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"needs compute capability 8 or more: this GPU has 7\.5"):
        block_sparse_decode(*BASE.build(), implementation="triton")


def test_queries_leave_room_for_keys_in_shared_memory_of_small_gpus(monkeypatch):
    on_a_gpu(monkeypatch, (8, 9))
    for head_dim, dtype, stats, most in (
        (128, "bfloat16", None, 64),
        (128, "bfloat16", "page_mass", 63),
        (96, "float32", None, 16),
        (256, "bfloat16", None, 32),
        (256, "float32", "token_logits", 15),
    ):
        for group in (most, most + 1):
            case = replace(
                BASE, head_dim=head_dim, dtype=dtype, group=group, kv_heads=1, num_pages=1
            )
            reason = api.BACKENDS[1].refusal(
                *case.build(), stats=stats, sm_scale=1.0, dtype=jnp.float32
            )
            said = reason is not None and f"of {head_dim} channels in {dtype}" in reason
            assert said == (group > most), (head_dim, dtype, stats, group)
