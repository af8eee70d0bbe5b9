"""R-KV drops tokens with little attention and keys that repeat others, while a model reasons.

Paper: "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (Cai et al.),
arXiv:2505.24133.

Where we differ: redundancy is measured only among the competing slots, without the protected ones;
and a key without similar ones keeps all of its cosines (in the authors' code it loses that with the
first key). Importance is a softmax over the competing slots, as in the authors' code.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jsparse.builder import builder
from jsparse.cache import LayerCache, read_heads
from jsparse.hyper_parameters import fraction, whole_number
from jsparse.pallas_kernels.window_attention import window_attention
from jsparse.policies.eviction.budgets import CountBounds, competing_room, uniform
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, Settings
from jsparse.policies.eviction.window import pooled
from jsparse.policy import Policy

SIMILAR = 0.5  # the cosine above which two keys count as similar
WIDTH = 7  # of the maximum over neighbours
IMPORTANCE = 0.07  # the default of the authors' class; their script for math passes 0.1
BLOCK_BYTES = 2**28  # of one block of cosines


@builder
def r_kv(
    budget: int = 1024, window: int = 8, period: int = 128, importance: float = IMPORTANCE
) -> Policy:
    """Keeps `budget` slots per KV head: the newest, and the most important and rarest others.

    Args:
        budget: the number of slots that a KV head keeps at each compression, including the
            window's.
        window: the number of newest tokens that are kept and whose queries measure importance.
        period: the number of new tokens between compressions.
        importance: the weight of importance; that of redundancy is 1 - importance.
    """
    whole_number("window", window, 1)
    room = competing_room(budget, window)
    whole_number("period", period, 1)
    fraction("importance", importance)
    settings = Settings(
        important_and_rare(importance),
        uniform(CountBounds(0, room, room)),
        kept=room,
        max_length=lambda prompt_tokens, new_tokens: min(
            prompt_tokens + new_tokens, budget + period
        ),
        window=window,
        period=period,
    )
    return evicting(settings)


def important_and_rare(importance: float):
    """Scores slots by the window's attention minus the redundancy of their keys."""

    def score(view: LayerView) -> Float32[Array, "B K S"]:
        attention = window_attention(
            view.ring, view.positions, view.kv, view.competing, group="max"
        )
        attention = pooled(attention, view.competing, WIDTH, "max")
        alike = jnp.where(view.competing, mean_cosines(view.kv, view.competing), -jnp.inf)
        return importance * attention - (1 - importance) * jax.nn.softmax(alike, axis=-1)

    return score


def mean_cosines(kv: LayerCache, competing: Bool[Array, "B K S"]) -> Float32[Array, "B K S"]:
    """Returns the mean cosine of each competing key with all competing keys.

    The cosine with itself counts as 0. So does, for every key i, the cosine with the last similar
    key j: of keys that repeat each other the newest is spared.
    """
    k = read_heads(kv.k, kv).astype(jnp.float32)
    k = jnp.where(competing[..., None], k, 0.0)
    unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-30)
    batch, heads, slots, _ = unit.shape
    block = max(min(BLOCK_BYTES // (4 * batch * heads * slots), slots), 1)
    column = jnp.arange(slots, dtype=jnp.int32)

    def add(total: Array, start: Array) -> tuple[Array, None]:
        at = start + jnp.arange(block, dtype=jnp.int32)
        # indices past the end read the last slot again, and do not count
        some = jnp.where((at < slots)[:, None], unit[:, :, jnp.minimum(at, slots - 1)], 0.0)
        cosines = jnp.einsum("bkih,bksh->bkis", some, unit, precision=jax.lax.Precision.HIGHEST)
        cosines = jnp.where(at[:, None] == column, 0.0, cosines)
        last = jnp.max(jnp.where(cosines > SIMILAR, column, -1), axis=-1, keepdims=True)
        return total + jnp.sum(jnp.where(column == last, 0.0, cosines), axis=2), None

    starts = jnp.arange(0, slots, block, dtype=jnp.int32)
    total = jax.lax.scan(add, jnp.zeros(unit.shape[:3]), starts)[0]
    return total / jnp.maximum(jnp.sum(competing, -1, keepdims=True), 1)
