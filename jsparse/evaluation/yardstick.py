"""Measures the quality of a selector against exact top-k attention that reads the same bytes.

In each sample, `oracle_top_k` gets the number of tokens whose K and V the policy read, on average
over layers, heads and steps, and decodes the same continuation. The policy's KL over the oracle's
is one number for the loss of its selection: 1 is perfect. Reads for selecting do not count; the
oracle reads all keys for that.

    forcing = force(params, ["quest(budget=256)"], prompts, max_new_tokens=64)
    found = closeness(forcing)
    print(found.kl.mean(axis=(1, 2)) / yardsticks(forcing, found).kl.mean(axis=(1, 2)))
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from jsparse.evaluation.closeness import Closeness, compare, lengths
from jsparse.evaluation.teacher_forcing import Forcing
from jsparse.policies.oracle import oracle_top_k

ALL = 1 - 1e-6  # a larger share counts as everything; float32 may leave it below 1


class Yardsticks(NamedTuple):
    """The oracle's closeness to dense attention, for R policies and B samples of n steps.

    Attributes:
        budget: the oracle's number of tokens per head and step, rounded down, since it also reads
            the newest token; 0: the policy read everything, and there is no yardstick.
        kl: KL(dense ‖ oracle) in nats; NaN if there is none.
    """

    budget: Int32[np.ndarray, "R B"]
    kl: Float32[np.ndarray, "R B n"]


def yardsticks(forcing: Forcing, found: Closeness) -> Yardsticks:
    """Runs the oracle with the number of tokens that each policy of `found` read per sample.

    All budgets run the same compiled programs, which take them as arguments; equal budgets are run
    once.
    """
    # a share in float32 may be slightly less than the exact fraction
    tokens = np.floor(np.mean(found.read * lengths(forcing), axis=-1) + 0.01).astype(np.int32)
    budget = np.where((found.read >= ALL).all(axis=-1), 0, np.maximum(tokens, 1))
    oracle, none = oracle_top_k(budget=2**30), np.full(found.kl.shape[1:], np.nan, np.float32)
    measured = {(0,) * budget.shape[1]: none}
    for row in map(tuple, budget.tolist()):
        if row not in measured:
            knobs = {"budget": jnp.asarray(np.maximum(row, 1), jnp.float32)}
            kl = compare(forcing.reference, forcing.steps_beside(oracle, knobs))[0]
            measured[row] = np.where(np.array(row)[:, None] > 0, kl, np.nan)
    return Yardsticks(budget, np.stack([measured[row] for row in map(tuple, budget.tolist())]))
