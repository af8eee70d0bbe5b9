"""Tests that the yardstick of a policy is the oracle that reads the same number of tokens."""

from functools import cache

import numpy as np
import pytest

from jsparse.evaluation.closeness import closeness
from jsparse.evaluation.teacher_forcing import force
from jsparse.evaluation.yardstick import yardsticks
from jsparse.policies.expressions import parse
from jsparse.runtime.compilation import traces
from tests.support.tiny import random_prompts, random_tokens, tiny_params

PAGE, STEPS = 8, 4
PROMPTS = random_prompts((37, 18, 6))
FORCED = random_tokens(3, STEPS + 1)
POLICIES = [
    "oracle_top_k(budget=9)",
    "quest(budget=16)",
    "oracle_top_p(p=0.7)",
    "streaming(sink=1, recent=23)",
]


def forcing(policies=POLICIES):
    params = tiny_params(num_layers=1)
    return force(
        params, policies, PROMPTS, max_new_tokens=STEPS, continuation=FORCED, page_size=PAGE
    )


@cache
def measured(policies):
    run = forcing(policies)
    found = closeness(run)
    return run, found, yardsticks(run, found)


@pytest.fixture(scope="module")
def made():
    return measured((POLICIES[0], POLICIES[-1]))


def test_oracle_is_its_own_yardstick(made):
    _, found, (budget, kl) = made
    assert budget[1, :2].tolist() == [9, 9]
    np.testing.assert_allclose(kl[1, :2], found.kl[1, :2], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_budgets_are_the_tokens_read_and_kl_is_that_of_such_oracles():
    _, found, (budget, kl) = measured(tuple(POLICIES))
    lengths = np.array([[len(prompt) + nth + 1 for nth in range(STEPS)] for prompt in PROMPTS])
    assert len({*budget[3].tolist()}) == len(PROMPTS)  # top-p differs by sample
    for policy in (2, 3):
        for row in range(len(PROMPTS)):
            if not budget[policy, row]:
                continue
            read = np.mean(found.read[policy, row] * lengths[row])
            assert budget[policy, row] == int(read + 0.01)
            alone = closeness(forcing([f"oracle_top_k(budget={budget[policy, row]})"]))
            np.testing.assert_allclose(kl[policy, row], alone.kl[1, row], rtol=1e-4, atol=1e-6)


def test_policy_that_reads_everything_has_no_yardstick(made):
    _, found, (budget, kl) = made
    assert (budget[0] == 0).all() and np.isnan(kl[0]).all()
    window = found.policies.index(parse(POLICIES[-1]).name)
    assert budget[window, 0] > 0 and np.isfinite(kl[window, 0]).all()
    assert (budget[window, 1:] == 0).all() and np.isnan(kl[window, 1:]).all()


def test_budgets_share_their_programs(made):
    run, found, _ = made
    once, before = yardsticks(run, found), traces()
    again = yardsticks(run, found._replace(read=found.read * 0.7))
    assert traces() == before
    assert (again.budget[1:, 0] < once.budget[1:, 0]).all()
