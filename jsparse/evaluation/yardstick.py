"""Measures how good a selector is, against exact top-k attention that reads the same bytes.

In each sample `oracle_top_k` has as many tokens as the policy read K and V of, on average over
layers, heads and steps, and decodes the same continuation. The policy's KL over the oracle's says
in one number how much its selection loses: 1 is perfect. Reads that serve the choice do not count:
the oracle reads all keys for it.

    forcing = force(params, ["quest(budget=256)"], prompts, max_new_tokens=64)
    found = closeness(forcing)
    print(found.kl.mean(axis=(1, 2)) / yardsticks(forcing, found).kl.mean(axis=(1, 2)))
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from jsparse.evaluation.closeness import Closeness, compare
from jsparse.evaluation.teacher_forcing import Forcing
from jsparse.policies.oracle import oracle_top_k
from jsparse.runtime.spread_programs import on_host

ALL = 1 - 1e-6  # the share from which on everything was read; float32 may leave it below 1


class Yardsticks(NamedTuple):
    """Holds the oracle's closeness to dense attention, for R policies and B samples of n steps.

    Attributes:
        budget: the oracle's number of tokens per head and step, rounded down, since it also reads
            the newest token; 0: the policy read everything, and there is no yardstick.
        kl: KL(dense ‖ oracle) in nats; NaN where there is none.
    """

    budget: Int32[np.ndarray, "R B"]
    kl: Float32[np.ndarray, "R B n"]


def yardsticks(forcing: Forcing, found: Closeness) -> Yardsticks:
    """Runs the oracle with the number of tokens that each policy of `found` read per sample.

    All budgets run the same compiled programs, since they are arguments of these, and equal ones
    are run once.
    """
    shared = forcing.shared
    lengths = on_host(shared.prefilled.cache.positions, shared.params.mesh)[:, None] + 1
    lengths = lengths + np.arange(len(forcing.reference))
    # a share in float32 may be a little less than the exact fraction
    tokens = np.floor(np.mean(found.read * lengths, axis=-1) + 0.01).astype(np.int32)
    budget = np.where((found.read >= ALL).all(axis=-1), 0, np.maximum(tokens, 1))
    oracle, none = oracle_top_k(budget=2**30), np.full(found.kl.shape[1:], np.nan, np.float32)
    measured = {(0,) * budget.shape[1]: none}
    for row in map(tuple, budget.tolist()):
        if row not in measured:
            knobs = {"budget": jnp.asarray(np.maximum(row, 1), jnp.float32)}
            kl = compare(forcing.reference, forcing.steps_beside(oracle, knobs))[0]
            measured[row] = np.where(np.array(row)[:, None] > 0, kl, np.nan)
    return Yardsticks(budget, np.stack([measured[row] for row in map(tuple, budget.tolist())]))
