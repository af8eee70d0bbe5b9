"""Tests the kernels of expert_product and expert_choice on a GPU, against numpy and XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.expert_choice import expert_choice
from jsparse.pallas_kernels.expert_product import expert_product
from tests.kernels.cases import expert_choice as choice_cases
from tests.kernels.cases.expert_product import CASES, Case
from tests.kernels.test_expert_product import assert_right

pytestmark = pytest.mark.gpu
# of a layer of Qwen3 30B-A3B
UP = {"k": 8, "experts": 128, "width": 2048, "out": 1536, "gated": True}
DOWN = {"k": 8, "experts": 128, "width": 768, "out": 2048, "each": True, "weighted": True}
LARGE = [
    Case(f"{name} of {rows}", rows=rows, **sizes)
    for rows in (1, 8, 64, 65, 700)
    for name, sizes in (("gate_up", UP), ("down", DOWN))
]


def run(case, inputs, **options):
    given = {"gated": case.gated, "implementation": "triton"} | options
    return jax.jit(lambda *arrays: expert_product(*arrays, **given))(*inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_are_multiplied(case):
    inputs = case.build()
    assert_right(run(case, inputs), case, inputs)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_products_are_those_of_blocks(case):
    inputs = case.build()
    got, wanted = (
        np.asarray(run(case, inputs, dtype=jnp.float32, implementation=name))
        for name in ("triton", "blocks")
    )
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(("name", "sizes"), [("gate_up", UP), ("down", DOWN)])
def test_row_alone_has_the_bits_that_it_has_in_a_batch(name, sizes):
    case = Case(name, rows=40, **sizes)
    x, matrices, chosen, weights = case.build()
    batch = run(case, (x, matrices, chosen, weights))
    for row in (0, 17, 39):
        own = x[:, row : row + 1] if case.each else x[row : row + 1]
        factors = None if weights is None else weights[:, row : row + 1]
        alone = run(case, (own, matrices, chosen[:, row : row + 1], factors))
        np.testing.assert_array_equal(
            *(np.asarray(y, np.float32) for y in (alone[:, 0], batch[:, row]))
        )


def test_many_rows_have_a_gradient():
    case = Case("w", rows=200, weighted=True, dtype="bfloat16")
    x, matrices, chosen, weights = case.build()

    def gradients(implementation):
        def loss(x, matrices, weights):
            y = expert_product(x, matrices, chosen, weights, implementation=implementation)
            return jnp.sum(y.astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, matrices, weights)

    for one, other in zip(gradients("triton"), gradients("blocks"), strict=True):
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (one, other)))


@pytest.mark.parametrize("case", choice_cases.CASES, ids=str)
def test_choices_are_those_of_the_reference(case):
    (logits,) = case.build()
    got, wanted = (
        expert_choice(logits, case.k, normalized=case.normalized, implementation=name)
        for name in ("triton", "reference")
    )
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5, atol=1e-30)
