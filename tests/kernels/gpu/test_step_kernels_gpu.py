"""Tests residual_norm and rope_append in triton next to their references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.residual_norm import cases as norm_cases
from jsparse.pallas_kernels.residual_norm import residual_norm
from jsparse.pallas_kernels.rope_append import cases as rope_cases
from jsparse.pallas_kernels.rope_append import rope_append

pytestmark = pytest.mark.gpu
WIDE = norm_cases.Case("widest", rows=5, width=16384, dtype="bfloat16")


def close(got, want, ulps=2):
    """Roundings may differ by as many of the type's steps as are at the largest number."""
    assert got.dtype == want.dtype
    got, want, step = (
        *(np.asarray(x, np.float64) for x in (got, want)),
        float(jnp.finfo(want.dtype).eps),
    )
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(got - want) <= ulps * step * size).all()


@pytest.mark.parametrize("case", [*norm_cases.CASES, WIDE], ids=lambda case: case.name)
def test_the_norm_does_what_the_reference_does(case):
    given = case.build()
    made = {
        name: jax.jit(partial(residual_norm, eps=case.eps, implementation=name))(*given)
        for name in ("triton", "reference")
    }
    for got, want in zip(made["triton"], made["reference"], strict=True):
        close(got, want)
    alone = jax.jit(partial(residual_norm, eps=case.eps, implementation="triton"))(
        *(x[-1:] for x in given[:2]), given[2]
    )
    for row, all_rows in zip(alone, made["triton"], strict=True):
        np.testing.assert_array_equal(row[0], all_rows[-1])


@pytest.mark.parametrize("case", rope_cases.CASES, ids=lambda case: case.name)
def test_rope_append_does_what_the_reference_does(case):
    heads, layer, positions, valid = case.build()

    def run(qkv, layer, implementation):
        given = heads._replace(qkv=qkv)
        return rope_append(given, layer, positions, valid, implementation=implementation)

    run = jax.jit(run, static_argnames="implementation", donate_argnames="layer")
    want = run(heads.qkv, jax.tree.map(jnp.copy, layer), "reference")
    got = run(heads.qkv, jax.tree.map(jnp.copy, layer), "triton")
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.floating):
            close(ours, theirs)
        else:
            np.testing.assert_array_equal(ours, theirs)
