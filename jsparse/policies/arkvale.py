"""ArkVale attends to the pages whose enclosing balls allow the greatest logits.

A page's keys lie in a ball: around their mean c, with the radius r of the farthest. So q·c + |q|·r
bounds q·k for all its tokens; pages are ranked by that.

Paper: "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction" (Chen et
al.), NeurIPS 2024.

Where we differ: no page is evicted to slow memory, so that none need be recalled. The query heads
of a group share their pages, ranked by the greatest bound among them.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache, StepView, physical_pages, read_pages
from jsparse.hooks import State
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels.centroid_scores import centroid_scores
from jsparse.pallas_kernels.threshold_select import Always, TopK, threshold_select
from jsparse.policies.sidecars import sidecar
from jsparse.policy import Policy
from jsparse.shapes import ChunkKV, Lengths, Queries, Rows

BallRank = Literal["bound", "centroid"]


class Balls(NamedTuple):
    """Holds one layer's balls, indexed by physical page; those of empty pages mean nothing."""

    center: Float[Array, "pages H"]
    radius: Float32[Array, "pages"]


@builder
def arkvale(budget: int = 1024, rank: BallRank = "bound") -> Policy:
    """Attends to `budget` tokens, in the pages whose balls allow the greatest logits.

    These are budget // P pages, always including the newest, which is still being filled.

    Args:
        budget: the number of tokens that a KV head attends to.
        rank: "bound" ranks pages by q·c + |q|·r, "centroid" by q·c.
    """
    whole_number("budget", budget, 1)
    one_of("rank", rank, get_args(BallRank))

    def select(state: State, layer: int, q: Queries, view: StepView):
        held = view.layers[layer]
        pages = min(max(budget // held.page_size, 1), held.num_pages)
        center, radius = by_head(held, state[layer])
        newest = (held.lengths[..., None] - 1) // held.page_size
        balls = jnp.minimum(newest[..., 0] + 1, held.num_pages)
        scores = centroid_scores(q, center, balls, radius if rank == "bound" else None)
        chosen = threshold_select(
            scores[:, :, None],
            TopK(pages),
            capacity=pages,
            granularity="page",
            weights="raw",
            always=Always(held.lengths, sink=0, recent=1, unit=held.page_size),
        )
        return chosen, None, state

    return Policy(select, **sidecar(empty, taken_in)._asdict(), shares="pages", reads=0)


def empty(spec: CacheSpec) -> Balls:
    """Returns a layer's balls of no tokens."""
    centers = jnp.zeros((spec.pages, spec.head_dim), spec.dtype)
    return Balls(centers, jnp.zeros(spec.pages, jnp.float32))


def taken_in(entry: Balls, held: LayerCache, k: ChunkKV, valid: Rows, first: Lengths, /) -> Balls:
    """Measures the pages anew that the new tokens lie in."""
    touched = min(-(-k.shape[1] // held.page_size) + 1, held.num_pages)
    pages = first[..., None] // held.page_size + jnp.arange(touched, dtype=jnp.int32)
    within = jnp.clip(pages, 0, held.num_pages - 1)
    keys = read_pages(held.k, held, within).astype(jnp.float32)
    nth = jnp.arange(held.page_size, dtype=jnp.int32)
    there = pages[..., None] * held.page_size + nth < held.lengths[..., None, None]
    some = jnp.maximum(jnp.sum(there, -1), 1)[..., None]
    center = jnp.sum(jnp.where(there[..., None], keys, 0.0), axis=3) / some
    center = center.astype(entry.center.dtype)
    away = keys - center[:, :, :, None].astype(jnp.float32)
    squares = jnp.sum(jnp.square(away), axis=-1)
    radius = jnp.sqrt(jnp.max(jnp.where(there, squares, 0.0), axis=-1))
    new = (pages == within) & there[..., 0] & (valid > 0)[:, None, None]
    at = jnp.where(new, physical_pages(held, within), entry.radius.size)
    return Balls(
        entry.center.at[at].set(center, mode="drop"), entry.radius.at[at].set(radius, mode="drop")
    )


def by_head(
    held: LayerCache, balls: Balls
) -> tuple[Float[Array, "B K M H"], Float32[Array, "B K M"]]:
    """Returns the centers and radii of all pages of every head."""
    heads = *held.lengths.shape, held.num_pages
    if held.block_table is not None:
        balls = Balls(*(x[held.block_table] for x in balls))
    return balls.center.reshape(*heads, -1), balls.radius.reshape(heads)
