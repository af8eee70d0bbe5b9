"""ArkVale attends to the pages whose bounding volumes allow the highest logits.

A page's summary is a cuboid around the middle c of its keys; its half extent h in each channel is
the keys' mean distance from c. The maximum of q·k over the cuboid, q·c + |q|·h, ranks the pages.

Paper: "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction" (Chen et
al.), NeurIPS 2024. It compares six volumes, spheres and cuboids; this one, cuboid-mean, finds most
of the best pages and is the default, and a sphere is the option "ball". We did not have the paper:
the formulas come from public descriptions of it and of its code.

Where we differ: no page is evicted to slow memory, so none is recalled; `offloaded` keeps all pages
there. The partly filled page is summarised like the others. The query heads of a group share their
pages, ranked by the highest score among them.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jsparse.builder import builder
from jsparse.cache import LayerCache, StepView
from jsparse.hooks import State
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.key_bounds import PageBounds
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.policies.page_policy import Summarise, page_summaries
from jsparse.policies.picks import best_pages
from jsparse.policy import Policy
from jsparse.shapes import Queries

Volume = Literal["cuboid", "ball"]


class Ball(NamedTuple):
    """The ball around the keys of a page, in K's dtype and float32."""

    center: Float[Array, "*pages H"]
    radius: Float32[Array, "*pages"]


class Settings(NamedTuple):
    """The budget, and the score of the volume."""

    budget: int
    score: Callable[[Queries, LayerCache, State], Float32[Array, "B K M"]]


@builder
def arkvale(budget: int = 1024, volume: Volume = "cuboid") -> Policy:
    """Attends to `budget` tokens, in the pages whose volumes allow the highest logits.

    These are budget // P pages, always including the newest, partly filled one.

    Args:
        budget: the number of tokens that a KV head attends to.
        volume: "cuboid" is the paper's cuboid-mean, with 2H numbers per page in K's dtype. "ball"
            is centred on the mean of a page's keys and reaches to the farthest key; it bounds every
            q·k by q·c + |q|·r, with H numbers and r per page.
    """
    whole_number("budget", budget, 1)
    one_of("volume", volume, get_args(Volume))
    summarise, score = VOLUMES[volume]
    kept = page_summaries(summarise)
    return Policy(
        partial(select, Settings(budget, score)), **kept._asdict(), shares="pages", reads=0
    )


def cuboid(keys: Float[Array, "P H"], valid: Bool[Array, "P"]) -> PageBounds:
    """Returns c ± h: c the middle of each channel's range, h the mean of |k - c|."""
    k = keys.astype(jnp.float32)
    center = (jnp.min(k, axis=0) + jnp.max(k, axis=0)) / 2  # empty slots repeat the newest key
    half = jnp.mean(jnp.abs(k - center), axis=0, where=valid[:, None])
    return PageBounds((center - half).astype(keys.dtype), (center + half).astype(keys.dtype))


def ball(keys: Float[Array, "P H"], valid: Bool[Array, "P"]) -> Ball:
    """Returns the mean key, in K's dtype, and its distance to the farthest key."""
    k = keys.astype(jnp.float32)
    center = jnp.mean(k, axis=0, where=valid[:, None]).astype(keys.dtype)
    squares = jnp.sum(jnp.square(k - center.astype(jnp.float32)), axis=-1)
    return Ball(center, jnp.sqrt(jnp.max(squares)))


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the pages with the highest scores, and the newest."""
    kv = view.layers[layer]
    scores = settings.score(q, kv, state[layer])
    return best_pages(scores, kv, settings.budget), None, state


def in_balls(q: Queries, kv: LayerCache, balls: Ball) -> Float32[Array, "B K M"]:
    """Scores pages by the highest q·c + |q|·r of a group."""
    heads = *kv.lengths.shape, kv.num_pages
    if kv.block_table is not None:
        balls = Ball(*(pool[kv.block_table] for pool in balls))
    filled = (kv.lengths + kv.page_size - 1) // kv.page_size
    center, radius = balls.center.reshape(*heads, -1), balls.radius.reshape(heads)
    return centroid_scores(q, center, filled, radius)


VOLUMES: dict[Volume, tuple[Summarise, Callable]] = {
    "cuboid": (cuboid, page_bounds),
    "ball": (ball, in_balls),
}
