"""Chooses a method by what was measured: dense attention where that is as fast, else Twilight.

Short contexts are fastest dense. From how many bytes of K and V on another method is faster depends
on the device; on devices that nobody has measured, CPUs among them, everything is dense.
"""

import jax
import jax.numpy as jnp

from jsparse.cache import CacheSpec
from jsparse.policies.all_pages import all_pages
from jsparse.policies.twilight import twilight
from jsparse.policy import Policy, builder, dense

# The fastest method measured whose KL divergence from dense attention is at most 0.005 on SmolLM2,
# at 4K and 8K tokens (docs/results/twilight.md).
CHOICE = twilight(all_pages(), p=0.95)
# By device: the bytes of a layer's K and V, all rows together, from which it was faster than dense
# attention in batches of 1 to 64 (bench.twilight_speed).
BREAK_EVENS = {"NVIDIA H200": 400e6}


@builder
def auto() -> Policy:
    """Attend as was measured to be fastest, on this device and for these sizes, and close to dense.

    This is `dense` for short contexts, small batches and devices that were not measured, and
    Twilight elsewhere. The session decides before it reads; `Generation.stats.policy` and
    `jsparse info --policy auto` say what it chose. It cannot stand inside another policy.
    """

    def resolve(spec: CacheSpec) -> Policy:
        least = BREAK_EVENS.get(jax.local_devices()[0].device_kind)
        return dense() if least is None or layer_bytes(spec) < least else CHOICE

    return Policy(dense().select, shares="pages", dense_at={}, resolve=resolve)


def layer_bytes(spec: CacheSpec) -> int:
    """Return the bytes of K and V of one layer, all rows full."""
    tokens = spec.batch * spec.num_kv_heads * spec.capacity
    return 2 * tokens * spec.head_dim * jnp.dtype(spec.dtype).itemsize
