"""Replays records of SmolLM2: the pages that Twilight kept and the lengths of heads.

The records are bench/results/twilight_trace and eviction_trace.
"""

import json
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.lib.environment import REPOSITORY
from jsparse.cache import StepView
from jsparse.hooks import State
from jsparse.policies import expressions
from jsparse.policies.own_code import resolve
from jsparse.policy import Policy

TRACE = REPOSITORY / "bench/results/twilight_trace/cpu.json"
LENGTHS_TRACE = REPOSITORY / "bench/results/eviction_trace/cpu.json"


@cache
def pages_kept(context: int) -> np.ndarray:
    """Returns the counts recorded at the longest context up to this one, or at the shortest."""
    traces = json.loads(TRACE.read_text(encoding="utf-8"))["traces"]
    shorter = [trace for trace in traces if trace["length"] <= context]
    return np.array((shorter or traces[:1])[-1]["pages"])


@cache
def lengths_kept() -> np.ndarray:
    """Returns the lengths of all heads after the last recorded compression."""
    return np.array(json.loads(LENGTHS_TRACE.read_text(encoding="utf-8"))["traces"][-1]["lengths"])


def replayed(policy: Policy, context: int) -> Policy:
    """Returns `policy` with the number of pages per head limited to the trace's.

    A head keeps the first of its pages. Counts are spaced evenly over the trace's and dealt to the
    heads by layer. Everything in `policy` is still computed, plus one small kernel.
    """
    recorded = pages_kept(context)

    def select(state: State, layer: int, q: Array, view: StepView):
        chosen, summary, state = policy.select(state, layer, q, view)
        dealt = jnp.asarray(spread_evenly(recorded, layer, chosen.count.shape), jnp.int32)
        return replace(chosen, count=jnp.minimum(chosen.count, dealt)), summary, state

    return policy._replace(select=select, name=f"replayed({policy.name})")


def spread_evenly(recorded: np.ndarray, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns recorded counts in this shape, at equal steps of their rank, shuffled by `seed`."""
    number = int(np.prod(shape))
    ranks = (np.random.default_rng(seed).permutation(number) + 0.5) / number
    return np.quantile(recorded, ranks, method="nearest").reshape(shape)


def parse(text: str, context: int) -> Policy:
    """Parses a policy's expression, or imports your own from `path.py:function`.

    replayed(…) around it replays the counts of that context.
    """
    replays = text.startswith("replayed(") and text.endswith(")")
    inner = text[len("replayed(") : -1] if replays else text
    resolve(inner)  # imports your own code and registers its policy with the parser under this text
    policy = expressions.parse(inner)
    return replayed(policy, context) if replays else policy
