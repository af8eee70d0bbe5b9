"""Builds a method from two functions: a page's summary, and its score for a query.

Quest, ArkVale and similar methods differ only in these two functions. `page_policy` maintains the
summaries of all pages and attends to the pages with the highest scores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.cache import CacheSpec, LayerCache, StepView, physical_pages, read_pages
from jsparse.hooks import State
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.policies.sidecars import Sidecar, sidecar
from jsparse.policy import Policy, knob
from jsparse.selection import Selection
from jsparse.shapes import ChunkKV, Lengths, Queries, Rows

Summarise = Callable[[Float[Array, "P H"], Bool[Array, "P"]], Any]
Score = Callable[[Float32[Array, "G H"], Any], Float[Array, ""]]
LARGE = 1e37  # higher scores are reduced to it, so that the newest page's is higher


class Settings(NamedTuple):
    """The arguments of `page_policy`."""

    summarise: Summarise
    score: Score
    budget: int


def page_policy(summarise: Summarise, score: Score, budget: int = 1024) -> Policy:
    """Attends to `budget` tokens, in the pages with the highest scores.

    These are budget // P pages, always including the newest, partly filled one. Call it in a
    function marked `@builder`, so that equal arguments give one policy, with a name.

    Both functions are traced. They see one page of one KV head, and are independent of the batch,
    of other heads, layers and pages, and of sharing.

    Args:
        summarise: returns the summary of a page, a tree of arrays of any shapes and dtypes. It
            receives keys[P, H], as cached, and valid[P], true for the slots with a token: a prefix
            of at least one. The other slots repeat the newest key, so minimum and maximum are exact
            without `valid`; sums and means need it. A page is summarised again whenever it gets
            tokens.
        score: returns one number, the importance of a page for the queries q[G, H], in float32, of
            the heads that share its KV head, given its summary. NaN and -inf exclude a page, unless
            it is the newest.
        budget: the number of tokens that a KV head attends to. Rows may set a smaller one; a larger
            one counts as `budget`.

    Returns:
        A policy that shares pages and can be `offloaded`.

    Raises:
        ValueError: budget is not an integer of at least 1, or, when traced, score does not return
            one number.
    """
    whole_number("budget", budget, 1)
    settings = Settings(summarise, score, budget)
    return Policy(
        partial(select, settings),
        **page_summaries(summarise)._asdict(),
        shares="pages",
        per_row={"budget": partial(whole_number, minimum=1)},
        reads=0,
        name=f"page_policy({_name(summarise)}, {_name(score)}, budget={budget})",
    )


def page_summaries(summarise: Summarise) -> Sidecar:
    """Returns a sidecar with the summaries of all pages, by layer and physical page.

    Args:
        summarise: as in `page_policy`.
    """
    return sidecar(partial(empty, summarise), partial(taken_in, summarise))


def empty(summarise: Summarise, spec: CacheSpec) -> Any:
    """Returns a layer's initial summaries, indexed by physical page; their values are unused."""
    keys = jax.ShapeDtypeStruct((spec.page_size, spec.head_dim), spec.dtype)
    valid = jax.ShapeDtypeStruct((spec.page_size,), jnp.bool_)
    kept = jax.eval_shape(summarise, keys, valid)
    return jax.tree.map(lambda x: jnp.zeros((spec.pages, *x.shape), x.dtype), kept)


def taken_in(
    summarise: Summarise,
    entry: Any,
    kv: LayerCache,
    k: ChunkKV,
    valid: Rows,
    first: Lengths,
    /,
) -> Any:
    """Recomputes the summaries of the pages that contain the new tokens."""
    # T slots that do not start at a page's first slot touch one more page
    touched = min((k.shape[1] + kv.page_size - 2) // kv.page_size + 1, kv.num_pages)
    pages = first[..., None] // kv.page_size + jnp.arange(touched, dtype=jnp.int32)
    within = jnp.clip(pages, 0, kv.num_pages - 1)
    keys, there = _filled_up(read_pages(kv.k, kv, within), kv, within)
    new = _over(3, summarise)(keys, there)
    fresh = (pages == within) & there[..., 0] & (valid > 0)[:, None, None]
    # other pages get an out-of-range index, so their updates are dropped
    at = jnp.where(fresh, physical_pages(kv, within), kv.k.shape[0])
    return jax.tree.map(lambda pool, x: pool.at[at].set(x, mode="drop"), entry, new)


def _filled_up(
    keys: Float[Array, "B K n P H"], kv: LayerCache, pages: Int32[Array, "B K n"]
) -> tuple[Float[Array, "B K n P H"], Bool[Array, "B K n P"]]:
    """Returns pages with their newest key in all empty slots, and a mask of the filled slots."""
    count = jnp.clip(kv.lengths[..., None] - pages * kv.page_size, 0, kv.page_size)
    there = jnp.arange(kv.page_size, dtype=jnp.int32) < count[..., None]
    at = jnp.maximum(count - 1, 0)[..., None, None]
    newest = jnp.take_along_axis(keys, at, axis=3)
    return jnp.where(there[..., None], keys, newest), there


def select(
    settings: Settings, state: State, layer: int, q: Queries, view: StepView
) -> tuple[Selection, None, State]:
    """Lists the pages with the highest scores, and the newest."""
    kv = view.layers[layer]
    pages = min(max(settings.budget // kv.page_size, 1), kv.num_pages)
    wanted = knob(view, "budget", pages * kv.page_size)
    rule = TopK(pages if isinstance(wanted, int) else wanted.astype(jnp.int32) // kv.page_size)
    scores = page_scores(settings, state[layer], q, kv)
    chosen = threshold_select(
        scores[:, :, None], rule, capacity=pages, granularity="page", weights="raw"
    )
    return chosen, None, state


def page_scores(
    settings: Settings, entry: Any, q: Queries, kv: LayerCache
) -> Float32[Array, "B K M"]:
    """Scores every logical page: the newest highest, empty pages -inf."""
    heads = *kv.lengths.shape, kv.num_pages

    def of_heads(pool: Array) -> Array:
        pages = pool if kv.block_table is None else pool[kv.block_table]
        return pages.reshape(*heads, *pool.shape[1:])

    grouped = q.astype(jnp.float32).reshape(*heads[:2], -1, q.shape[-1])
    over_pages = jax.vmap(settings.score, in_axes=(None, 0))
    scores = _over(2, over_pages)(grouped, jax.tree.map(of_heads, entry))
    if getattr(scores, "shape", None) != heads:
        made = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape[3:]]}", scores)
        raise ValueError(f"score={_name(settings.score)}: must return one number, not {made}")
    nth = jnp.arange(kv.num_pages, dtype=jnp.int32)
    used = nth * kv.page_size < kv.lengths[..., None]
    newest = nth == (kv.lengths[..., None] - 1) // kv.page_size
    scores = jnp.where(used, jnp.minimum(scores.astype(jnp.float32), LARGE), -jnp.inf)
    return jnp.where(newest, 2 * LARGE, scores)


def _over(axes: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one page over `axes` leading axes."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
