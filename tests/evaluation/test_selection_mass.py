"""Tests the attention mass of selections, and the rule that a query-blind one breaks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.cache import LayerCache
from jsparse.evaluation.contract_violations import Violation, check_mass
from jsparse.evaluation.policy_checks import check
from jsparse.evaluation.policy_trial import LayerSelection, random_model
from jsparse.evaluation.selection_mass import covered
from jsparse.policies.expressions import parse
from jsparse.selection import Selection, everything

K, G, H, P, M = 2, 2, 4, 4, 3
LENGTHS = (9, 6)


def test_shares_count_tokens_before_the_newest():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, K * G, H)).astype(np.float32)
    keys = rng.standard_normal((K, M * P, H)).astype(np.float32)
    pool = jnp.asarray(keys.reshape(K * M, P, H))
    held = LayerCache(pool, pool, jnp.array([LENGTHS], jnp.int32))
    pages = Selection(jnp.array([[[1, 0], [0, 1]]], jnp.int32), jnp.array([[1, 2]], jnp.int32))
    tokens, mass = jax.jit(covered)(jnp.asarray(q), held, pages)
    expected = []
    for head, (length, listed) in enumerate(zip(LENGTHS, ([4, 5, 6, 7], range(5)), strict=True)):
        shares = []
        for query in q[0, head * G : (head + 1) * G]:
            weights = np.exp(keys[head, : length - 1] @ query / 2)
            shares.append(weights[list(listed)].sum() / weights.sum())
        expected.append(np.mean(shares))
    np.testing.assert_allclose(tokens[0], [4 / 8, 5 / 5])
    np.testing.assert_allclose(mass[0], expected, rtol=1e-5)


def selection(tokens, mass):
    """A selection with these shares of each head of a row."""
    shares = [jnp.asarray([each], jnp.float32) for each in (tokens, mass)]
    lengths = jnp.full((1, len(tokens)), 9, jnp.int32)
    return LayerSelection(everything(lengths), lengths, *shares)


def test_selection_far_below_chance_is_blind():
    with pytest.raises(Violation, match=r"^selects 40% of .* with 20% of .*; a random .* has 40%$"):
        check_mass([selection([0.5, 0.3], [0.3, 0.1])])
    with pytest.raises(Violation):
        check_mass([selection([0.5, 0.3], [0.3, np.nan])])


def test_heads_that_attend_to_all_or_nothing_do_not_count():
    seen = check_mass([selection([1, 0, 0.5], [1, 0, 0.4]), selection([1, 1, 1], [1, 1, 1])])
    assert seen == "selects 50% of the tokens before the newest, with 40% of their attention mass"
    assert check_mass([selection([1, 0], [1, 0])]) == ""


def test_window_beats_chance_on_the_trial_model():
    policy = parse("streaming(sink=1, recent=6)")
    [finding] = check(policy, params=random_model(1), rules=["mass"]).findings
    assert finding.kept
    tokens, mass = [int(each) for each in re.findall(r"(\d+)%", finding.detail)]
    assert mass > tokens
