"""Tests expert_product against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.pallas_kernels.expert_product import expert_product, grouping, xla_blocks
from tests.kernels.cases.expert_product import CASES, OTHERS, Case
from tests.support.marks import slow_except_named

NAMES = "few_rows", "absent", "many_down"


def expected(case, x, matrices, chosen, weights):
    """Each pair's product in float64, one after the other."""
    x, matrices, chosen = np.asarray(x, np.float64), np.asarray(matrices, np.float64), chosen
    made = np.zeros((*chosen.shape, case.out // 2 if case.gated else case.out))
    for nth, row in np.ndindex(*chosen.shape):
        if (expert := int(chosen[nth, row])) >= case.experts:
            continue
        y = (x[nth, row] if case.each else x[row]) @ matrices[expert]
        if case.gated:
            gate, up = np.split(y, 2)
            y = gate / (1 + np.exp(-gate)) * up
        made[nth, row] = y if weights is None else y * float(weights[nth, row])
    return made


def assert_right(y, case, inputs):
    wanted = expected(case, *inputs)
    step = max(float(jnp.finfo(inputs[0].dtype).eps), 2.0**-20)
    assert y.shape == wanted.shape
    assert np.abs(np.asarray(y, np.float64) - wanted).max(initial=0) <= (
        step * np.abs(wanted).max(initial=1)
    )


@pytest.mark.parametrize("case", slow_except_named((*CASES, *OTHERS), *NAMES), ids=str)
@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_pairs_are_multiplied(case, implementation):
    inputs = case.build()
    options = {"gated": case.gated, "implementation": implementation}
    y = jax.jit(lambda *given: expert_product(*given, **options))(*inputs)
    assert y.dtype == inputs[0].dtype
    assert_right(y, case, inputs)


def test_groups_hold_each_pair_once():
    chosen = np.array([[3, 0, 3, 5, 3], [1, 3, 0, 3, 9]], np.int32)
    pairs, owners = (
        np.asarray(x) for x in jax.jit(grouping.grouped, static_argnums=(1, 2))(chosen, 5, 2)
    )
    assert len(owners) == 10 // 2 + 5
    found = {}
    for block, expert in zip(pairs.tolist(), owners.tolist(), strict=True):
        if expert < 5:
            found.setdefault(expert, []).extend(pair for pair in block if pair < 10)
        else:
            assert block == [10, 10]
    assert found == {0: [1, 7], 1: [5], 3: [0, 2, 4, 6, 8]}


def test_experts_that_nobody_chose_are_not_read():
    x, matrices, chosen, _ = Case("one", rows=3, k=2, experts=8, dtype="float32").build()
    unread = np.setdiff1d(np.arange(8), np.asarray(chosen))
    assert unread.size
    broken = matrices.at[unread].set(np.nan)
    np.testing.assert_array_equal(
        xla_blocks.expert_product(x, broken, chosen), xla_blocks.expert_product(x, matrices, chosen)
    )


def test_gradient_is_that_of_the_reference():
    x, matrices, chosen, weights = Case("w", rows=40, weighted=True, dtype="float32").build()

    def gradients(implementation):
        def loss(x, matrices, weights):
            given = x, matrices, chosen, weights
            return jnp.sum(expert_product(*given, gated=True, implementation=implementation) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, matrices, weights)

    for one, other in zip(gradients("blocks"), gradients("reference"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_misfits_are_refused():
    x, matrices, chosen, _ = Case("one", rows=3, k=2).build()
    for given, message in (
        ((x[:2], matrices, chosen), r"x.shape=\(2, 96\): must be \(3, 96\) or \(2, 3, 96\)"),
        ((x[None], matrices, chosen), r"x.shape=\(1, 3, 96\): must be \(2, 3, 96\)"),
        ((x.astype("float32"), matrices, chosen), "matrices.dtype=bfloat16: must be that of x"),
    ):
        with pytest.raises(ValueError, match=message):
            expert_product(*given)
    with pytest.raises(ValueError, match="must be gate | up, of an even number"):
        expert_product(x, matrices[..., :5], chosen, gated=True)
