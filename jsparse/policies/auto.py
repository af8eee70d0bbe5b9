"""Chooses a method by what was measured: dense attention where that is as fast, else Twilight.

Short contexts are fastest dense. From how many bytes of K and V on another method is faster depends
on the device; on devices that nobody has measured, CPUs among them, everything is dense.
"""

import jax
import jax.numpy as jnp

from jsparse.cache import CacheSpec
from jsparse.policies.quest import quest
from jsparse.policies.twilight import twilight
from jsparse.policy import Policy, builder, dense

# By device: the bytes of a layer's K and V, all rows together, from which `chosen` is faster than
# dense attention, whatever the batch (bench.twilight_speed).
BREAK_EVENS = {"NVIDIA H200": 180e6}


@builder
def auto() -> Policy:
    """Attend as was measured to be fastest, on this device and for these sizes, and close to dense.

    This is `dense` for short contexts, small batches and devices that were not measured, and
    Twilight over Quest elsewhere. The session decides before it reads; `Generation.stats.policy`
    and `jsparse info --policy auto` say what it chose. It cannot stand inside another policy.
    """

    def resolve(spec: CacheSpec) -> Policy:
        least = BREAK_EVENS.get(jax.local_devices()[0].device_kind)
        if least is None or layer_bytes(spec) < least:
            return dense()
        return chosen(spec)

    return Policy(dense().select, shares="pages", dense_at={}, resolve=resolve)


def chosen(spec: CacheSpec) -> Policy:
    """Return the fastest method that stays close to dense attention on models it was not tuned on.

    On SmolLM2 its KL divergence from dense attention is at most 0.005 (docs/results/quality.md).
    """
    return twilight(quest(budget=max(spec.capacity // 4, 1)), p=0.95)


def layer_bytes(spec: CacheSpec) -> int:
    """Return the bytes of K and V of one layer, all rows full."""
    tokens = spec.batch * spec.num_kv_heads * spec.capacity
    return 2 * tokens * spec.head_dim * jnp.dtype(spec.dtype).itemsize
