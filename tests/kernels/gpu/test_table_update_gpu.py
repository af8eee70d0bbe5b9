"""Tests that table_update in triton adds what the reference adds, in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.table_update import table_update
from tests.kernels.cases.table_update import CASES, Case

pytestmark = pytest.mark.gpu
LARGE = (
    Case("large", batch=1, kv_heads=8, slots=131072, entries=5244),
    Case("large_batch", batch=8, kv_heads=8, slots=16384, entries=1500, penalty=0.5),
    Case("large_wide", batch=1, kv_heads=4, group=8, slots=40000, entries=15730, spread=30.0),
)


@partial(jax.jit, static_argnames=("sink", "penalty", "implementation"))
def updated(vertical, distance, listed, lengths, scale, **options):
    return table_update(vertical, distance, listed, lengths, scale, **options)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_adds_what_the_reference_adds(case, seed):
    inputs = case.build(seed)
    got, want = (
        updated(*inputs[:5], **inputs.kwargs, implementation=name)
        for name in ("triton", "reference")
    )
    for pair in zip(got, want, strict=True):
        table, wanted = (np.asarray(x.astype(jnp.float32)) for x in pair)
        # one rounding may fall to the other side
        np.testing.assert_allclose(table, wanted, rtol=2.0**-7, atol=1e-6)
        assert (table != wanted).mean() <= 0.01


def test_donated_tables_are_written_in_place():
    inputs = LARGE[0].build()
    run = jax.jit(
        partial(table_update, **inputs.kwargs, implementation="triton"), donate_argnums=(0, 1)
    )
    memory = run.lower(*inputs[:5]).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < inputs.vertical.nbytes
